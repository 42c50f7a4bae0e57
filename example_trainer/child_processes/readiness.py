"""Wait for something to become true: polled, with a deadline, and no longer than the processes live
that it needs.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from example_trainer.child_processes.processes import ProcessError

Probe = Callable[[], "str | None"]
"""Answers None when ready, else what is still missing, in a few words."""


def wait_until(
    what: str,
    probe: Probe,
    seconds: float,
    check: Callable[[], None] = lambda: None,
    interval: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Poll until the probe answers None; returns the seconds that it took.

    Args:
        what: names the thing in the error.
        probe: asked again and again.
        seconds: the deadline.
        check: called before each probe; raises when waiting on makes no sense, for instance because
            a process died.
        interval: seconds between two probes.
        clock, sleep: the time to go by.

    Raises:
        ProcessError: not ready at the deadline; the message holds the probe's last answer.
    """
    start = clock()
    while True:
        check()
        missing = probe()
        waited = clock() - start
        if missing is None:
            return waited
        if waited >= seconds:
            raise ProcessError(f"{what} was not ready after {seconds:.0f} s: {missing}")
        sleep(min(interval, seconds - waited))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Take a redirect for an error: urllib would send the key to wherever it leads."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# No proxy: these are servers on this machine.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def get_json(url: str, seconds: float = 5.0, key: str = "") -> Any:
    """GET a URL on this machine and parse the JSON answer; None for an empty body.

    Args:
        url: what to ask for.
        seconds: the deadline.
        key: bearer token; empty for none.

    Raises:
        OSError: no connection, no answer in time, or a status of 400 and above
            (urllib.error.HTTPError).
        ValueError: the answer is no JSON.
    """
    request = urllib.request.Request(url, headers=_bearer(key))
    with opener.open(request, timeout=seconds) as response:
        body = response.read()
    return json.loads(body) if body.strip() else None


def post_json(url: str, body: Any, seconds: float = 5.0, key: str = "") -> None:
    """POST JSON to a server of this run, whose answer nobody needs.

    Arguments and errors as of `get_json`.
    """
    headers = {"Content-Type": "application/json", **_bearer(key)}
    opener.open(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=seconds
    ).close()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def http_probe(url: str, seconds: float = 5.0) -> Probe:
    """A probe that is ready once GET `url` answers with a status below 400."""

    def probe() -> str | None:
        try:
            with opener.open(url, timeout=seconds):
                return None
        except urllib.error.HTTPError as error:
            return f"GET {url} answers {error.code}"
        except OSError as error:
            return f"GET {url}: {getattr(error, 'reason', error)}"

    return probe
