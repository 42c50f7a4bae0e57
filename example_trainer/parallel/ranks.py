"""The processes of one trainer, and how they agree: objects, errors and signals.

A *rank* is one of these processes, which `launch.py` or torchrun started. Rank 0 is the main one,
which alone speaks HTTP and writes files. Every method of `Ranks` but the properties is collective:
all ranks call it in the same order. Each ends within its deadline, with the same outcome on every
rank, also when one of them fails or dies. A trainer of one process sends nothing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from example_trainer.errors import RankError, TrainerError
from example_trainer.parallel.launch import (
    meeting_host,
    meeting_place,
    meeting_store,
    place_of,
)
from example_trainer.process import StopRequested, StopSignal
from vllm_patching.transport.addresses import gloo_group, is_loopback

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INTERFACE = "GLOO_SOCKET_IFNAME"
_FAILED = "failed"
_REASON_SECONDS = 2.0
"""Limit of the wait for the reason that a failing rank leaves behind, after its connections
broke."""


class Ranks:
    """This process's place among the ranks. Made by `join_ranks`; `Ranks()` is the only rank there
    is.

    Attributes:
        rank: 0 to world_size - 1, over all machines.
        world_size: how many ranks there are.
        timeout: seconds that a rank waits for the others unless a call names another time.

    Example:
        info = ranks.on_main("asking the server", lambda: server.wait_for_info())    # rank 0 asks, every rank gets the answer
        ranks.together("reading the model", lambda: read_weights(model, folder))     # one fails: all raise
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 600.0,
        control: Any = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._control, self._store = control, store
        self._groups = 0

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def broadcast(self, value: Any, what: str = "an object", timeout: float | None = None) -> Any:
        """Rank 0's `value` on every rank. JSON values only; the other ranks' own are ignored."""
        if self.world_size == 1:
            return value
        payload = _encode(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        self._exchange(what, lambda group: group.broadcast([size], self._root(timeout)))
        if not self.is_main:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._exchange(what, lambda group: group.broadcast([payload], self._root(None)))
        return _decode(payload)

    def gather(
        self, value: Any, what: str = "an object", timeout: float | None = None
    ) -> list[Any]:
        """Every rank's `value`, by rank, on every rank. JSON values only."""
        if self.world_size == 1:
            return [value]
        payload = _encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        options = AllgatherOptions()
        options.timeout = self._seconds(timeout)
        mine = torch.tensor([payload.numel()], dtype=torch.int64)
        self._exchange(what, lambda group: group.allgather([sizes], [mine], options))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        options = AllgatherOptions()
        options.timeout = self._seconds(None)
        self._exchange(what, lambda group: group.allgather([rows], [padded], options))
        return [_decode(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]

    def barrier(self, what: str, timeout: float | None = None) -> None:
        """Return when every rank is here."""
        self.gather(None, what, timeout)

    def together(self, what: str, work: Callable[[], T], timeout: float | None = None) -> T:
        """Do `work` on every rank. If it raises on any, every rank raises: its own error, or that
        of the lowest rank that failed, named.

        `work` may hold collectives of its own, but a rank that fails between two of them leaves the
        others waiting in theirs until its deadline.
        """
        outcome, error = _attempt(work)
        outcomes = self.gather(_describe(error), what, timeout)
        if error is not None:
            raise error
        self._raise_first(what, outcomes)
        return outcome  # type: ignore[return-value]

    def shared(self, what: str, work: Callable[[], T], timeout: float | None = None) -> list[T]:
        """Do `work` on every rank; every rank gets all results (JSON values), by rank. Errors: see
        `together`.
        """
        outcome, error = _attempt(work)
        rows = self.gather([outcome, _describe(error)], what, timeout)
        if error is not None:
            raise error
        self._raise_first(what, [described for _, described in rows])
        return [result for result, _ in rows]

    def on_main(self, what: str, work: Callable[[], T], timeout: float | None = None) -> T:
        """Do `work` on rank 0 alone. Every rank gets its result (a JSON value), or raises its
        error.

        Args:
            timeout: seconds that the others wait for the result; longer than `work` may take.
        """
        outcome: Any = None
        error: BaseException | None = None
        if self.is_main:
            outcome, error = _attempt(work)
        result, described = self.broadcast([outcome, _describe(error)], what, timeout)
        if error is not None:
            raise error
        if described is not None:
            self._raise_first(what, [described])
        if not self.is_main:
            outcome = result
        whole: T = outcome
        return whole

    def _raise_first(self, what: str, outcomes: list[Any]) -> None:
        """Raise what another rank failed with. An error goes before a request to stop."""
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
        failed.sort(key=lambda item: (item[1]["kind"] == "StopRequested", item[0]))
        if failed:
            rank, outcome = failed[0]
            if outcome["kind"] == "StopRequested":
                raise StopRequested(outcome["number"])
            reason, kind = outcome["message"], _kinds().get(outcome["kind"], RankError)
            if outcome["kind"] != kind.__name__:
                reason = f"{outcome['kind']}: {reason}"
            raise kind(f"{what} failed on rank {rank}: {reason}")

    def _exchange(self, what: str, start: Callable[[Any], Any]) -> None:
        assert self._control is not None
        try:
            start(self._control).wait()
        except RuntimeError as error:
            raise self.lost(what, error) from error

    def lost(self, what: str, error: BaseException) -> RankError:
        """Return the error for a broken or timed-out collective: the rank that failed and its
        reason, if they are known.
        """
        reason = self.reason_of_another()
        if reason:
            return RankError(f"rank {self.rank} gave up {what}: {reason}")
        return RankError(
            f"rank {self.rank} of {self.world_size} lost another rank while {what} "
            f"({first_line(error)}); the log names the rank that ended first, whose last lines "
            "have the reason. Start again with --resume auto"
        )

    def reason_of_another(self, seconds: float = _REASON_SECONDS) -> str:
        """Not collective. The reason that a failed rank left; empty if it left none,
        or the store is gone too.

        Args:
            seconds: how long to wait for it.
        """
        deadline = time.monotonic() + seconds
        while self._store is not None:
            try:
                if self._store.check([_FAILED]):
                    failure = json.loads(self._store.get(_FAILED))
                    if failure["rank"] == self.rank:
                        return ""
                    return f"rank {failure['rank']} failed: {failure['message']}"
            except RuntimeError:
                return ""
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return ""

    def announce_failure(self, error: BaseException) -> None:
        """Leave the reason of this rank's end for the others, which will find their connections
        broken. Not collective.
        """
        if self._store is None:
            return
        if isinstance(error, StopRequested):
            return  # a signal is not a failure, and all ranks stop because of it
        failure = {
            "rank": self.rank,
            "message": f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000],
        }
        try:
            # The first failure counts: the others are its consequence.
            self._store.compare_set(_FAILED, "", json.dumps(failure))
        except RuntimeError:
            return  # the store has gone with the process that held it

    def claim(self, name: str) -> bool:
        """Not collective. Take a name that one rank alone can have. Return True if no other rank
        had taken it.

        Raises:
            RankError: the store has gone with the rank that held it.
        """
        return self._count(name, 1) == 1

    def is_claimed(self, name: str) -> bool:
        """Not collective. Return whether a rank has taken this name. Raises RankError as
        `claim`."""
        return self._count(name, 0) > 0

    def _count(self, name: str, more: int) -> int:
        if self._store is None:
            return more
        try:
            return self._store.add(f"claims of {name}", more)
        except RuntimeError as error:
            raise self.lost(f"looking for {name}", error) from error

    @property
    def groups(self) -> int:
        """The number of groups that `new_group` has made, the same on every rank."""
        return self._groups

    def new_group(self, name: str) -> Any:
        """Another Gloo group of the same ranks, for a thread of each beside the main one; None if
        there is one rank.
        """
        if self._store is None:
            return None
        self._groups += 1  # the store still knows the addresses of an earlier group of this name
        store = dist.PrefixStore(f"{name} {self._groups}", self._store)
        return gloo_group(store, self.rank, self.world_size, meeting_host(os.environ), self.timeout)

    def close(self) -> None:
        """Give the groups up. Not collective."""
        self._control = self._store = None

    def _seconds(self, timeout: float | None) -> timedelta:
        return timedelta(seconds=self.timeout if timeout is None else timeout)

    def _root(self, timeout: float | None) -> BroadcastOptions:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._seconds(timeout)
        return options


class AgreedStop(StopSignal):
    """A signal that came to any rank, noticed by all of them in the same call of `check`.

    Collective.
    """

    def __init__(self, own: StopSignal, ranks: Ranks) -> None:
        super().__init__()
        self._own, self._ranks = own, ranks

    def defer(self) -> None:
        """From now on a signal is noticed in `check` only."""
        self._own.hold()
        self.check()

    def request(self, number: int) -> None:
        self._own.request(number)

    def fail(self, error: TrainerError) -> None:
        self._own.fail(error)

    def check(self) -> None:
        """Raise StopRequested on every rank if a signal came to any."""
        self._ranks.together("agreeing whether to stop", self._own.check)

    def wait(self, seconds: float) -> None:
        raise NotImplementedError(
            "ranks do not sleep together; wait on rank 0, and send the others a message"
        )


def agreed_stop(own: StopSignal, ranks: Ranks) -> StopSignal:
    """`own`, agreed upon by all ranks if there are several."""
    if ranks.world_size == 1:
        return own
    return AgreedStop(own, ranks)


@contextmanager
def _gloo_on_loopback(host: str) -> Iterator[None]:
    """Have torch's default group listen on loopback if all ranks meet there: by itself, Gloo takes
    the machine's name.
    """
    if _INTERFACE in os.environ or not is_loopback(host):
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


@contextmanager
def join_ranks(timeout: float, device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks, and leave them at the end of the with block.

    Two process groups are formed. Torch's default group is for tensors (NCCL if `device` is a GPU,
    else Gloo). A Gloo group is for objects and errors. A block that ends with an error leaves its
    reason to the other ranks.

    Args:
        timeout: seconds that ranks wait for each other, here and in each later step.
        device: this rank's.

    Raises:
        ConfigError: the variables that name this rank are incomplete.
        RankError: the others did not come.
    """
    place = place_of(os.environ)
    if place is None:
        yield Ranks(timeout=timeout)
        return
    rank, world_size, _ = place
    try:
        store, control = _meet(rank, world_size, timeout, device)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {rank} of {world_size} did not meet the others within {timeout:g} s (--rank-timeout) at "
            f"{meeting_place(os.environ)}: {first_line(error)}"
        ) from error
    ranks = Ranks(rank, world_size, timeout, control, dist.PrefixStore("errors", store))
    try:
        yield ranks
    except (StopRequested, Exception) as error:
        # A collective of tensors breaks with a bare RuntimeError when another rank has ended; a bug
        # raises one too.
        bare = isinstance(error, RuntimeError) and not isinstance(error, TrainerError)
        reason = bare and ranks.reason_of_another()
        if isinstance(error, StopRequested) and (cause := ranks.reason_of_another(seconds=0)):
            # The launcher stops the others when one has failed.
            logger.error("rank %d gave up: %s", rank, cause)
        ranks.announce_failure(error)
        _abort(device)
        if reason:
            raise RankError(f"rank {rank} gave up: {reason}") from error
        if bare and _is_lost_connection(error):
            raise ranks.lost("exchanging tensors", error) from error
        raise
    # Together: a rank that left earlier would close connections, and perhaps the store, that others
    # still use.
    ranks.barrier("ending")
    ranks.close()
    dist.destroy_process_group()


def _meet(
    rank: int, world_size: int, timeout: float, device: torch.device
) -> tuple[dist.Store, Any]:
    """Form both process groups; return the store of the ranks, and the group for objects."""
    host, limit = meeting_host(os.environ), timedelta(seconds=timeout)
    store = meeting_store(os.environ, limit)
    backend: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        backend = {"backend": "nccl", "device_id": device}
    with _gloo_on_loopback(host):
        dist.init_process_group(
            store=dist.PrefixStore("trainer", store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            **backend,
        )
    return store, gloo_group(dist.PrefixStore("control", store), rank, world_size, host, timeout)


def _abort(device: torch.device) -> None:
    """Break off what NCCL has in flight: a process does not end while a kernel of its own waits for
    another rank.
    """
    if device.type == "cuda" and dist.group.WORLD is not None:
        try:
            dist.group.WORLD._get_backend(device).abort()
        except RuntimeError as error:
            logger.warning("NCCL could not be broken off: %s", first_line(error))


def first_line(error: BaseException) -> str:
    """The part of a torch error that a person wants to read: its first line, without the place in
    torch's own source.
    """
    line = str(error).strip().partition("\n")[0]
    text = re.sub(r"^\[\S+\.(cc|cpp|hpp|h):\d+\]\s*", "", line)
    return text.partition(". This is typically")[0] or type(error).__name__


def _is_lost_connection(error: BaseException) -> bool:
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Timed out waiting",
        "Broken pipe",
        "NCCL",
        "Gloo",
        "gloo",
    )
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except (StopRequested, Exception) as error:  # noqa: BLE001 - sent to every rank, then raised
        return None, error


def _describe(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, StopRequested):
        return {"kind": "StopRequested", "number": int(error.number)}
    return {"kind": type(error).__name__, "message": " ".join(str(error).split())}


def _kinds() -> dict[str, type[TrainerError]]:
    """The errors that keep their class on the way to another rank, by name."""
    kinds: dict[str, type[TrainerError]] = {}
    todo: list[type[TrainerError]] = [TrainerError]
    while todo:
        kind = todo.pop()
        kinds[kind.__name__] = kind
        todo += kind.__subclasses__()
    return kinds


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(payload: torch.Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
