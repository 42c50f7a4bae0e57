"""Limits on wrong keys, in requests and in the sign-in of the page. Pure, but for a clock that is passed in."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from atroposlib.web.addresses import network_of

TRIES, TRY_SECONDS = 10, 60.0
"""Wrong keys that one address may send in this many seconds."""
ALL_TRIES = 300
"""Wrong keys that all addresses together may type into the sign-in in TRY_SECONDS: a person may have many addresses."""
KNOWN_SECONDS = 3600.0
"""Seconds for which an address that sent the right key is not refused because of wrong ones."""
MOST_ADDRESSES = 10_000


class Attempts:
    """Counts wrong keys by address, in bounded memory.

    Args:
        clock: seconds, of a clock that never jumps.
        all_tries: wrong keys that all addresses together may send in TRY_SECONDS; None for no such limit.
    """

    def __init__(self, clock: Callable[[], float], all_tries: int | None = ALL_TRIES) -> None:
        self._clock, self._all_tries = clock, all_tries
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._succeeded: OrderedDict[str, float] = OrderedDict()
        self._all: deque[float] = deque(maxlen=all_tries or 0)

    def wait(self, address: str) -> float:
        """Return the seconds until this address may try again; 0 if it may now."""
        since = self._clock() - TRY_SECONDS
        mine = self._failed.get(network_of(address), deque())
        limited = [(mine, TRIES)] if self._all_tries is None else [(mine, TRIES), (self._all, self._all_tries)]
        waits = [times[0] - since for times, most in limited if len(times) >= most]
        return max(0.0, *waits) if waits else 0.0

    def failed(self, address: str) -> None:
        """Count a wrong key from this address."""
        now, network = self._clock(), network_of(address)
        self._all.append(now)
        self._failed.setdefault(network, deque(maxlen=TRIES)).append(now)
        _make_newest(self._failed, network)

    def succeeded(self, address: str) -> None:
        """Remember that this address sent the right key."""
        network = network_of(address)
        self._succeeded[network] = self._clock()
        _make_newest(self._succeeded, network)

    def is_known(self, address: str) -> bool:
        """Return whether this address sent the right key within KNOWN_SECONDS."""
        at = self._succeeded.get(network_of(address))
        return at is not None and self._clock() - at < KNOWN_SECONDS


def _make_newest(of: OrderedDict[str, Any], network: str) -> None:
    of.move_to_end(network)
    while len(of) > MOST_ADDRESSES:
        of.popitem(last=False)
