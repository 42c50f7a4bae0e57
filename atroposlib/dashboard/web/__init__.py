"""The HTTP side of the page: sign-in, pages, data and server-sent events."""
