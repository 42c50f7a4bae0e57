"""The training loop: next batch → gradients → step → publish weights → record.

It knows no mode: `grpo.py` and `simple_rl.py` make the batch source, the parity check, the weight
bridge and the checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from example_trainer.algorithm.objective import Objective
from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.evaluations import EvaluationFeed
from example_trainer.batch.prefetch import Upkeep
from example_trainer.batch.reader import ReadyBatch
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import ParityCheck, ParityError
from example_trainer.errors import (
    BatchError,
    CheckpointError,
    OutOfMemoryError,
    RankError,
    TrainerError,
)
from example_trainer.models import Decoder
from example_trainer.observe.evaluations import evaluation_line
from example_trainer.observe.metrics import MetricsLog
from example_trainer.observe.perf import Speed, peak_memory
from example_trainer.observe.profiling import StepProfiler
from example_trainer.observe.step_line import Row, step_line
from example_trainer.observe.token_report import TokenReport
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopRequested, StopSignal
from example_trainer.training.batch_failures import BatchFailures
from example_trainer.training.guarded_step import guarded_step
from example_trainer.training.idle_options import idle_options
from example_trainer.training.loop_interfaces import BatchSource, CheckpointStore
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.rollout_logprobs import require_rollout_logprobs, uncorrected_note
from example_trainer.training.skipping import SkippedBatches
from example_trainer.training.step import passes_ahead, warm_up
from example_trainer.weight_bridge.base import SyncReport, WeightBridge
from vllm_patching.protocol.timeline import Timeline, unix_ns

logger = logging.getLogger(__name__)

LAST_EVALUATIONS_SECONDS = 5.0
"""How long the end of a run waits for the results of evaluations that the service has."""


@dataclass
class Parts:
    """What a training is made of.

    Attributes:
        objective: what is minimised; see make_objective.
        batches: where the next batch comes from, and who is told what became of it.
        bridge: hands the weights to the inference server; connected, and the server serves those of
            the present step.
        parity: compares logprobs bit for bit, or not at all.
        checkpoints: where what was learned is kept.
        speed: what a step's time is measured against.
        reference: the model that the loss keeps the policy near.
        trained: the last batch that the weights learned from, as the rollout service calls it.
        evaluations: what environments measure; on rank 0, where there is a rollout service.
        uncorrected: whether the log says that tokens without logprobs are not corrected.
        ask_servers: asks the servers anew what was asked of them before the first batch;
            collective.
        timeline: gets each step's spans: wait, train, and sync, or what the bridge calls it.
        tokens: collects what is reported of tokens.
        joins: the bridge's when that was done last.
        unsent: writes the row of a step whose weights are on their way, should the run end there.
    """

    config: TrainerConfig
    stop: StopSignal
    ranks: Ranks
    model: Decoder
    optimizer: MasterAdamW
    objective: Objective
    batches: BatchSource
    bridge: WeightBridge
    parity: ParityCheck
    checkpoints: CheckpointStore
    metrics: MetricsLog
    speed: Speed
    profiler: StepProfiler
    reference: Decoder | None = None
    trained: TrainedBatch | None = None
    evaluations: EvaluationFeed | None = None
    uncorrected: bool = False
    ask_servers: Callable[[], None] | None = None
    timeline: Timeline = field(default_factory=lambda: Timeline(None, "trainer", ""))
    tokens: TokenReport = field(default_factory=lambda: TokenReport(0))
    joins: int = field(init=False)
    unsent: Callable[[], None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.joins = self.bridge.joins

    def begin_saving(self) -> None:
        """Start to write the checkpoint of the present step, unless it is there or on its way."""
        if self.checkpoints.last != self.optimizer.steps:
            held = self.batches.held
            self.checkpoints.begin(
                self.model, self.optimizer, self.config.shareable, self.trained, held
            )

    def save_for_restart(self) -> None:
        """Write the present weights, which the bridge starts vLLM on.

        The optimizer's state follows in the background. If an earlier state is still on its way to
        the disk, the step gets none unless a checkpoint of it is due: a restart does not wait for
        optimizer states.
        """
        held = self.batches.held
        self.checkpoints.save_weights(
            self.model, self.optimizer, self.config.shareable, self.trained, held
        )
        if not self.checkpoints.writing:
            self.begin_saving()

    def report(self) -> dict[str, Any] | None:
        """What the rollout service is told of the batch's tokens; None if that is nothing."""
        told = (self.tokens.take() or {}) | self.parity.report()
        return told or None

    def save(self) -> None:
        """As begin_saving, and return when it is complete."""
        self.begin_saving()
        self.checkpoints.wait()

    def save_unsent(self) -> None:
        """As save, and write the row of a step that has none yet: whoever goes on from the
        checkpoint begins behind it.
        """
        self.save()
        if self.unsent is not None:
            self.unsent()


def train(parts: Parts) -> None:
    """Take optimizer steps until --training-steps. Collective.

    However it ends, by an error, a signal or the last step, what was learned is saved if that is
    possible.

    Raises:
        BatchError: more batches in a row than the options allow could not be trained on.
        StopRequested: a signal came.
        TrainerError: as its message says.
    """
    config, stop, model, optimizer = parts.config, parts.stop, parts.model, parts.optimizer
    batches, bridge = parts.batches, parts.bridge
    upkeep = make_upkeep(parts)
    skipped, failures = SkippedBatches(config), BatchFailures(batches)
    for note in idle_options(config, parts.objective) if parts.ranks.is_main else ():
        logger.warning("%s", note)
    try:
        batches.begin(optimizer.steps)
        if model.output_weight.is_cuda:
            with bridge.turn(optimizer.write_weights):
                warm_up(model, optimizer, config)  # while the environments sample
        while optimizer.steps < config.training_steps:
            parts.profiler.begin(optimizer.steps + 1)
            begun, version = time.perf_counter(), optimizer.steps
            try:
                with failures.noted():
                    batch = batches.next(optimizer.steps, upkeep)
                waited = time.perf_counter()
                with bridge.turn(optimizer.write_weights):
                    with failures.noted():
                        learned = learn(parts, batch, skipped)
                    computed = time.perf_counter()
                    write = partial(write_row, parts, batch, learned, skipped.stepped())
                    parts.unsent = partial(
                        write,
                        SyncReport(optimizer.steps, "", 0),
                        (waited - begun, computed - waited, 0.0),
                    )
                    if bridge.restarts_at(optimizer.steps):
                        parts.save_for_restart()
                    report = bridge.sync(
                        optimizer.steps, optimizer.write_weights, optimizer.masters
                    )
            except BatchError as error:
                skip(parts, skipped, error, version)
                continue
            handed = time.perf_counter()
            seconds = (waited - begun, computed - waited, handed - computed)
            tell_timeline(parts, (begun, waited, computed, handed))
            write(report, seconds)
            parts.unsent = None
            record_evaluations(parts)
            if config.saves_at(optimizer.steps) and parts.checkpoints.last != optimizer.steps:
                parts.checkpoints.wait()
                batches.release()
                parts.begin_saving()
            # Last, so that no batch is gone from the service before the checkpoint that is due
            # holds what was learned.
            batches.acknowledge(
                optimizer.steps, hold=not parts.checkpoints.written(), report=parts.report()
            )
            ask_restarted_servers(parts)
            stop.check()
        parts.checkpoints.wait()
        batches.release()
        record_evaluations(parts, LAST_EVALUATIONS_SECONDS)
    except Exception as error:
        failures.report(
            error, parts.trained, parts.report() if isinstance(error, ParityError) else None
        )
        keep_what_was_learned(parts, error)
        raise
    except StopRequested as request:
        failures.report(request, parts.trained)
        if optimizer.sound and optimizer.steps:
            parts.save_unsent()
        raise


def tell_timeline(parts: Parts, moments: tuple[float, float, float, float]) -> None:
    """Write when the step that was taken waited, trained and handed its weights over; moments are
    time.perf_counter()'s.
    """
    marks = [unix_ns(moment) for moment in moments]
    for what, (begin, end) in zip(
        ("wait", "train", parts.bridge.handing_over), pairwise(marks), strict=True
    ):
        parts.timeline.write(what, begin, end, version=parts.optimizer.steps)


def learn(parts: Parts, batch: ReadyBatch, skipped: SkippedBatches) -> dict[str, float | None]:
    """Take the step of a batch; see require_rollout_logprobs and guarded_step for what is raised.

    The figures of it.
    """
    before = parts.optimizer.steps
    try:
        require_rollout_logprobs(parts.config, batch.figures)
        learned = guarded_step(
            parts.model, parts.optimizer, batch.minibatches, parts.config, parts.objective, parts.stop, parts.reference,
            parts.parity, parts.ranks, skipped, parts.tokens,
        )  # fmt: skip
    finally:
        if parts.optimizer.steps > before:  # also where it then could not go on
            parts.trained = batch.lease
    note = uncorrected_note(parts.config, batch.figures)
    if note is not None and parts.ranks.is_main and not parts.uncorrected:
        parts.uncorrected = True
        logger.warning("%s", note)
    return learned


def make_upkeep(parts: Parts) -> Upkeep:
    """What is looked after while a batch is waited for: servers that were restarted, and
    acknowledgements that were held until a checkpoint is complete, for an environment may wait for
    them."""

    def complete() -> bool:
        return parts.batches.owes and not parts.checkpoints.writing

    def due() -> bool:
        return complete() or parts.bridge.server_restarted()

    def work() -> None:
        parts.bridge.keep_serving(parts.optimizer.write_weights)
        ask_restarted_servers(parts)
        if parts.checkpoints.written():
            parts.batches.release()

    return Upkeep(due, work, urgent=complete, trouble=parts.bridge.server_trouble)


def ask_restarted_servers(parts: Parts) -> None:
    """Ask the servers anew if one was joined since, as after a restart: it may have come back with
    other options. Raises ConfigError for those that do not go with the trainer's."""
    if parts.ask_servers is not None and parts.joins != parts.bridge.joins:
        parts.ask_servers()
        parts.joins = parts.bridge.joins


def skip(parts: Parts, skipped: SkippedBatches, error: BatchError, version: int) -> None:
    """Leave a batch out, and say so to whoever gave it.

    Args:
        version: of the weights before it.

    Raises:
        BatchError: `error`, if it cannot be left out: the weights are not sound, or have learned
            from it in part; or there have been too many in a row.
        OutOfMemoryError: the ranks of this trainer cannot go on behind it.
    """
    if not parts.optimizer.sound or parts.optimizer.steps > version:
        raise error
    skipped.skip(error)
    parts.batches.acknowledge(
        parts.optimizer.steps, skipped=str(error), hold=not parts.checkpoints.written()
    )
    if parts.ranks.world_size > 1 and isinstance(
        error, OutOfMemoryError
    ):  # FSDP2 stands in the middle of a layer
        parts.checkpoints.wait()
        parts.batches.release()  # or the trainer that goes on gets this batch again
        raise OutOfMemoryError(
            f"{error}; several ranks cannot go on from here: start again with --resume auto, which goes on behind this batch"
        ) from error


def write_row(
    parts: Parts,
    batch: ReadyBatch,
    learned: dict[str, float | None],
    batches_skipped: int,
    report: SyncReport,
    seconds: tuple[float, float, float],
) -> None:
    """Write the figures of a step: its row, and its line in the log."""
    bridge, optimizer, figures = parts.bridge, parts.optimizer, batch.figures
    epochs = (learned["updates"] or 0) / len(batch.minibatches)
    ahead = 1 - 1 / len(batch.minibatches) if passes_ahead(parts.objective, parts.parity) else 0.0
    row: Row = {
        **figures.row(),
        **learned,
        "tokens_per_second": figures.forwarded_targets / sum(seconds),
        "queue_size": batch.queue_size,
        "weight_version": report.version,
        "params_mapped": bridge.params_mapped,
        "params_total": bridge.params_total,
        "bytes_moved": report.bytes_moved,
        "checksum": report.checksum,
        "seconds_wait": seconds[0],
        "seconds_train": seconds[1],
        "seconds_sync": seconds[2],
        "first_byte_to_verified": report.first_byte_to_verified,
        **{f"sync/{phase}": value for phase, value in report.seconds.items()},
        **{
            f"server/{phase.removeprefix('to_')}": value
            for phase, value in report.server_seconds.items()
        },
        **{f"turn/{name}": value for name, value in bridge.turn_figures.items()},
        **{f"fleet/{name}": count for name, count in report.fleet.items()},
        "batches_skipped": batches_skipped,
        **parts.parity.row(optimizer.masters),
        **parts.speed.row(
            figures, seconds, peak_memory(parts.model.output_weight.device), epochs, ahead
        ),
    }
    parts.metrics.write(optimizer.steps, row)
    logger.info("%s", step_line(optimizer.steps, parts.config.training_steps, row))


def record_evaluations(parts: Parts, seconds: float = 0.0) -> None:
    """Write down what evaluations have come in, and ask for what comes next.

    Args:
        seconds: how long to wait for those that are there by now; not at all between steps.
    """
    if parts.evaluations is None:
        return
    parts.evaluations.ask()
    for evaluation in parts.evaluations.take(seconds):
        parts.metrics.write_evaluation(parts.optimizer.steps, evaluation)
        logger.info("%s", evaluation_line(evaluation))


def keep_what_was_learned(parts: Parts, error: Exception) -> None:
    """Save the last sound step before an error ends the trainer, if that is possible.

    With several ranks it takes all of them, so only an error that is known to have come to all of
    them will do.
    """
    optimizer = parts.optimizer
    agreed = parts.ranks.world_size == 1 or isinstance(error, TrainerError)
    if (
        not optimizer.sound
        or not optimizer.steps
        or not agreed
        or isinstance(error, CheckpointError | RankError)
    ):
        return
    try:
        parts.save_unsent()
    except Exception as failure:  # noqa: BLE001 - logged, and the error that led here is raised
        told = " ".join(str(failure).split())
        logger.error("What was learned since the last checkpoint could not be saved: %s", told)
