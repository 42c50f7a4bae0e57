"""The stores of a trainer at which it meets its servers: one for each address by which they call
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from vllm_patching.transport.addresses import (
    RendezvousError,
    is_here,
    listening_address,
    rendezvous_address,
)
from vllm_patching.transport.rendezvous import (
    KeyedStore,
    Meeting,
    connect_store,
    host_store,
    new_secret,
)

_T = TypeVar("_T")


class Rendezvous:
    """Opens the stores on rank 0, where the servers need them, and connects the other ranks to
    them.

    A store listens on one address: on loopback as long as every server is on this machine. Servers
    that join later from another machine meet at a second store.
    """

    def __init__(self, ranks: Ranks, timeout: float, port: int | None) -> None:
        """
        Args:
            timeout: seconds for each wait at a store.
            port: 0: any that is free; None: as the environment says.
        """
        self._ranks, self._timeout, self._port = ranks, timeout, port
        self._secret = new_secret()
        self._hosted: dict[str, KeyedStore] = {}  # by the address that it listens on
        self._stores: dict[tuple[str, int], KeyedStore] = {}

    def open(self, urls: Sequence[str]) -> Meeting:
        """Return where these servers meet this trainer, and open the store there. On rank 0.

        Raises:
            BridgeError: the address cannot be used, or the port is taken.
        """
        return _translate(lambda: self._open([str(urlsplit(url).hostname) for url in urls]))

    def join(self, meeting: Meeting) -> KeyedStore:
        """Return the store at a meeting that rank 0 has opened. On every rank.

        Raises:
            BridgeError: it cannot be reached.
        """
        where = meeting.host, meeting.port
        if where not in self._stores:
            who = f"trainer rank {self._ranks.rank}"
            self._stores[where] = _translate(lambda: connect_store(meeting, who, self._timeout))
        return self._stores[where]

    def _open(self, servers: Sequence[str]) -> Meeting:
        host, port = rendezvous_address(servers)
        elsewhere = next((server for server in servers if not is_here(server)), "")
        address = listening_address(host, elsewhere)
        if address not in self._hosted:
            wanted = Meeting(host, port if self._port is None else self._port, self._secret)
            self._hosted[address] = host_store(wanted, self._timeout, address)
        store = self._hosted[address]
        assert store.kept is not None, "this process hosts it"
        self._stores[host, store.kept.port] = store
        return Meeting(host, store.kept.port, self._secret)


def _translate(step: Callable[[], _T]) -> _T:
    try:
        return step()
    except RendezvousError as error:
        raise BridgeError(str(error)) from error
