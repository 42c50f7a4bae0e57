"""The object that holds the parts of a training, and what it does with them around a step.

The loop (`loop.py`) calls it. It knows no mode: `assembly.py` and `simple_rl.py` choose the batch
source, the parity check, the weight bridge and the checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from example_trainer.algorithm.objective import Objective
from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.evaluations import EvaluationFeed
from example_trainer.batch.prefetch import Upkeep
from example_trainer.batch.reader import BatchFigures, ReadyBatch
from example_trainer.config import TrainerConfig, flag_of
from example_trainer.deterministic.parity import ParityCheck, ParityError
from example_trainer.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    RankError,
    RolloutServiceError,
    TrainerError,
)
from example_trainer.models import Decoder
from example_trainer.observe.metrics import MetricsLog, Row, evaluation_line, step_line
from example_trainer.observe.perf import Speed, StepProfiler, peak_memory
from example_trainer.observe.token_report import TokenReport
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.idle_options import idle_options
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import SkippedBatches, guarded_step, passes_ahead, warm_up
from example_trainer.weight_bridge.base import SyncReport, WeightBridge
from vllm_patching.protocol.timeline import Timeline, unix_ns

# A correction needs the logprobs that rollouts were sampled with: checks that they came along.

_ASKED_FOR_BY = ("correction", "correction_high", "correction_low", "correction_ratio")


def require_rollout_logprobs(config: TrainerConfig, figures: BatchFigures) -> None:
    """Refuse a batch that has no logprobs at all, if an option was given that asks for a
    correction.

    Args:
        figures: of the whole batch, alike on all ranks.

    Raises:
        BatchError: see above.
    """
    limited, corrected = config.sequence_kl_limit is not None, config.correction != "none"
    options = [name for name in _ASKED_FOR_BY if corrected and name in config.model_fields_set]
    if limited:
        options.append("sequence_kl_limit")
    if figures.targets_with_logprobs or not options:
        return
    remedies = ["give --correction none"] * corrected + ["leave out --sequence-kl-limit"] * limited
    raise BatchError(
        f"{_said(config, options[0])}: none of the batch's tokens came with the logprob that it "
        "was sampled with, so nothing can be corrected. Let the environment send "
        f"inference_logprobs, or {' and '.join(remedies)}"
    )


def uncorrected_note(config: TrainerConfig, figures: BatchFigures) -> str | None:
    """Return the warning for a batch that has tokens without logprobs; None if there is nothing to
    warn of.
    """
    missing = figures.forwarded_targets - figures.targets_with_logprobs
    if not missing or (config.correction == "none" and config.sequence_kl_limit is None):
        return None
    acting = _said(config, "sequence_kl_limit" if config.correction == "none" else "correction")
    if not figures.targets_with_logprobs:
        return (
            "The environments send no logprobs of what they sampled: that sampler and trainer differ is not corrected "
            f"({acting} does nothing)"
        )
    return (
        f"{missing / figures.forwarded_targets:.1%} of a batch's tokens came without the logprobs "
        "that they were sampled with: their difference between sampler and trainer is not "
        f"corrected ({acting}). The share of each step is missing_rollout_logprobs in "
        "metrics.jsonl"
    )


def _said(config: TrainerConfig, name: str) -> str:
    return f"{flag_of(name)} {getattr(config, name)}"


# The interface of the object that the training loop takes its batches from.


class BatchSource(Protocol):
    """Where batches come from: prefetch.Batches, or local_sampler.SampledBatches."""

    def begin(self, version: int) -> None:
        """Let the first batch be made; `next` is about to be called."""

    def next(self, version: int, upkeep: Upkeep | None = None) -> ReadyBatch:
        """The next batch, to be trained on with the weights of `version`.

        Raises BatchError for one that cannot be.
        """

    def acknowledge(
        self,
        version: int,
        skipped: str | None = None,
        hold: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        """The batch of the last `next` is in the weights of `version`, or for the reason given in
        none. `report` is what was computed for its tokens."""

    def last_report(
        self, report: dict[str, Any] | None, error: str | None, patience: float
    ) -> None:
        """Report that the run ends with the batch of the last `next`; `error` is what training on
        it raised. Not collective.
        """

    @property
    def in_hand(self) -> TrainedBatch | None:
        """The name of the batch of the last `next`, until it is acknowledged; None if it has none."""

    def release(self) -> None:
        """Acknowledge the batches that were held."""

    @property
    def held(self) -> tuple[TrainedBatch, ...]:
        """The held batches that are in the weights."""

    @property
    def has_unacknowledged(self) -> bool:
        """Return whether there are any, skipped ones included."""

    def end_run(self) -> None:
        """Report that the run has taken all its steps."""


# The report of a trainer that ends with a batch in hand: whether training on the batch is the
# cause.

ERROR_SECONDS, SIGNAL_SECONDS = 10.0, 2.0
"""Limit of the rollout service's absence for the report."""


class BatchFailures:
    """Remembers which error came from reading a batch or from training on it, and reports how the
    run ends.

    Args:
        batches: whose last batch is reported.
    """

    def __init__(self, batches: BatchSource) -> None:
        self._batches = batches
        self._cause: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of this block as one of the batch."""
        try:
            yield
        except Exception as error:
            self._cause = error
            raise

    def report(
        self,
        error: BaseException,
        trained: TrainedBatch | None,
        figures: dict[str, Any] | None = None,
    ) -> None:
        """Report the end of the run to the rollout service. Not collective.

        A batch that was the cause is counted, and set aside if it ends trainers again and again.
        Where the cause is unclear (an error of another rank, or of a loss function of one's own),
        nothing is reported. The service then counts the end like a kill.

        Args:
            error: that ends the run.
            trained: the last batch in the weights.
            figures: computed for the tokens of the batch.
        """
        if isinstance(error, RolloutServiceError):
            return
        in_hand = self._batches.in_hand
        learned = in_hand is not None and in_hand == trained
        of_batch = isinstance(error, BatchError) or (error is self._cause and not learned)
        if of_batch and isinstance(error, RankError | ConfigError):
            return
        of_batch = of_batch and (
            isinstance(error, BatchError | ParityError) or not isinstance(error, TrainerError)
        )
        text, seconds = None, SIGNAL_SECONDS
        if of_batch and not learned:
            text = f"{type(error).__name__}: {error}"
        if isinstance(error, Exception):
            seconds = ERROR_SECONDS
        self._batches.last_report(figures, text, seconds)


logger = logging.getLogger(__name__)

LAST_EVALUATIONS_SECONDS = 5.0
"""Limit of the wait at the end of a run for results of evaluations that the service has."""


@dataclass
class TakenStep:
    """A step that the optimizer has taken.

    Attributes:
        learned: figures of its updates.
        batches_skipped: batches that were left out before it.
        begun, waited, computed, handed: time.perf_counter() when it began to wait for its batch,
            when the batch came, when the weights were computed, and when they were handed over.
    """

    batch: ReadyBatch
    learned: dict[str, float | None]
    batches_skipped: int
    begun: float
    waited: float
    computed: float
    handed: float

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of waiting, computing and handing over."""
        return (self.waited - self.begun, self.computed - self.waited, self.handed - self.computed)


@dataclass
class Trainer:
    """The parts of a training.

    Attributes:
        objective: function to minimise; see make_objective.
        batches: source of batches, which learns what became of each.
        bridge: hands the weights to the inference server; connected, and the server serves the
            weights of the present step.
        parity: compares logprobs bit for bit.
        checkpoints: store of what was learned.
        speed: rate that a step's time is compared with.
        reference: model that the loss keeps the policy near.
        trained: the last batch that the weights learned from, as the rollout service calls it.
        metrics: log of the figures; on rank 0.
        evaluations: results of environments; on rank 0, if there is a rollout service.
        ask_servers: repeats the checks of the servers that were made before the first batch;
            collective.
        timeline: gets each step's spans: wait, train, and sync, or what the bridge calls it.
        tokens: collects what is reported of tokens.
        unrecorded: a step whose weights are on their way, and which has no row yet.
    """

    config: TrainerConfig
    stop: StopSignal
    ranks: Ranks
    model: Decoder
    optimizer: MasterAdamW
    objective: Objective
    batches: BatchSource
    bridge: WeightBridge
    parity: ParityCheck | None
    checkpoints: Checkpoints
    metrics: MetricsLog | None
    speed: Speed
    profiler: StepProfiler
    reference: Decoder | None = None
    trained: TrainedBatch | None = None
    evaluations: EvaluationFeed | None = None
    ask_servers: Callable[[], None] | None = None
    timeline: Timeline = field(default_factory=lambda: Timeline(None, "trainer", ""))
    tokens: TokenReport = field(default_factory=lambda: TokenReport(0))
    unrecorded: TakenStep | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.skipped, self.failures = SkippedBatches(self.config), BatchFailures(self.batches)
        self._joins = self.bridge.joins
        self._noted_uncorrected = False

    @property
    def steps(self) -> int:
        """Optimizer steps behind the weights, which is their version."""
        return self.optimizer.steps

    def begin(self) -> None:
        """Ask for the first batch, and compile kernels while the environments sample it."""
        if self.ranks.is_main:
            for note in idle_options(self.config, self.objective):
                logger.warning("%s", note)
        self.batches.begin(self.steps)
        if self.model.output_weight.is_cuda:
            with self.bridge.turn(self.optimizer.write_weights):
                warm_up(self.model, self.optimizer, self.config)

    def next_batch(self) -> ReadyBatch:
        """Wait for a batch, and look after servers and acknowledgements.

        Raises:
            BatchError: the batch cannot be trained on.
        """
        with self.failures.noted():
            return self.batches.next(self.steps, self.upkeep())

    def upkeep(self) -> Upkeep:
        """Return the work to do while a batch is waited for: servers that were restarted, and
        acknowledgements that were held until a checkpoint is complete. An environment may wait for
        them.
        """

        def complete() -> bool:
            return self.batches.has_unacknowledged and not self.checkpoints.writing

        def due() -> bool:
            return complete() or self.bridge.server_restarted()

        def work() -> None:
            self.bridge.keep_serving(self.optimizer.write_weights)
            self.ask_restarted_servers()
            if self.checkpoints.written():
                self.batches.release()

        return Upkeep(due, work, urgent=complete, trouble=self.bridge.server_trouble)

    def learn(self, batch: ReadyBatch, begun: float, waited: float) -> TakenStep:
        """Take the step of a batch; see require_rollout_logprobs, guarded_step and
        SkippedBatches.refuse for the errors.

        Args:
            begun, waited: see TakenStep. The weights count as handed over once they are computed,
                until the caller knows better.
        """
        before = self.steps
        with self.failures.noted():
            try:
                require_rollout_logprobs(self.config, batch.figures)
                learned = guarded_step(
                    self.model, self.optimizer, batch.minibatches, self.config, self.objective,
                    self.stop, self.reference, self.parity, self.ranks, self.skipped, self.tokens,
                )  # fmt: skip
            finally:
                if self.steps > before:  # also if it could not go on afterwards
                    self.trained = batch.lease
            self._note_uncorrected(batch)
        self._note_idle_experts()
        computed, skipped = time.perf_counter(), self.skipped.stepped()
        self.unrecorded = TakenStep(batch, learned, skipped, begun, waited, computed, computed)
        self.skipped.refuse()
        return self.unrecorded

    def skip(self, error: BatchError, version: int) -> None:
        """Leave a batch out, and report that to its source.

        Args:
            version: of the weights before it.

        Raises:
            BatchError: `error`, if it cannot be left out. Then the weights are not sound, or have
                learned from it in part, or there have been too many in a row.
            OutOfMemoryError: the ranks of this trainer cannot go on behind it.
        """
        if not self.optimizer.sound or self.steps > version:
            raise error
        self.skipped.skip(error)
        held = not self.checkpoints.written()
        self.batches.acknowledge(self.steps, skipped=str(error), hold=held)
        if self.ranks.world_size > 1 and isinstance(error, OutOfMemoryError):
            # FSDP2 stands in the middle of a layer. Release the batch, or the trainer that goes on
            # gets it again.
            self.checkpoints.wait()
            self.batches.release()
            raise OutOfMemoryError(
                f"{error}; several ranks cannot go on from here: start again with --resume auto, "
                "which goes on behind this batch"
            ) from error

    def record(self, step: TakenStep, report: SyncReport) -> None:
        """Write a step's spans, its row, and its line in the log."""
        self._write_spans(step)
        row = self._row(step, report)
        if self.metrics is not None:
            self.metrics.write(self.steps, row)
        logger.info("%s", step_line(self.steps, self.config.training_steps, row))
        self.unrecorded = None

    def record_evaluations(self, seconds: float = 0.0) -> None:
        """Write down the evaluations that have come in, and ask for the next.

        Args:
            seconds: how long to wait for results that the service has by now.
        """
        if self.evaluations is None or self.metrics is None:
            return
        self.evaluations.ask()
        for evaluation in self.evaluations.take(seconds):
            self.metrics.write_evaluation(self.steps, evaluation)
            logger.info("%s", evaluation_line(evaluation))

    def acknowledge(self) -> None:
        """Report the batch of the last step to its source, now or when a checkpoint is complete."""
        held = not self.checkpoints.written()
        self.batches.acknowledge(self.steps, hold=held, report=self.report())

    def report(self) -> dict[str, Any] | None:
        """Return what the rollout service gets of the batch's tokens; None for nothing."""
        report = self.tokens.take() or {}
        if self.parity is not None:
            report |= self.parity.report()
        return report or None

    def ask_restarted_servers(self) -> None:
        """Repeat the checks of the servers if one was joined since, as after a restart: it may have
        come back with other options.

        Raises:
            ConfigError: its options do not go with the trainer's.
        """
        if self.ask_servers is not None and self._joins != self.bridge.joins:
            self.ask_servers()
            self._joins = self.bridge.joins

    def save_if_due(self) -> None:
        """Start to write the checkpoint of a step that --checkpoint-interval names."""
        if self.config.saves_at(self.steps) and self.checkpoints.last != self.steps:
            self.checkpoints.wait()
            self.batches.release()
            self._begin_saving()

    def save_for_restart(self) -> None:
        """Write the present weights, which the bridge starts vLLM on.

        The optimizer's state follows in the background. If an earlier state is still on its way to
        the disk, the step gets none unless a checkpoint of it is due. A restart does not wait for
        optimizer states.
        """
        self.checkpoints.save_weights(
            self.model, self.optimizer, self.config.shareable, self.trained, self.batches.held
        )
        if not self.checkpoints.writing:
            self._begin_saving()

    def save(self) -> None:
        """Write the checkpoint of the present step, return when it is complete, and write the row
        of a step that has none yet. The trainer that goes on from the checkpoint begins behind it.
        """
        self._begin_saving()
        self.checkpoints.wait()
        if self.unrecorded is not None:
            self.record(self.unrecorded, SyncReport(self.steps, "", 0))

    def save_after(self, error: Exception) -> None:
        """Save the last sound step before an error ends the trainer, if that is possible.

        With several ranks it takes all of them, so only an error that came to all of them will do.
        """
        agreed = self.ranks.world_size == 1 or isinstance(error, TrainerError)
        if not agreed or isinstance(error, CheckpointError | RankError):
            return
        if not self.optimizer.sound or not self.steps:
            return
        try:
            self.save()
        except Exception as failure:  # noqa: BLE001 - logged, and the first error is raised
            reason = " ".join(str(failure).split())
            logger.error("The steps since the last checkpoint could not be saved: %s", reason)

    def finish(self) -> None:
        """Complete the last checkpoint and acknowledgements, and write the last evaluations."""
        self.checkpoints.wait()
        self.batches.release()
        self.record_evaluations(LAST_EVALUATIONS_SECONDS)

    def _begin_saving(self) -> None:
        """Start to write the checkpoint of the present step, unless it is there or on its way."""
        if self.checkpoints.last != self.steps:
            self.checkpoints.begin(
                self.model, self.optimizer, self.config.shareable, self.trained, self.batches.held
            )

    def _note_uncorrected(self, batch: ReadyBatch) -> None:
        note = uncorrected_note(self.config, batch.figures)
        if note is not None and self.ranks.is_main and not self._noted_uncorrected:
            self._noted_uncorrected = True
            logger.warning("%s", note)

    def _note_idle_experts(self) -> None:
        routers = self.model.arithmetic.routers
        if routers is None or not self.ranks.is_main:
            return
        if note := routers.warning():
            logger.warning("Step %d: %s", self.steps, note)

    def _write_spans(self, step: TakenStep) -> None:
        moments = map(unix_ns, (step.begun, step.waited, step.computed, step.handed))
        names = ("wait", "train", self.bridge.handing_over)
        for what, (begin, end) in zip(names, pairwise(moments), strict=True):
            self.timeline.write(what, begin, end, version=self.steps)

    def _row(self, step: TakenStep, report: SyncReport) -> Row:
        bridge, figures, seconds = self.bridge, step.batch.figures, step.seconds
        minibatches = len(step.batch.minibatches)
        epochs, ahead = (step.learned["updates"] or 0) / minibatches, 0.0
        if passes_ahead(self.objective, self.parity):
            ahead = 1 - 1 / minibatches
        peak = peak_memory(self.model.output_weight.device)
        compared: Row = {}
        if self.parity is not None:
            compared = self.parity.row(self.optimizer.masters, self.model.shards)
        return {
            **figures.row(),
            **step.learned,
            "tokens_per_second": figures.forwarded_targets / sum(seconds),
            "queue_size": step.batch.queue_size,
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
            "batches_skipped": step.batches_skipped,
            **compared,
            **self.speed.row(figures, seconds, peak, epochs, ahead),
        }
