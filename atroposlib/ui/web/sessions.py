"""Sign-in: a cookie that the service signed. Pure, but for the clock that is passed in.

The cookie holds when it ends and a number of its own, signed with a key that is derived from the service's API key. So it is
good after a restart of the service, ends by itself, and is worthless when the API key has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable

SESSION_SECONDS = 12 * 3600.0
MOST_ENDED = 10_000
"""Sessions that were signed out and are remembered until they would have ended."""
_FORM = re.compile(r"1\.([0-9a-f]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class Sessions:
    """Who is signed in.

    Args:
        api_key: the service's.
        seconds: that a sign-in lasts.
        clock: Unix time.
    """

    def __init__(self, api_key: str, clock: Callable[[], float], seconds: float = SESSION_SECONDS) -> None:
        self.seconds, self._clock = seconds, clock
        self._api_key = api_key.encode()
        self._secret = hmac.digest(self._api_key, b"lockstep: sessions of the page", "sha256")
        # Services on other ports of the same host see each other's cookies: each has a name of its own.
        self.cookie = f"lockstep_ui_{hashlib.sha256(self._secret).hexdigest()[:8]}"
        self._ended: OrderedDict[str, float] = OrderedDict()

    def is_key(self, given: str) -> bool:
        """Whether this is the service's key. Takes as long for a wrong one as for the right one."""
        return hmac.compare_digest(given.encode(errors="replace"), self._api_key)

    def begin(self) -> str:
        """A new session's cookie."""
        stated = f"1.{int(self._clock() + self.seconds):x}.{secrets.token_hex(16)}"
        return f"{stated}.{self._signature(stated)}"

    def ends(self, cookie: str | None) -> float | None:
        """When the session of this cookie ends (Unix seconds); None if it is none of ours, or over."""
        found = _FORM.fullmatch(cookie or "")
        if cookie is None or found is None:
            return None
        stated, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature, self._signature(stated)):
            return None
        ends = float(int(found[1], 16))
        return ends if self._clock() < ends and found[2] not in self._ended else None

    def end(self, cookie: str | None) -> None:
        """Somebody signs out: the cookie is good no longer, even where a copy of it was kept."""
        ends = self.ends(cookie)
        found = _FORM.fullmatch(cookie or "")
        if ends is None or found is None:
            return
        now = self._clock()
        while self._ended and (len(self._ended) >= MOST_ENDED or next(iter(self._ended.values())) < now):
            self._ended.popitem(last=False)
        self._ended[found[2]] = ends

    def _signature(self, stated: str) -> str:
        return hmac.digest(self._secret, stated.encode(), "sha256").hex()
