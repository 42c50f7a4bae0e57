"""The trainer's stores: on loopback while all servers are here, and a second one for servers that
join from another machine.
"""

from __future__ import annotations

import os

import pytest

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.stream import Rendezvous
from tests.listening import listeners
from vllm_patching.transport import addresses
from vllm_patching.transport.rendezvous import KeyedStore, Meeting

HERE, ELSEWHERE = "http://localhost:9001", "http://192.0.2.7:9001"
OUTWARD = "127.0.0.2"
"""Plays this machine's address on the way to other machines."""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NUM_INFERENCE_NODES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    own = addresses.own_address
    monkeypatch.setattr(
        addresses, "own_address", lambda host, port=9: OUTWARD if host == "192.0.2.7" else own(host)
    )


def listens(meeting: Meeting) -> set[str]:
    return {own.address for own in listeners([os.getpid()]) if own.port == meeting.port}


def peer_of(meeting: Meeting) -> KeyedStore:
    return KeyedStore(meeting.host, meeting.port, meeting.secret, 60.0)


def test_servers_that_join_from_another_machine_meet_at_a_second_store() -> None:
    rendezvous = Rendezvous(Ranks(), 60.0, 0)
    here = rendezvous.open([HERE])
    assert (here.host, listens(here)) == ("localhost", {"127.0.0.1"})
    both = rendezvous.open([HERE, ELSEWHERE])
    assert (both.host, listens(both)) == (OUTWARD, {OUTWARD})
    assert rendezvous.open([HERE]) == here, "the first one stays, for those that are joined"
    for meeting in (here, both):
        rendezvous.join(meeting).set("word", meeting.host)
        assert peer_of(meeting).get("word") == meeting.host.encode()


def test_another_rank_joins_the_store_of_the_first() -> None:
    main, other = Rendezvous(Ranks(), 60.0, 0), Rendezvous(Ranks(1, 2), 60.0, 0)
    meeting = main.open([HERE])
    other.join(meeting).set("from", "rank 1")
    assert main.join(meeting).get("from") == b"rank 1"


def test_two_trainers_have_two_secrets_and_no_message_shows_one() -> None:
    first, second = (Rendezvous(Ranks(), 60.0, 0).open([HERE]) for _ in range(2))
    assert first.secret != second.secret
    assert first.secret not in repr(first)


def test_a_port_that_is_taken_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Rendezvous(Ranks(), 60.0, 0)
    monkeypatch.setenv("MASTER_PORT", str(first.open([HERE]).port))
    with pytest.raises(BridgeError, match=r"Another trainer may still be running.*MASTER_PORT"):
        Rendezvous(Ranks(), 60.0, None).open([HERE])


def test_under_torchrun_another_port_serves_where_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Rendezvous(Ranks(), 60.0, 0)
    here, outward = first.open([HERE]).port, first.open([ELSEWHERE]).port
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(here - 1))
    second = Rendezvous(Ranks(), 60.0, None)
    meeting = second.open([HERE])
    assert meeting.port not in (0, here)
    assert listens(meeting) == {"127.0.0.1"}
    assert second.open([HERE]) == meeting, "the store stays"
    monkeypatch.setenv("MASTER_PORT", str(outward - 1))
    with pytest.raises(BridgeError, match=rf":{outward} .*MASTER_PORT"):
        Rendezvous(Ranks(), 60.0, None).open([ELSEWHERE])
