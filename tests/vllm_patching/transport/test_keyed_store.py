"""The store that answers only programs with its secret: its operations, strangers, and groups of
torch that meet at it.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.listening import listeners
from vllm_patching.transport import addresses, rendezvous
from vllm_patching.transport.addresses import RendezvousError, gloo_group, listening_address
from vllm_patching.transport.rendezvous import (
    KeyedStore,
    Meeting,
    PeerWatch,
    StoreHost,
    StoreRefused,
    StoreTimeout,
    connect,
    connect_store,
    host_store,
    new_secret,
)

SECRET = "of the test"
ENOUGH = 60.0
WAIT = timedelta(seconds=0.05)


@pytest.fixture(scope="module")
def store() -> KeyedStore:
    return host_store(Meeting("localhost", 0, SECRET), ENOUGH)


def port_of(store: KeyedStore) -> int:
    assert store.kept is not None
    return store.kept.port


@pytest.fixture
def peer(store: KeyedStore) -> KeyedStore:
    return KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH)


@pytest.fixture
def strangers(store: KeyedStore) -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end."""
    opened: list[socket.socket] = []
    yield opened
    for one in opened:
        one.close()


def stranger_at(store: KeyedStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(store)), ENOUGH)


def read_all(connection: socket.socket) -> int:
    """Bytes until the other end closes the connection."""
    total = 0
    try:
        while more := connection.recv(4096):
            total += len(more)
    except ConnectionResetError:
        pass  # it was closed before what we sent had been read
    return total


# ---- the operations ----


@given(st.text(max_size=40), st.binary(max_size=3000), st.integers(-(2**40), 2**40))
def test_it_holds_what_torch_holds(store: KeyedStore, key: str, value: bytes, number: int) -> None:
    """The same calls to torch's own store, over connections of both sides."""
    theirs, ours = dist.HashStore(), KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH)
    base, unset = new_secret(), new_secret()
    text = value.hex()
    for one in (theirs, ours):
        one.set(f"{base}{key}", text)
    assert theirs.get(f"{base}{key}") == ours.get(f"{base}{key}") == store.get(f"{base}{key}")
    assert theirs.add(f"{base}n", number) == ours.add(f"{base}n", number)
    assert theirs.add(f"{base}n", 1) == store.add(f"{base}n", 1)
    for expected, desired in (("", "first"), ("", "second"), ("first", "third"), ("no", "fourth")):
        answers = [bytes(one.compare_set(f"{base}c", expected, desired)) for one in (theirs, ours)]
        assert answers[0] == answers[1]
    assert bytes(theirs.get(f"{base}c")) == store.get(f"{base}c")
    assert [one.check([f"{base}c", unset]) for one in (theirs, ours)] == [False, False]
    assert [one.delete_key(f"{base}c") for one in (theirs, ours)] == [True, True]
    assert [one.check([f"{base}c"]) for one in (theirs, store)] == [False, False]


def test_a_wait_ends_when_another_peer_sets_the_key_and_else_at_its_deadline(
    store: KeyedStore, peer: KeyedStore
) -> None:
    setter = threading.Thread(target=lambda: peer.set("late", "here"))
    waiting = KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH)
    setter.start()
    assert waiting.get("late") == b"here"
    setter.join()
    with pytest.raises(StoreTimeout, match=r"not set within 0\.05 s: never"):
        waiting.wait(["late", "never"], WAIT)
    waiting.set("after", "all")  # the connection is as good as before
    assert peer.get("after") == b"all"


def test_a_timeout_that_a_prefix_sets_is_the_stores(peer: KeyedStore) -> None:
    under = dist.PrefixStore("under", peer)
    under.set_timeout(WAIT)
    with pytest.raises(RuntimeError, match="under/never"):
        under.get("never")


def test_torch_may_clone_it_for_a_thread_of_its_own(peer: KeyedStore) -> None:
    clone = dist.PrefixStore("under", peer).clone()
    gc.collect()
    clone.set("a", "b")
    assert peer.get("under/a") == b"b"
    assert peer.clone().timeout == peer.timeout  # type: ignore[attr-defined]


# ---- strangers ----


def test_it_listens_on_loopback_alone(store: KeyedStore) -> None:
    assert {own.address for own in listeners([os.getpid()]) if own.port == port_of(store)} == {
        "127.0.0.1"
    }


def test_a_peer_with_another_secret_gets_nothing(store: KeyedStore) -> None:
    store.set("here", "private")
    with pytest.raises(ConnectionResetError, match="another secret"):
        connect("127.0.0.1", port_of(store), "guessed", ENOUGH)
    with pytest.raises(
        RendezvousError, match=r"vLLM rank 3 cannot join.*another secret.*MASTER_ADDR"
    ):
        connect_store(Meeting("127.0.0.1", port_of(store), "guessed"), "vLLM rank 3", ENOUGH)
    with pytest.raises((OSError, StoreRefused)):
        PeerWatch(Meeting("127.0.0.1", port_of(store), ""), ENOUGH)


def test_a_peer_does_not_trust_what_listens_in_place_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(32))
                hello = connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(hello[32:])  # the peer's own proof, sent back

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(StoreRefused, match="does not know the secret"):
            connect("127.0.0.1", impostor.getsockname()[1], SECRET, ENOUGH)
        thread.join(ENOUGH)


@given(st.binary(min_size=64, max_size=400))
def test_whatever_a_stranger_sends_it_gets_32_random_bytes_and_the_end(
    store: KeyedStore, sent: bytes
) -> None:
    with stranger_at(store) as connection:
        connection.sendall(sent)
        assert read_all(connection) <= 32


def test_torchs_own_client_gets_nothing(store: KeyedStore) -> None:
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.TCPStore(
            "127.0.0.1",
            port_of(store),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=1),
        ).get("x")


def test_a_silent_stranger_is_closed_and_many_do_not_keep_a_peer_away(
    store: KeyedStore, strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MOST_UNPROVED", 5)
    strangers += [stranger_at(store) for _ in range(12)]
    peer = KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH)
    peer.set("through", "yes")
    assert [read_all(one) for one in strangers[:7]] == [32] * 7, "the oldest made way"
    for one in strangers:
        one.close()
    monkeypatch.setattr(rendezvous, "PROOF_SECONDS", 0.05)
    last = stranger_at(store)
    strangers.append(last)
    assert read_all(last) == 32, "its time was over"
    assert peer.get("through") == b"yes"


# ---- its end ----


def test_the_port_closes_with_the_store_and_peers_see_it() -> None:
    host = StoreHost("127.0.0.1", 0, SECRET)
    meeting = Meeting("localhost", host.port, SECRET)
    watch, peer = PeerWatch(meeting, ENOUGH), KeyedStore("localhost", host.port, SECRET, ENOUGH)
    peer.set("a", "b")
    assert not watch.gone()
    port = host.port
    del host
    gc.collect()
    with pytest.raises(RuntimeError, match=f"rendezvous at localhost:{port} has gone"):
        peer.get("never")
    watch._socket.settimeout(ENOUGH)
    assert watch._socket.recv(1) == b""
    assert watch.gone()
    again = StoreHost("127.0.0.1", port, SECRET)
    with pytest.raises(RendezvousError, match=rf"localhost:{port}.*MASTER_PORT"):
        host_store(Meeting("localhost", port, SECRET), ENOUGH)
    assert again.port == port


def test_a_message_above_the_limit_ends_the_connection_alone(
    store: KeyedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH)
    monkeypatch.setattr(rendezvous, "LARGEST_MESSAGE", 1000)
    with pytest.raises(RuntimeError, match="has gone"):
        peer.set("large", "x" * 2000)
    store.set("small", "x")
    assert not store.check(["large"])


# ---- groups ----


def test_a_group_of_torch_meets_at_it(store: KeyedStore) -> None:
    stores = [KeyedStore("127.0.0.1", port_of(store), SECRET, ENOUGH) for _ in range(2)]
    results = [torch.tensor([7]), torch.tensor([0])]

    def member(rank: int) -> None:
        group = gloo_group(dist.PrefixStore("group", stores[rank]), rank, 2, "localhost", ENOUGH)
        group.broadcast([results[rank]], dist.BroadcastOptions()).wait()

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENOUGH)
    assert [int(result) for result in results] == [7, 7]


# ---- where it listens ----


@pytest.mark.parametrize(
    ("host", "elsewhere", "own", "listens"),
    [
        ("localhost", "", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", "", ["127.0.0.1"], "127.0.0.1"),
        ("10.0.0.5", "192.0.2.7", ["10.0.0.5"], "10.0.0.5"),
        (
            "trainer",
            "",
            ["127.0.1.1"],
            "127.0.1.1",
        ),  # as /etc/hosts has it; the servers here read the same file
        ("trainer", "192.0.2.7", ["127.0.1.1"], "10.0.0.5"),
        ("203.0.113.9", "192.0.2.7", [], "10.0.0.5"),  # forwarded to this machine
        ("203.0.113.9", "", [], ""),
    ],
)
def test_it_listens_on_the_address_that_the_servers_use(
    monkeypatch: pytest.MonkeyPatch, host: str, elsewhere: str, own: list[str], listens: str
) -> None:
    monkeypatch.setattr(addresses, "_addresses", lambda name: own or [name])
    monkeypatch.setattr(addresses, "_is_own", lambda address: address in own)
    monkeypatch.setattr(addresses, "own_address", lambda name: "10.0.0.5")
    assert listening_address(host, elsewhere) == listens
