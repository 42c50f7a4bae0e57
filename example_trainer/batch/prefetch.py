"""The batches of a run, each fetched, parsed, packed and on its way to the device while the one
before is trained on.

    main thread     next ─────► train on 1 ──────────► next ► train on 2 ──────────► next ► …
    fetching thread ► wait, read, pack, copy 2 ► (holds 2)   ► wait, read, pack, copy 3 ►

With several ranks the thread of rank 0 hands the others their bins, and their threads take and copy
them (`BinChannel`).

One batch ahead and no more: what is fetched earlier is trained on later, and so older. A batch that
is fetched stays leased until it is acknowledged. So a batch that was not trained on goes to the
trainer that registers next.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atroposlib.wire import TrainerSession
from example_trainer.api_keys import revealed
from example_trainer.batch.client import Registration, RolloutClient, TrainedBatch
from example_trainer.batch.groups import SamplerLogprobs
from example_trainer.batch.packing import PackedBin
from example_trainer.batch.reader import (
    BatchFigures,
    BatchReader,
    PackedBatch,
    ReadyBatch,
    replayed_routers,
)
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, OutOfMemoryError, RankError, TrainerError
from example_trainer.models import Decoder
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal

# Bins on their way from rank 0 to all ranks: as bytes, in a thread of each, while the ranks train
# on those before.

Minibatches = Sequence[Sequence[PackedBin]]
"""One rank's bins of each minibatch."""

_NAME, _WHAT = "bins", "handing out a batch"
_CHANNEL_POLL_SECONDS = 0.02
"""Interval at which a rank looks for a batch. It does not wait in a message of Gloo's, which nothing but
the other side can end."""


class BinChannel:
    """Over which rank 0 hands out a batch's bins, to as many calls of `receive` on each other rank
    as it makes of `send`.

    A rank for which the run is over leaves when it likes, also when rank 0 is about to send. Both
    claim the rank's share, and the first claim counts. If that is rank 0's, the rank takes its bins
    before it leaves; if not, it is sent none.

    No two of its methods are called at the same time by threads of a process. Making one is
    collective.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.new_group(_NAME)
        self._name = f"{_NAME} of channel {ranks.groups}"
        self._batches = 0  # sent, or received
        self._waiting = list(range(1, ranks.world_size))  # who has not left

    def send(self, minibatches: Sequence[Sequence[Sequence[PackedBin]]]) -> Minibatches:
        """On rank 0: hand them out, and return this rank's own.

        Args:
            minibatches: of each the bins of each data-parallel rank; one share is for all ranks.
                None at all: the batch has nothing to train on, and the other ranks are informed.

        Raises:
            RankError: a rank is gone, or silent for longer than --rank-timeout.
        """
        shares: Sequence[Minibatches] = list(zip(*minibatches, strict=True)) or [[]]
        if self._ranks.world_size > 1:
            self._waiting = [rank for rank in self._waiting if self._ranks.claim(self._share(rank))]
            self._batches += 1
            messages = [encode(share) for share in shares]
            for rank in self._waiting:
                message = messages[rank % len(shares)]
                self._send(torch.tensor([len(message)]), rank)
                self._send(message, rank)
        return shares[0]

    def receive(self, over: Callable[[], bool]) -> Minibatches | None:
        """On another rank: its own bins, on the host, when they come; None once no rank waits for
        them any more.

        A batch takes as long as the environments need, or as the step before it. The deadline is
        that of the thread which trains, in `Batches.next`.

        Raises:
            RankError: rank 0 is gone, or silent for longer than --rank-timeout in the middle of a
                batch.
        """
        share = self._share(self._ranks.rank)
        while not self._ranks.is_claimed(share):
            if over():
                return None
            time.sleep(_CHANNEL_POLL_SECONDS)
        self._batches += 1
        length = int(self._receive(torch.empty(1, dtype=torch.int64)))
        return decode(self._receive(torch.empty(length, dtype=torch.uint8)))

    def leave(self) -> None:
        """On another rank, when it receives no more: rank 0 does not wait for it. Bins on the way
        to it are dropped.

        Raises:
            RankError: rank 0 is gone, or silent for longer than --rank-timeout in the middle of a
                batch.
        """
        if not self._ranks.claim(self._share(self._ranks.rank)):
            self.receive(lambda: True)

    def _share(self, rank: int) -> str:
        """The name of a rank's bins of the next batch."""
        return f"{self._name}, batch {self._batches}, rank {rank}"

    def _send(self, message: Tensor, rank: int) -> None:
        try:
            self._group.send([message], rank, 0).wait()
        except RuntimeError as error:
            raise self._ranks.lost(_WHAT, error) from error

    def _receive(self, message: Tensor) -> Tensor:
        try:
            self._group.recv([message], 0, 0).wait()
        except RuntimeError as error:
            raise self._ranks.lost(_WHAT, error) from error
        return message


def encode(share: Minibatches) -> Tensor:
    """Return one rank's bins as bytes."""
    buffer = io.BytesIO()
    torch.save([[one.tensors() for one in bins] for bins in share], buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def decode(data: Tensor) -> Minibatches:
    """Return the bins that were encoded."""
    share = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return [[PackedBin.of(tensors) for tensors in bins] for bins in share]


logger = logging.getLogger(__name__)

CALL_SECONDS = 2.0
"""Interval of the upkeep during the wait for a batch."""
CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.25
"""Interval at which a signal is noticed during the wait for a batch."""


@dataclass(frozen=True)
class Prepared:
    """A batch that the thread has prepared: this rank's bins on its device, or the error. `lease`,
    `queue_size` and `packed` are rank 0's alone.
    """

    lease: TrainedBatch | None = None
    queue_size: int = 0
    packed: PackedBatch | None = None
    minibatches: Minibatches = ()
    copied: torch.cuda.Event | None = None
    error: TrainerError | None = None


class Preparing:
    """Prepares one batch at a time, in a thread, and holds it until it is taken.

    Args:
        prepare: makes the batch to be trained on with the weights of a version; runs in the thread.
        last_version: the version at which the run ends; nothing is prepared ahead for later ones.
        ahead: when a batch is taken, go on with the next at once.

    Attributes:
        closed: no batch will be taken any more.
    """

    def __init__(self, prepare: Callable[[int], Prepared], last_version: int, ahead: bool) -> None:
        self._prepare, self._last_version, self._ahead = prepare, last_version, ahead
        self._thread: threading.Thread | None = None
        self._batch: Future[Prepared] | None = None
        self._waiting_since: float | None = None
        self.closed = False

    @property
    def ready(self) -> bool:
        """Return whether a batch is there."""
        return self._batch is not None and self._batch.done()

    def want(self, version: int) -> None:
        """Ask for a batch that may be trained on at `version`, unless one is there or on its way."""
        if self._batch is None:
            self._start(version)

    def take(self, version: int, seconds: float) -> Prepared | None:
        """Return the batch to train on with the weights of a version; None if it does not come
        within so many seconds.

        Raises:
            BaseException: the error that ended the thread.
        """
        assert self._batch is not None, "want() comes first"
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if not wait([self._batch], seconds).done:
            return None
        prepared = self._batch.result()
        self._batch = self._waiting_since = None
        if self._ahead and version + 1 < self._last_version:
            self._start(version + 1)
        return prepared

    def waited(self) -> float:
        """Return the seconds for which the trainer has waited. The thread may have waited longer."""
        since = self._waiting_since
        if since is None:
            return 0.0
        return time.monotonic() - since

    def close(self, interrupt: Callable[[], None], seconds: float) -> bool:
        """End the thread. Return whether it has ended within so many seconds.

        Args:
            interrupt: breaks off what it may be waiting for.
        """
        self.closed = True
        interrupt()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _start(self, version: int) -> None:
        batch: Future[Prepared] = Future()
        self._batch = batch

        def prepare() -> None:
            try:
                batch.set_result(self._prepare(version))
            except BaseException as error:  # noqa: BLE001 - raised in `take`
                batch.set_exception(error)

        self._thread = threading.Thread(target=prepare, name="batches", daemon=True)
        self._thread.start()


class DeviceCopies:
    """Bins on their way to a device, on a stream of their own if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, prepared: Prepared, minibatches: Minibatches) -> Prepared:
        """With bins whose copy has begun, or an out-of-memory error."""
        try:
            if self._stream is None:
                return replace(prepared, minibatches=self.handed_over(minibatches))
            with torch.cuda.stream(self._stream):
                there = self.handed_over(minibatches)
                for one in (one for bins in there for one in bins):
                    # made here: in the step, each would wait until the device has done all it was
                    # given
                    one.device_tensors()
                return replace(prepared, minibatches=there, copied=self._stream.record_event())
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            return replace(
                prepared,
                error=OutOfMemoryError(f"no room on {self._device} for a batch's tokens: {reason}"),
            )

    def handed_over(self, minibatches: Minibatches) -> Minibatches:
        """The same on the device."""
        return [[one.handed_to(self._device) for one in bins] for bins in minibatches]

    def end(self, prepared: Prepared) -> Minibatches:
        """The bins, for the stream that trains."""
        if prepared.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(prepared.copied)
            for tensor in (
                tensor
                for bins in prepared.minibatches
                for one in bins
                for tensor in one.device_tensors()
            ):
                tensor.record_stream(
                    stream
                )  # its memory was taken by the copying stream, and is used by this one
        return prepared.minibatches


@dataclass(frozen=True)
class Upkeep:
    """Work that is done while training waits for a batch.

    Attributes:
        due: whether there is work; cheap, asked every few seconds.
        work: does it.
        urgent: whether `due` is to be asked at once; costs nothing, asked at every look for the
            batch.
        trouble: names the servers that cannot be sampled from, for the log.
    """

    due: Callable[[], bool]
    work: Callable[[], None]
    urgent: Callable[[], bool] = lambda: False
    trouble: Callable[[], str] = lambda: ""


class Batches:
    """The batches of a run, for one rank. Making one is collective, and so is every method but
    `close`; rank 0 alone speaks with the service.

    Args:
        client: on rank 0.
        reader: parses and packs.
        device: this rank's.
        last_version: the version at which the run ends; nothing is fetched ahead for later ones.
        ahead: fetch a batch while another is trained on. Without it, none is ever older than it
            need be.

    Example:
        batches = Batches(client, ranks, reader, device, last_version=100, ahead=True)
        batches.register(registration)
        batch = batches.next(version)
        ...
        batches.acknowledge(version + 1)
    """

    def __init__(
        self,
        client: RolloutClient | None,
        ranks: Ranks,
        reader: BatchReader,
        device: torch.device,
        *,
        last_version: int,
        ahead: bool,
    ) -> None:
        self._client, self._ranks, self._reader = client, ranks, reader
        self._channel, self._copies = BinChannel(ranks), DeviceCopies(device)
        self._preparing = Preparing(self._prepare, last_version, ahead)
        config = reader.config
        self._longest_call = config.service_timeout + ranks.timeout
        self._longest_batch = config.service_timeout + config.batch_timeout + ranks.timeout
        self._fetched: TrainedBatch | None = None  # last, by the thread
        self._taken: Prepared | None = None  # trained on now, until `acknowledge`
        self._held: list[
            tuple[TrainedBatch | None, int, str | None, dict[str, Any] | None]
        ] = []  # for the service, in order

    # ---- the service, in the name of all ranks ----

    @property
    def _main(self) -> RolloutClient:
        if self._client is None:
            raise RuntimeError(
                f"rank {self._ranks.rank} has no client of the rollout service, only rank 0 has"
            )
        return self._client

    def register(self, registration: Registration) -> None:
        """See RolloutClient.register."""
        self._ranks.on_main(
            "registering with the service",
            lambda: self._main.register(registration),
            self._longest_call,
        )

    def use_server_modes(self, servers: SamplerLogprobs) -> None:
        """See BatchReader.use_server_modes. Holds from the next batch on that is read.

        Not collective.
        """
        self._reader.use_server_modes(servers)

    def acknowledge_earlier(self, batch: TrainedBatch, weight_version: int) -> None:
        """See RolloutClient.acknowledge_earlier."""
        self._ranks.on_main(
            "acknowledging an earlier batch",
            lambda: self._main.acknowledge_earlier(batch, weight_version),
            self._longest_call,
        )

    def acknowledge(
        self,
        weight_version: int,
        skipped: str | None = None,
        hold: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        """Report that the batch of the last `next` need not be handed out again;
        see RolloutClient.

        Args:
            hold: what was learned is not saved yet. The service keeps the batch for the trainer
                that registers next, until the next report. That comes with the next batch that is
                not held, or in `release`.
            report: see RolloutClient.acknowledge; sent at once, by rank 0.
        """

        def tell() -> None:
            if self._taken is None:
                raise RuntimeError("no batch has been taken since the last one was acknowledged")
            self._held.append(
                (self._taken.lease, weight_version, skipped, None if hold else report)
            )
            if hold:
                self._main.keep(self._taken.lease, weight_version, report)
            else:
                self._tell_held()
            self._taken = None

        self._ranks.on_main("acknowledging a batch", tell, self._longest_call)

    def release(self) -> None:
        """Acknowledge the batches that are held."""
        self._ranks.on_main("acknowledging batches", self._tell_held, self._longest_call)

    @property
    def held(self) -> tuple[TrainedBatch, ...]:
        """The batches that were trained on and are not acknowledged yet.

        Not collective: of rank 0.
        """
        return tuple(
            lease for lease, _, skipped, _ in self._held if lease is not None and skipped is None
        )

    @property
    def has_unacknowledged(self) -> bool:
        """Return whether `release` has anything to report, skipped batches included.

        Not collective: of rank 0.
        """
        return bool(self._held)

    def last_report(
        self, report: dict[str, Any] | None, error: str | None, patience: float
    ) -> None:
        """See RolloutClient.last_report, of the batch that `next` returned last, or would return.

        Not collective.
        """
        batch = self._fetched if self._taken is None else self._taken.lease
        if self._client is not None and batch is not None:
            self._client.last_report(batch, report, error, patience)

    @property
    def in_hand(self) -> TrainedBatch | None:
        """The batch that `next` returned last, until it is acknowledged."""
        if self._taken is None:
            return None
        return self._taken.lease

    def _tell_held(self) -> None:
        while self._held:
            self._main.acknowledge(*self._held[0])
            del self._held[0]

    def end_run(self) -> None:
        """See RolloutClient.end_run."""
        self._ranks.on_main(
            "reporting the end of the run to the service",
            lambda: self._main.end_run(),
            self._longest_call,
        )

    # ---- the next batch ----

    def begin(self, version: int) -> None:
        """Ask for the batch of `version` before `next` does: environments are let in when the first
        one is asked for. Returns at once."""
        self._preparing.want(version)

    def next(self, version: int, upkeep: Upkeep | None = None) -> ReadyBatch:
        """The next batch, when it is there. The one before has been acknowledged, or is held.

        Args:
            version: of the weights that it is trained on with.
            upkeep: done in the meantime by every rank, when rank 0 finds it due.

        Raises:
            BatchError: nothing in it can be trained on. It is taken nevertheless: acknowledge it,
                and go on.
            RolloutServiceError: none came in time, or the service went away for too long.
            StopRequested: a signal came.
        """
        self._preparing.want(version)
        try:
            while (
                shared := self._ranks.on_main(
                    "waiting for a batch", lambda: self._wait(version, upkeep), self._longest_batch
                )
            ) is None:
                assert upkeep is not None
                upkeep.work()
        except (BatchError, OutOfMemoryError):
            self._follow(version)  # a batch has been taken, and the others' share of it is none
            raise
        if self._ranks.world_size > 1:
            self._ranks.together(
                "receiving a batch",
                lambda: self._follow(version, raising=True),
                2 * self._ranks.timeout,
            )
        assert self._taken is not None
        minibatches = self._copies.end(self._taken)
        self._taken = replace(
            self._taken, packed=None, minibatches=()
        )  # of what is trained on now, only the name is needed
        return ReadyBatch(
            minibatches, BatchFigures(**shared["figures"]), self._taken.lease, shared["queue_size"]
        )

    def _wait(self, version: int, upkeep: Upkeep | None) -> dict[str, Any] | None:
        """On rank 0: wait for the batch and take it.

        Returns what all ranks need to know of it; None if upkeep is due first.
        """
        if self._taken is not None:
            raise RuntimeError(f"batch {self._taken.lease} has not been acknowledged")
        prepared = self._wait_for_thread(version, upkeep)
        if prepared is None:
            return None
        self._taken = prepared
        if prepared.error is not None:
            raise prepared.error
        assert prepared.packed is not None
        return {
            "figures": asdict(prepared.packed.figures(version)),
            "queue_size": prepared.queue_size,
        }

    def _wait_for_thread(self, version: int, upkeep: Upkeep | None) -> Prepared | None:
        looked = time.monotonic()
        if upkeep is not None and self._client is not None:
            self._client.server_trouble = upkeep.trouble
        while True:
            if (prepared := self._preparing.take(version, _LOOK_SECONDS)) is not None:
                return prepared
            self._main.stop.check()
            if upkeep is not None and (upkeep.urgent() or time.monotonic() - looked > CALL_SECONDS):
                if upkeep.due():
                    return None
                looked = time.monotonic()

    def _follow(self, version: int, raising: bool = False) -> None:
        """On the other ranks: take what rank 0's thread handed out of the batch that rank 0 has
        taken.

        Raises:
            RankError: it has not come.
            OutOfMemoryError: it does not fit on this rank's device, if that is asked for.
        """
        if self._ranks.is_main:
            return
        taken = self._preparing.take(version, self._ranks.timeout)
        if taken is None:
            raise RankError(
                f"rank {self._ranks.rank} has not got its bins of a batch within {self._ranks.timeout:g} s (--rank-timeout) of "
                "rank 0's having them; start again with --resume auto"
            )
        if raising and taken.error is not None:
            raise taken.error
        self._taken = taken

    def _prepare(self, version: int) -> Prepared:
        """In the thread."""
        if self._client is None:
            received = self._channel.receive(lambda: self._preparing.closed)
            if received is None:
                return Prepared()
            return self._copies.begin(Prepared(), received)
        fetched = self._client.next_batch(self._preparing.waited)
        prepared = Prepared(fetched.lease, fetched.queue_size)
        self._fetched = fetched.lease
        try:
            packed = self._reader.read(fetched.groups, version, fetched.environments, fetched.uses)
        except BatchError as error:
            self._channel.send([])
            return replace(prepared, error=error)
        return self._copies.begin(
            replace(prepared, packed=packed), self._channel.send(packed.minibatches)
        )

    def close(self) -> None:
        """End the thread and the connection. Fetched batches stay leased. Not collective."""
        interrupt, slow = (lambda: None), "another rank"
        if self._client is not None:
            interrupt, slow = self._client.interrupt, "the rollout service, or another rank,"
        if not self._preparing.close(interrupt, CLOSE_SECONDS):
            logger.warning(
                "The next batch, for which %s is busy, is given up after %.0f s",
                slow,
                CLOSE_SECONDS,
            )
        elif self._client is None:
            with suppress(RankError):  # then no rank waits there
                self._channel.leave()
        if self._client is not None:
            self._client.close()


def make_batches(
    config: TrainerConfig,
    stop: StopSignal,
    ranks: Ranks,
    device: torch.device,
    model: Decoder,
    tokens_per_bin: int,
    lives: Sequence[TrainerSession] = (),
) -> Batches:
    """The batches of the rollout service that the options name.

    Args:
        stop: of this process alone; heeded while rank 0 waits.
        model: that is trained; ranks that split its layers all work on the same bins.
        tokens_per_bin: see pack_batch.
        lives: of the run; see ages.
    """
    client = None
    if ranks.is_main:
        key = revealed(config.atropos_api_key)
        client = RolloutClient(
            config.atropos_url, stop, key, config.service_timeout, config.batch_timeout
        )
    data_ranks = 1 if model.split.size > 1 else ranks.world_size
    sizes = model.geometry
    reader = BatchReader(
        config,
        sizes.vocab_size,
        tokens_per_bin,
        data_ranks,
        lives,
        sizes.media_tokens,
        replayed_routers(config, sizes),
    )
    return Batches(
        client,
        ranks,
        reader,
        device,
        last_version=config.training_steps,
        ahead=config.fetches_ahead,
    )
