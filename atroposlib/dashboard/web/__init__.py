"""Who may open the page, and how it is answered: sign-in, headers, JSON, server-sent events."""
