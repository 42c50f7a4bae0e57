"""Requests that a browser may send against its user's will. Pure.

Browsers set `Origin` and `Sec-Fetch-*` themselves, and no page can change them. Programs such as
curl, aiohttp and requests send none of these headers, so the rules here do not affect them. The
rollout service has the same rules (atroposlib/web/middleware.py): neither package may import the other,
and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

SAFE_METHODS = ("GET", "HEAD")
"""Methods that a browser also uses when its user follows a link."""
SCRIPT_MODES = ("cors", "same-origin", "websocket")
"""Values of Sec-Fetch-Mode for requests that a script makes. Links, forms, frames and images have
others."""
SCRIPT_DESTINATIONS = (None, "empty", "websocket")
_SHOWN = 80
"""Characters of a header that a message quotes."""


@dataclass(frozen=True, slots=True)
class BrowserHeaders:
    """Headers by which a browser shows who sends a request; None for a header that is missing.

    Attributes:
        host: the Host header.
        origin: the Origin header.
        site, mode, destination: Sec-Fetch-Site, Sec-Fetch-Mode and Sec-Fetch-Dest.
        is_browser: the User-Agent is a browser's.
        origins: further origins that may send requests, as `scheme://host:port`.
    """

    host: str = ""
    origin: str | None = None
    site: str | None = None
    mode: str | None = None
    destination: str | None = None
    is_browser: bool = False
    origins: frozenset[str] = frozenset()

    def foreign_page(self) -> str:
        """Return the evidence that a page of another origin sends this; empty if there is none."""
        if self.origin is not None and self.origin in self.origins:
            return ""
        host = self.host.lower()
        if self.origin is not None and self.origin.lower() not in (
            f"http://{host}",
            f"https://{host}",
        ):
            return f"the request comes from the Origin {self.origin[:_SHOWN]!r}"
        if self.site not in (None, "same-origin", "none"):
            return f"the request comes from another page (Sec-Fetch-Site: {self.site[:_SHOWN]})"
        return ""

    def unproven_change(self, method: str, path: str) -> str:
        """Return why a browser may not send this request, which changes something; empty if it may.

        A browser must prove that a page of ours sends it. A link in an e-mail, a bookmark and a
        typed address prove nothing. Nor does a link or an image that our own page shows.

        Args:
            method: of the request.
            path: shown in the message.
        """
        refused = self.foreign_page()
        if refused:
            return refused
        named = f"{method} {path[:_SHOWN]}"
        is_proven = self.origin is not None or self.site == "same-origin"
        if not is_proven:
            if self.is_browser and self.site is None and self.mode is None:
                return f"{named} comes from a browser that does not name its page"
            # Some programs (Node's fetch) send Sec-Fetch-Mode: cors, and nothing else.
            from_script = (
                self.mode in (None, *SCRIPT_MODES) and self.destination in SCRIPT_DESTINATIONS
            )
            is_program = not self.is_browser and self.site is None and from_script
            return (
                "" if is_program else f"{named} changes something, and the browser {self._shown()}"
            )
        sends_mode = self.mode is not None or self.destination is not None or self.origin is None
        from_script = self.mode in SCRIPT_MODES and self.destination in SCRIPT_DESTINATIONS
        if method in SAFE_METHODS and sends_mode and not from_script:
            return f"{named} changes something, and the browser {self._shown()}"
        return ""

    def _shown(self) -> str:
        named = (
            ("Sec-Fetch-Site", self.site),
            ("Sec-Fetch-Mode", self.mode),
            ("Sec-Fetch-Dest", self.destination),
        )
        sent = ", ".join(f"{name}: {value[:_SHOWN]}" for name, value in named if value is not None)
        return f"follows a link or loads a file ({sent or 'no Sec-Fetch-Site'})"
