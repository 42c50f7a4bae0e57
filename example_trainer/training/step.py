"""The gradients of one batch: of one update, or of several that go through it."""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from example_trainer.algorithm.advantages import is_import
from example_trainer.algorithm.losses import LossSettings, find_loss, refuse_nonfinite
from example_trainer.algorithm.objective import (
    CorrectionSettings,
    Objective,
    ObjectiveInputs,
    StepFigures,
    bin_loss,
)
from example_trainer.batch.packing import PackedBin, completed_reference
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import ParityCheck
from example_trainer.errors import (
    BatchError,
    ConfigError,
    NonFiniteError,
    OutOfMemoryError,
    RankError,
)
from example_trainer.models import Decoder
from example_trainer.models.packing import NO_PARENT, Packing
from example_trainer.models.router_replay import RouterReplay
from example_trainer.observe.token_report import TokenReport
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.parallel.ranks import Ranks, first_line
from example_trainer.process import StopRequested, StopSignal
from example_trainer.training.optimizer import MasterAdamW, StepReport

# The limit of batches in a row that may fail before the run ends.

logger = logging.getLogger(__name__)


class SkippedBatches:
    """Counts the batches in a row that were left out, or whose later updates were, by reason:
    what is not finite, or anything else. With several ranks each counts alike.

    Only a step that lost no update to a reason ends the row of that reason. A run whose second
    updates all fail is as ill as one whose first do. It must not go on for ever on a part of its
    data.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._limits = {
            True: ("--skip-nonfinite", config.skip_nonfinite),
            False: ("--max-skipped-batches", config.max_skipped_batches),
        }
        self._in_a_row: Counter[bool] = Counter()
        self._cut_short: set[bool] = set()
        self._left_out = 0
        self._last: BatchError | None = None

    def skip(self, error: BatchError) -> None:
        """Leave a batch out.

        Raises:
            BatchError: `error`, if there have been too many in a row; the batch is then not to be
                acknowledged.
        """
        logger.warning("Skipping a batch (%s): %s", self._count(error), error)
        self._left_out += 1

    def cut_short(self, error: BatchError, step: int, first: int, last: int) -> None:
        """Leave out updates of a batch that taught something in those before.

        If there have been too many in a row, `refuse` raises the error. The step ends before that,
        so it is saved and has its row.

        Args:
            step: that the batch is for, counted from 1; first, last: of the updates, counted from
                1.
        """
        kept = type(error)(
            f"{error}; this was update {first} of {last} of its batch, and those before are kept"
        )
        self._cut_short.add(isinstance(error, NonFiniteError))
        try:
            count = self._count(kept)
        except BatchError as one_too_many:
            self._last = one_too_many
            return
        logger.warning(
            "Step %d: updates %d to %d of its batch are left out, what it learned in those before stays: %s (%s)",
            step, first, last, error, count,
        )  # fmt: skip

    def end(self, error: OutOfMemoryError, update: int, last: int) -> None:
        """Leave out updates of a batch, and let `refuse` end the run: several ranks cannot go on.

        Args:
            update: that failed; last: of the batch; both counted from 1.
        """
        self._last = OutOfMemoryError(
            f"{error}; this was update {update} of {last} of its batch, and those before are kept. "
            "Several ranks cannot go on from here. Start again with --resume auto"
        )

    def refuse(self) -> None:
        """Raise the error of a batch that was cut short, if the run cannot go on behind it."""
        if self._last is not None:
            raise self._last

    def _count(self, error: BatchError) -> str:
        kind = isinstance(error, NonFiniteError)
        flag, limit = self._limits[kind]
        if self._in_a_row[kind] >= limit:
            if not limit:
                raise error
            raise type(error)(
                f"{limit + 1} batches in a row could not be trained on ({flag} {limit}); the last: {error}"
            )
        self._in_a_row[kind] += 1
        return f"{self._in_a_row[kind]} of {limit} in a row, {flag}"

    def stepped(self) -> int:
        """Note a step; return how many batches were left out before it, and reset the count."""
        for kind in self._limits.keys() - self._cut_short:
            del self._in_a_row[kind]
        self._cut_short.clear()
        skipped, self._left_out = self._left_out, 0
        return skipped


def make_objective(config: TrainerConfig) -> Objective:
    """Make the function that the options minimise. A loss of the user's is imported and tried here,
    and nowhere else.

    Raises:
        ConfigError: the loss does not exist, or is not a function of the right kind.
    """
    method = config.method
    clip = LossSettings(method.clip_eps, config.clip_high, method.dual_clip)
    return Objective(
        name=config.loss,
        loss=find_loss(method.loss, clip),
        clip=clip,
        correction=CorrectionSettings(
            kind=config.correction,
            low=config.correction_low,
            high=config.correction_high,
            ratio=config.correction_ratio,
            sequence_kl_limit=config.sequence_kl_limit,
        ),
        kl_coef=config.kl_coef,
        kl_in=method.kl_in,
        entropy_coef=config.entropy_coef,
        distill_coef=config.distill_coef,
        distill_in=config.distill_in,
    )


@dataclass
class _Known:
    """Results for a bin that are computed once and kept for the later updates of its batch.

    Attributes:
        sequence: [n] int64, which of its sequences each token is of.
        proximal: [n] float32 logprobs under the weights that the batch began with.
        reference: [n] float32 under the reference.
    """

    sequence: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


class BatchGradients:
    """The gradients of a batch's updates: of each of its minibatches in turn, and that --ppo-epochs
    times.

    The packing of the batch does not matter: every token's weight is its weight in its whole
    minibatch. With data-parallel ranks each adds the gradient of its own bins, and all get the
    whole batch's figures. Everything but the constructor is collective.

    The logprobs under the weights that the batch began with come from the first update's own
    passes, as far as it goes. For the other minibatches there are passes before it, without a
    gradient, where the objective needs them or parity is checked.

    Args:
        minibatches: this rank's bins of each, on the model's device; every rank has as many, of as
            many bins.
        objective: see make_objective.
        reference: the model that the loss keeps the policy near; asked for those tokens alone whose
            logprobs under it did not come along. None if all do, or none is wanted.
        parity: compares all logprobs under the weights that the batch began with.
        report: gets what the first update computes.

    Example:
        gradients = BatchGradients(model, optimizer, minibatches, config, objective, stop)
        for number in range(gradients.updates):
            gradients.accumulate(number)
            optimizer.update()
            gradients.updated()
            optimizer.write_weights()
        optimizer.end_step()
        row = gradients.row()

    Attributes:
        updates: how many the batch is for.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        minibatches: Sequence[Sequence[PackedBin]],
        config: TrainerConfig,
        objective: Objective,
        stop: StopSignal,
        reference: Decoder | None = None,
        parity: ParityCheck | None = None,
        report: TokenReport | None = None,
    ) -> None:
        self._model, self._optimizer, self._minibatches = model, optimizer, minibatches
        self._config, self._objective, self._stop, self._reference = (
            config,
            objective,
            stop,
            reference,
        )
        self._parity, self._report = parity, report or TokenReport(0)
        self._routers = model.arithmetic.routers
        routing = model.arithmetic.routing
        self._replay = routing if isinstance(routing, RouterReplay) else None
        self._known: list[list[_Known]] = []
        self._figures: StepFigures | None = None
        self._figures_with_this: StepFigures | None = None
        self._updates_taken = 0
        self.updates = config.ppo_epochs * len(minibatches)

    def bins_of(self, number: int) -> Sequence[PackedBin]:
        """This rank's bins of an update."""
        return self._minibatches[number % len(self._minibatches)]

    def accumulate(self, number: int) -> None:
        """Add the gradient of an update, counted from 0, to the optimizer's, one bin at a time.

        Raises:
            StopRequested: a signal came; the update must not be taken.
            ParityError: a token's logprob is not vLLM's; no update of the batch was taken.
            NonFiniteError: the loss function of the user's gave something that is not finite.
            ConfigError: it gave no loss for each token.
        """
        # All that is asked of the device is asked for here, where its want can be survived; nothing
        # once an update is taken.
        if self._config.lora_dropout:
            # A run that is resumed here drops the same inputs.
            name = f"{self._config.seed} {self._optimizer.updates}".encode()
            torch.manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7]))
        if number == 0:
            self._known = [[_Known(one.sequence) for one in bins] for bins in self._minibatches]
            figures = StepFigures(self._model.output_weight.device, self._optimizer.steps)
            if self._parity is not None:
                self._parity.begin(self._optimizer.steps)
            self._report.begin(self._optimizer.steps, self._minibatches[0])
            figures.expect(sum(len(bin.targets) for bins in self._minibatches for bin in bins))
            self._pass_ahead()
        else:
            figures = copy.deepcopy(
                self._taken
            )  # of an update that fails there is nothing in the row
        epoch, place = divmod(number, len(self._minibatches))
        self._begin_routers(self._minibatches[place])
        counts = torch.zeros(2, dtype=torch.float64, device=self._model.output_weight.device)
        for bin, known in zip(self._minibatches[place], self._known[place], strict=True):
            self._stop.check()
            with self._counted(bin):
                logprobs, entropy = response_logprobs(self._model, bin, self._config)
            if number == 0:
                self._compare(bin, logprobs)
                known.proximal = logprobs.detach()
                self._report.add(bin, logprobs, entropy)
            if self._objective.kl_coef and known.reference is None:
                known.reference = completed_reference(bin, self._under_reference)
            result = bin_loss(_inputs(bin, known, logprobs, entropy), self._objective)
            result.loss.backward()
            counts[0] += result.not_finite
            counts[1] += len(logprobs)
            # Drift is that of the batch's first weights, and so counted in the first epoch alone.
            figures.add(
                replace(result.outcome, proximal_logprobs=known.proximal if epoch == 0 else None)
            )
        self._require_finite(counts)
        self._figures_with_this = figures

    def updated(self) -> None:
        """The update was taken: its figures count. Not collective."""
        self._figures = self._figures_with_this
        self._updates_taken += 1
        if self._routers is not None:
            self._routers.updated()
        if self._replay is not None:
            self._replay.updated()

    def row(self) -> dict[str, float | None]:
        """The figures of the updates that were taken: see StepFigures.row; the loss is their mean."""
        total = self._model.shards.sum_figures
        row = self._taken.row(total)
        if self._routers is not None:
            row |= self._routers.row(total)
        if self._replay is not None:
            row |= self._replay.row(total, self._model.output_weight.device)
        loss = row["loss"]
        if loss is None:
            return row
        return row | {"loss": loss / self._updates_taken}

    @property
    def _taken(self) -> StepFigures:
        assert self._figures is not None, "no update was taken"
        return self._figures

    def _counted(self, bin: PackedBin) -> AbstractContextManager[object]:
        """Count what the routers do with the tokens of a bin, in a forward pass."""
        if self._routers is None:
            return nullcontext()
        counts = self._routers.passing(not bin.empty)
        if self._replay is None:
            return counts
        both = ExitStack()
        both.enter_context(counts)
        both.enter_context(self._replay.counting())
        return both

    def _begin_routers(self, bins: Sequence[PackedBin]) -> None:
        """Give the routers of a mixture what their losses need of an update. That is its number of
        tokens, and the shares of the experts, from a forward pass over its bins.
        """
        if self._routers is None:
            return
        device, losses = self._model.output_weight.device, self._routers.losses
        counted, shares = self._routers.begin_update(device), None
        if self._replay is not None:
            self._replay.begin_update()
        if not losses.balance and not losses.z:
            return
        if losses.balance:
            for bin in bins:
                self._stop.check()
                with torch.no_grad(), self._counted(bin):
                    self._model(bin.tokens, bin.packing)
                    self._model.shards.release(self._model)
            shares = counted.over_ranks(self._model.shards.sum_figures).shares()
            self._routers.begin_update(device)
            if self._replay is not None:
                self._replay.begin_update()
        held = torch.zeros(1, dtype=torch.float64, device=device)
        for bin in bins:
            if not bin.empty:
                held += bin.shared_by.sum()
        self._routers.give_losses(self._model.shards.sum_figures(held)[0], shares)

    def _pass_ahead(self) -> None:
        if not passes_ahead(self._objective, self._parity):
            return
        for bins, knowns in zip(self._minibatches[1:], self._known[1:], strict=True):
            for bin, known in zip(bins, knowns, strict=True):
                self._stop.check()
                with torch.no_grad():
                    known.proximal, _ = response_logprobs(self._model, bin, self._config)
                    self._model.shards.release(self._model)
                self._compare(bin, known.proximal)

    def _compare(self, bin: PackedBin, logprobs: Tensor) -> None:
        if self._parity is not None:
            self._parity.compare(bin, logprobs)

    def _under_reference(self, bin: PackedBin) -> Tensor:
        if self._reference is None:
            raise RuntimeError(
                "tokens came without the reference's logprobs, and there is no reference; see Rules.reference"
            )
        with torch.no_grad():
            logprobs, _ = response_logprobs(self._reference, bin, self._config)
            self._reference.shards.release(self._reference)
        return logprobs

    def _require_finite(self, counts: Tensor) -> None:
        if not is_import(
            self._objective.name
        ):  # the project's losses are finite, and looking waits for the device
            return
        not_finite, tokens = self._model.shards.sum_figures(counts).tolist()
        refuse_nonfinite(self._objective.name, int(not_finite), int(tokens))


def passes_ahead(objective: Objective, parity: ParityCheck | None = None) -> bool:
    """Return whether minibatches after the first are forwarded before the first update, for
    logprobs under the weights until then.
    """
    return objective.correction.needs_proximal or parity is not None


def _inputs(bin: PackedBin, known: _Known, logprobs: Tensor, entropy: Tensor) -> ObjectiveInputs:
    return ObjectiveInputs(
        logprobs=logprobs,
        entropy=entropy,
        proximal_logprobs=known.proximal,
        rollout_logprobs=bin["rollout_logprobs"],
        reference_logprobs=known.reference,
        teacher_logprobs=bin["teacher_logprobs"],
        advantages=bin["advantages"],
        weights=bin.weights,
        versions=bin["versions"],
        sequence=known.sequence,
        sequences=len(bin.counts),
    )


def response_logprobs(
    model: Decoder, bin: PackedBin, config: TrainerConfig
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy ([n] float32 each) at the trained tokens; only these are projected to the
    vocabulary.
    """
    hidden = model.arithmetic.ops.rows(model(bin.tokens, bin.packing), bin.sources, bin.packing)
    return model.chosen_logprobs(
        hidden,
        bin.targets,
        bin.sequences,
        config.logprob_chunk,
        bin["temperatures"],
        entropy_gradient=bool(config.entropy_coef),
    )


def warm_up(model: Decoder, optimizer: MasterAdamW, config: TrainerConfig) -> None:
    """One pass over made-up tokens, whose gradient is forgotten: kernels are compiled when they are
    first used, which takes a GPU longer than many steps. At the same time environments sample a
    first batch. Collective.
    """
    device = model.output_weight.device
    length = max(1, min(64, model.geometry.max_positions // 2))
    # As in a batch that comes: responses that continue a prompt, if that is done here.
    parents = [NO_PARENT, 0, 0] if config.shares_prefixes else [NO_PARENT] * 3
    packing = Packing([length] * 3, device, parents)
    tokens = torch.zeros(packing.tokens, dtype=torch.int64, device=device)
    hidden = model.arithmetic.ops.rows(
        model(tokens, packing), torch.arange(packing.tokens, device=device), packing
    )
    counts = Packing([packing.tokens], device)
    temperatures = torch.full(tokens.shape, config.temperature, device=device)
    learns_entropy = bool(config.entropy_coef)
    logprobs, entropy = model.chosen_logprobs(
        hidden, tokens, counts, config.logprob_chunk, temperatures, learns_entropy
    )
    (logprobs + entropy if learns_entropy else logprobs).sum().backward()
    optimizer.zero_grad()


# One step on one batch, after which the trainer can go on whatever the batch did to its memory.


GRACE_SECONDS = 20.0
"""Limit of a rank that ran out of memory for the wait for the other ranks, and of a GPU to
finish its work."""


def guarded_step(
    model: Decoder,
    optimizer: MasterAdamW,
    minibatches: Sequence[Sequence[PackedBin]],
    config: TrainerConfig,
    objective: Objective,
    stop: StopSignal,
    reference: Decoder | None = None,
    parity: ParityCheck | None = None,
    ranks: Ranks | None = None,
    skipped: SkippedBatches | None = None,
    report: TokenReport | None = None,
) -> dict[str, float | None]:
    """Take the updates of a batch, and end its step. Collective.

    If the first update fails, nothing was learned. If a later one fails, or a signal comes, the
    updates before it stay, the others are left out, and the step is complete. Such a batch counts
    as skipped. SkippedBatches.refuse raises for one more in a row than the options allow. It also
    does for several ranks that ran out of memory.
    After an error `optimizer.sound` is alike on every rank: whether training can go on.

    Between updates the model's parameters are written; after the last one the bridge writes them.

    Args:
        minibatches: this rank's bins of each; see BatchGradients for the other arguments.
        skipped: counts the failures of this run; not given: this batch's alone.

    Returns:
        The figures of the batch, with grad_norm (the largest of the updates), lr, updates (taken)
        and updates_skipped.

    Raises:
        OutOfMemoryError: memory ran out in the first update, on any rank; what the batch took is
            free again.
        NonFiniteError: see MasterAdamW.update and BatchGradients.accumulate.
        RankError: a rank failed where others wait for it, and nothing collective is possible.
        StopRequested, ParityError, ConfigError: see BatchGradients.accumulate.
    """
    ranks, skipped = ranks or Ranks(), skipped or SkippedBatches(config)
    gradients = BatchGradients(
        model, optimizer, minibatches, config, objective, stop, reference, parity, report
    )
    before = optimizer.updates
    try:
        reports = _take_updates(optimizer, gradients, ranks, skipped)
    finally:
        if optimizer.sound and optimizer.updates > before:
            # whatever was raised: there is a name for what the masters are now
            optimizer.end_step()
    return gradients.row() | {
        "grad_norm": max(report.grad_norm for report in reports),
        "lr": reports[-1].lr,
        "updates": len(reports),
        "updates_skipped": gradients.updates - len(reports),
    }


def _take_updates(
    optimizer: MasterAdamW, gradients: BatchGradients, ranks: Ranks, skipped: SkippedBatches
) -> list[StepReport]:
    """The reports of the updates that were taken: all, or those before one that failed."""
    reports: list[StepReport] = []
    for number in range(gradients.updates):
        try:
            reports.append(_update(optimizer, gradients, number, ranks))
        except (NonFiniteError, OutOfMemoryError, StopRequested) as error:
            if not number or not optimizer.sound:
                raise
            if ranks.world_size > 1 and isinstance(error, OutOfMemoryError):
                # FSDP2 stands in the middle of a layer.
                skipped.end(error, number + 1, gradients.updates)
            elif isinstance(error, StopRequested):
                logger.warning(
                    "Step %d: updates %d to %d of its batch are left out, what it learned in those before stays: %s",
                    optimizer.steps + 1, number + 1, gradients.updates, error,
                )  # fmt: skip
            else:
                skipped.cut_short(error, optimizer.steps + 1, number + 1, gradients.updates)
            break
        gradients.updated()
    return reports


def _update(
    optimizer: MasterAdamW, gradients: BatchGradients, number: int, ranks: Ranks
) -> StepReport:
    """One update, for all ranks or for none."""

    def work() -> StepReport:
        if number:
            optimizer.write_weights()
        gradients.accumulate(number)
        return optimizer.update()

    try:
        done, shortage = _attempt(work)
    except (NonFiniteError, StopRequested):
        _discard(optimizer)
        raise
    except ConfigError as error:
        if ranks.world_size == 1:
            raise
        # A loss function may fail on one bin alone. Here an error is this rank's alone, and its end
        # must not be collective.
        raise RankError(
            f"rank {ranks.rank}: {error}; others wait for it in a transfer, so this trainer "
            "cannot go on, nor save what is newer than its last checkpoint. Mend the function, "
            "and start again with --resume auto"
        ) from error
    if ranks.world_size > 1:
        shortage = _agree(ranks, optimizer, shortage)
    if shortage is None:
        assert done is not None
        return done
    _discard(optimizer)
    tokens, sequences = max((len(bin.tokens), len(bin.counts)) for bin in gradients.bins_of(number))
    raise OutOfMemoryError(
        f"out of memory at optimizer step {optimizer.steps}, in a pass over up to {tokens} tokens "
        f"of {sequences} sequences ({shortage}). Lower --tokens-per-microbatch or --seq-len, or "
        "add --gradient-checkpointing"
    )


def _attempt(work: Callable[[], StepReport]) -> tuple[StepReport | None, str | None]:
    """Do the work, and return its result or the line of an out-of-memory error.

    The error is let go of here: its frames hold the batch's tensors.
    """
    try:
        return work(), None
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return None, first_line(error)


def _agree(ranks: Ranks, optimizer: MasterAdamW, told: str | None) -> str | None:
    """Return the error of the first rank that ran out of memory, on all ranks; None if none did.

    Collective.
    """
    where = f"rank {ranks.rank} ran out of memory in a step ({told})"
    try:
        # A rank that fails comes at once. Ranks that wait for it in a transfer cannot come; its end
        # breaks their transfer.
        mine = [told, optimizer.updates, optimizer.sound]
        outcomes = ranks.gather(mine, "taking a step", None if told is None else GRACE_SECONDS)
    except RankError as error:
        if told is None:
            raise
        raise RankError(
            f"{where} while others wait for it in a transfer. So this trainer cannot go on, nor "
            "save what is newer than its last checkpoint. Lower --tokens-per-microbatch or "
            "--seq-len, or add --gradient-checkpointing, and start again with --resume auto"
        ) from error
    failed = [(rank, text) for rank, (text, _, _) in enumerate(outcomes) if text is not None]
    if not failed:
        return None
    if len({updates for _, updates, _ in outcomes}) > 1 or not all(
        sound for _, _, sound in outcomes
    ):
        optimizer.sound = False  # some have taken the update, others have not
    ranks.together("finishing the ranks' transfers", _finish_transfers, 2 * GRACE_SECONDS)
    return f"on rank {failed[0][0]}: {failed[0][1]}"


def _finish_transfers() -> None:
    """Raise RankError if a GPU still waits for a rank that gave up: what that rank sent next would
    be taken for the rest.
    """
    if not torch.cuda.is_available():
        return
    waiting = threading.Thread(
        target=torch.cuda.synchronize, args=(torch.cuda.current_device(),), daemon=True
    )
    waiting.start()
    waiting.join(GRACE_SECONDS)
    if waiting.is_alive():
        raise RankError(
            "a rank ran out of memory in the middle of a transfer; start again with --resume auto"
        )


def _discard(optimizer: MasterAdamW) -> None:
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
