"""Shards meet within a deadline and answer rank 0: real groups and connections, each rank a thread
of this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from example_trainer.errors import BridgeError, RankError
from example_trainer.parallel.ranks import Ranks
from example_trainer.parameter_server import shards as shards_module
from example_trainer.parameter_server.held import HeldWeights
from example_trainer.parameter_server.shards import Shards, come, meet

ENOUGH = 120.0


class Held:
    """Requests to the shards here."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def hangs_on(self, rank: int, until: threading.Event) -> int:
        if rank == self._rank:
            until.wait(ENOUGH)
        return rank

    def fails_on(self, rank: int) -> int:
        if rank == self._rank:
            raise ValueError("no\nroom")
        return rank


def as_ranks(count: int, timeout: float, work: Callable[[Ranks], Any]) -> list[Any]:
    """Return each rank's result or exception.

    Its connections are closed then, as when a process ends.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=ENOUGH))

    def be(rank: int) -> Any:
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("control", store), rank, count, timedelta(seconds=ENOUGH)
        )
        ranks = Ranks(rank, count, timeout, group, dist.PrefixStore("errors", store))
        try:
            return work(ranks)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            ranks.announce_failure(error)
            return error.with_traceback(
                None
            )  # whose frames would keep the group's connections open

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(be, range(count)))


def shards_of(ranks: Ranks) -> Shards:
    return Shards(cast(HeldWeights, Held(ranks.rank)), ranks)


def hear_the_way(ranks: Ranks) -> tuple[str, int]:
    """Learn where rank 0 is, as a shard does before it goes there."""
    host, port, _ = ranks.on_main("opening the way to the shards", lambda: None)
    return host, int(port)


def test_one_that_fails_is_named_and_what_is_asked_next_gets_its_own_answer() -> None:
    def work(ranks: Ranks) -> None:
        shards = shards_of(ranks)
        if ranks.is_main:
            assert shards.call("rank", ()) == [0, 1, 2]
            with pytest.raises(ValueError, match="no\nroom"):
                shards.call("fails_on", (0,))
            assert shards.call("rank", ()) == [0, 1, 2]
            with pytest.raises(RuntimeError, match=r"^shard 2: ValueError: no room$"):
                shards.call("fails_on", (2,))
            assert shards.call("rank", ()) == [0, 1, 2]
            shards.check()
            shards._others[1].close()
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"^shard 2 has ended$"):
                    shards.call("rank", ())
            with pytest.raises(BridgeError, match="shard 2 has ended; start all shards again"):
                shards.check()
        ranks.barrier("done", ENOUGH)

    assert as_ranks(3, ENOUGH, work) == [None] * 3


def test_a_shard_that_hangs_is_named_after_the_deadline_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer, when it comes, must not be taken for that to another question."""
    monkeypatch.setattr(shards_module, "ANSWER_SECONDS", 0.5)
    over = threading.Event()
    monkeypatch.setattr(Held, "rank", lambda self: self.hangs_on(1, over))

    def work(ranks: Ranks) -> None:
        shards = shards_of(ranks)
        if ranks.is_main:
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"^shard 1 did not answer rank within 0.5 s$"
                ):
                    shards.call("rank", ())
                over.set()
            with pytest.raises(
                BridgeError,
                match=r"shard 1 did not answer rank within 0.5 s; start all shards again",
            ):
                shards.check()
        ranks.barrier("done", ENOUGH)

    assert as_ranks(2, ENOUGH, work) == [None] * 2


def test_a_shard_that_does_not_come_is_named_with_the_place_and_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Strangers come instead: they do not count."""
    wrong = "a secret that nobody has told anybody"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = listening.getsockname()
        for said in (json.dumps([2, wrong]) + "\n", "GET / HTTP/1.1\r\n", "[[], 3]\n", ""):
            stranger = stack.enter_context(socket.create_connection(place, ENOUGH))
            stranger.sendall(said.encode())
            stranger.shutdown(socket.SHUT_WR)
        stack.callback(come(*place, "key", Ranks(1, 3)).close)
        with caplog.at_level(logging.WARNING), pytest.raises(BridgeError) as raised:
            meet(listening, "host-a:5", "key", Ranks(0, 3, 3.0))
    assert str(raised.value).startswith(
        "shard 2 of 3 did not come to host-a:5 within 3 s (--rank-timeout). See what became"
    )
    assert (
        caplog.text.count("a program at 127.0.0.1 came to host-a:5 that is not a shard of this one")
        == 4
    )
    assert wrong not in caplog.text


def test_a_shard_that_fails_on_its_way_is_not_waited_for() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.is_main:
            return shards_of(ranks)
        hear_the_way(ranks)
        raise BridgeError("the disk is full")

    main, _ = as_ranks(2, ENOUGH, work)
    assert isinstance(main, RankError)
    assert "gave up waiting for shard 1 of 2 at localhost:" in str(main)
    assert "rank 1 failed: BridgeError: the disk is full" in str(main)


def test_a_shard_that_does_not_reach_rank_0_says_where_it_went() -> None:
    ranks = Ranks(1, 2, ENOUGH)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        BridgeError,
        match=rf"shard 1 of 2 on \S+ does not reach shard 0 at 127.0.0.1:{port}: .*MASTER_ADDR",
    ):
        come("127.0.0.1", port, "key", ranks)
