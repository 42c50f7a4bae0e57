"""Limit on wrong keys in requests, by address. Pure, but for a clock that is passed in.

The rollout service has the same limit (`atroposlib/web/middleware.py`), and may not be imported here. A
test compares both.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

TRIES, TRY_SECONDS = 10, 60.0
"""Wrong keys that one address may send in this many seconds."""
KNOWN_SECONDS = 3600.0
"""Seconds for which an address that sent the right key is not refused because of wrong ones."""
MOST_ADDRESSES = 10_000


def network_of(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 address: one host may use any address in
    it.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    if parsed.version == 4 or mapped is not None:
        return str(mapped or parsed)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


class Attempts:
    """Counts wrong keys by address, in bounded memory.

    Args:
        clock: seconds, of a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._succeeded: OrderedDict[str, float] = OrderedDict()

    def wait(self, address: str) -> float:
        """Return the seconds until this address may try again; 0 if it may now."""
        times = self._failed.get(network_of(address), deque())
        return max(0.0, times[0] - (self._clock() - TRY_SECONDS)) if len(times) >= TRIES else 0.0

    def failed(self, address: str) -> None:
        """Count a wrong key from this address."""
        network = network_of(address)
        self._failed.setdefault(network, deque(maxlen=TRIES)).append(self._clock())
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
