"""The batches of a run, each fetched, parsed, packed and on its way to the device while the one
before is trained on.

    main thread     next ─────► train on 1 ──────────► next ► train on 2 ──────────► next ► …
    fetching thread ► wait, read, pack, copy 2 ► (holds 2)   ► wait, read, pack, copy 3 ►

The thread is in `preparing.py`. With several ranks rank 0's hands the others their bins, and theirs
take and copy them (`scatter.py`).

One batch ahead and no more: what is fetched earlier is trained on later, and so older. A batch that
is fetched stays leased until it is acknowledged, so one that nobody came to train on goes to the
trainer that registers next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from atroposlib.wire import TrainerSession
from example_trainer.api_keys import revealed
from example_trainer.batch.client import RolloutClient, TrainedBatch
from example_trainer.batch.figures import BatchFigures
from example_trainer.batch.preparing import DeviceCopies, Prepared, Preparing
from example_trainer.batch.reader import BatchReader, ReadyBatch
from example_trainer.batch.registration import Registration
from example_trainer.batch.sampling import SamplerLogprobs
from example_trainer.batch.scatter import BinChannel
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, OutOfMemoryError, RankError
from example_trainer.models import Decoder
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal

logger = logging.getLogger(__name__)

CALL_SECONDS = 2.0
"""How often upkeep is looked after while a batch is waited for."""
CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.25
"""How soon a signal is noticed while a batch is waited for."""


@dataclass(frozen=True)
class Upkeep:
    """What has to be looked after while training waits for a batch.

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

    def heed(self, servers: SamplerLogprobs) -> None:
        """See BatchReader.heed. Holds from the next batch on that is read; not collective."""
        self._reader.heed(servers)

    def settle(self, batch: TrainedBatch, weight_version: int) -> None:
        """See RolloutClient.settle."""
        self._ranks.on_main(
            "acknowledging an earlier batch",
            lambda: self._main.settle(batch, weight_version),
            self._longest_call,
        )

    def acknowledge(
        self,
        weight_version: int,
        skipped: str | None = None,
        hold: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        """Say that the batch which `next` gave last, or failed with, need not be handed out again;
        see RolloutClient.

        Args:
            hold: what was learned is not saved yet. The service keeps the batch for the trainer
                that registers next, until it is told again: with the next batch that is not held,
                or in `release`.
            report: see RolloutClient.acknowledge; told at once, by rank 0.
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
    def owes(self) -> bool:
        """Whether `release` has anything to tell, of skipped batches too.

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
            "telling the service that the run has ended",
            self._main.end_run,
            self._longest_call,
        )

    # ---- the next batch ----

    def begin(self, version: int) -> None:
        """Ask for the batch of `version` before `next` does: environments are let in when the first
        one is asked for. Waits for nobody."""
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
                told := self._ranks.on_main(
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
            minibatches, BatchFigures(**told["figures"]), self._taken.lease, told["queue_size"]
        )

    def _wait(self, version: int, upkeep: Upkeep | None) -> dict[str, Any] | None:
        """On rank 0: wait for the batch and take it.

        What to tell all ranks of it; None when there is work for them first.
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
            OutOfMemoryError: there is no room for it on this rank's device, if that is asked for.
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
        made = Prepared(fetched.lease, fetched.queue_size)
        self._fetched = fetched.lease
        try:
            packed = self._reader.read(fetched.groups, version, fetched.environments, fetched.uses)
        except BatchError as error:
            self._channel.send([])
            return replace(made, error=error)
        return self._copies.begin(
            replace(made, packed=packed), self._channel.send(packed.minibatches)
        )

    def close(self) -> None:
        """End the thread and the connection. What it fetched stays leased. Not collective."""
        interrupt, slow = _do_nothing, "another rank"
        if self._client is not None:
            interrupt, slow = self._client.interrupt, "the rollout service, or another rank,"
        if not self._preparing.close(interrupt, CLOSE_SECONDS):
            logger.warning(
                "What %s does for the next batch is given up after %.0f s", slow, CLOSE_SECONDS
            )
        elif self._client is None:
            with suppress(RankError):  # then nobody waits there
                self._channel.leave()
        if self._client is not None:
            self._client.close()


def _do_nothing() -> None:
    return


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
    reader = BatchReader(config, model.geometry.vocab_size, tokens_per_bin, data_ranks, lives)
    return Batches(
        client,
        ranks,
        reader,
        device,
        last_version=config.training_steps,
        ahead=config.fetches_ahead,
    )
