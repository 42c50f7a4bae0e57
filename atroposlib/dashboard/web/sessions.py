"""Sign-in: a cookie that the service signed.

The cookie holds its end and a number of its own, signed with a key that is derived from the service's API key and a
random salt. It ends by itself, and is worthless when the API key or the salt has changed. Salt and signed-out cookies
are kept in a file, so that both survive a restart of the service. If that file is lost, all sign-ins end.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from atroposlib.utils.whole_files import cannot_write, write_whole

logger = logging.getLogger(__name__)

SESSION_SECONDS = 12 * 3600.0
MOST_ENDED = 10_000
"""Signed-out sessions that are remembered. Beyond that the service forgets sessions that would have ended by now. If there are
still more, all sign-ins end."""
STATE_FILE = "sessions.json"
_SALT = re.compile(r"[0-9a-f]{32}")
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
        self._path: Path | None = None
        self._ended: dict[str, float] = {}
        self._use_salt(secrets.token_hex(16))

    def _use_salt(self, salt: str) -> None:
        self._salt = salt
        self._secret = hmac.digest(self._api_key, b"lockstep: sessions of the page " + salt.encode(), "sha256")
        # Services on other ports of the same host see each other's cookies: each has a name of its own.
        self.cookie = f"lockstep_ui_{hashlib.sha256(self._secret).hexdigest()[:8]}"

    def keep_in(self, path: Path) -> None:
        """Continue the sessions of an earlier process, and keep them in this file for the next one.

        A file that cannot be read, or holds something else, is replaced: all earlier sign-ins end.
        """
        self._path = path
        try:
            state = json.loads(path.read_bytes())
            ended = {str(number): float(ends) for number, ends in state["ended"].items()}
            if not _SALT.fullmatch(state["salt"]):
                raise ValueError("the salt is not 32 hexadecimal digits")
        except FileNotFoundError:
            self._save()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read (%s): everybody has to sign in to the page again", path, error)
            self._save()
        else:
            self._ended = ended
            self._use_salt(state["salt"])

    def _save(self) -> None:
        if self._path is None:
            return
        content = json.dumps({"salt": self._salt, "ended": self._ended}).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content, mode=0o600)
        except OSError as error:
            reason = cannot_write(self._path, error, len(content))
            logger.warning("%s; make room there: all sign-ins to the page end when this service restarts", reason)
            # Without the file the next process has another salt: no cookie that was signed out is good again.
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

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
        """Sign out: no copy of the cookie is good any more, after a restart of the service neither."""
        ends = self.ends(cookie)
        found = _FORM.fullmatch(cookie or "")
        if ends is None or found is None:
            return
        now = self._clock()
        if len(self._ended) >= MOST_ENDED:  # not before: the clock may be ahead, and what it forgets would be good again
            self._ended = {number: at for number, at in self._ended.items() if at >= now}
        if len(self._ended) < MOST_ENDED:
            self._ended[found[2]] = ends
        else:
            self._ended = {}
            self._use_salt(secrets.token_hex(16))
        self._save()

    def _signature(self, stated: str) -> str:
        return hmac.digest(self._secret, stated.encode(), "sha256").hex()
