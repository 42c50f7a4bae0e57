"""The gradients of one batch: of one update, or of several that go through it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from example_trainer.algorithm.corrections import CorrectionSettings
from example_trainer.algorithm.figures import StepFigures
from example_trainer.algorithm.functions import is_import
from example_trainer.algorithm.losses import LossSettings, find_loss, refuse_nonfinite
from example_trainer.algorithm.objective import Objective, ObjectiveInputs, bin_loss
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.partial_bins import completed_reference
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import NoParity, ParityCheck
from example_trainer.models import Decoder
from example_trainer.models.packing import NO_PARENT, Packing
from example_trainer.observe.token_report import TokenReport
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import MasterAdamW


def make_objective(config: TrainerConfig) -> Objective:
    """What the options minimise. A loss of the user's is imported and tried here, and nowhere else.

    Raises:
        ConfigError: there is no such loss, or it is no function of the right kind.
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
    """What is worked out of a bin once and kept for the later updates of its batch.

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

    How the batch is packed does not matter: every token's weight is its weight in its whole
    minibatch. With data-parallel ranks each adds the gradient of its own bins, and all get the
    whole batch's figures. Everything but the constructor is collective.

    The logprobs under the weights that the batch began with are those of the first update's own
    passes, as far as it goes; for the other minibatches there are passes before it, without a
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
        self._parity, self._report = parity or NoParity(), report or TokenReport(0)
        self._known: list[list[_Known]] = []
        self._figures: StepFigures | None = None
        self._figures_with_this: StepFigures | None = None
        self._counted = 0
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
        if number == 0:
            self._known = [
                [_Known(_sequence_of(one)) for one in bins] for bins in self._minibatches
            ]
            figures = StepFigures(self._model.output_weight.device, self._optimizer.steps)
            self._parity.begin(self._optimizer.steps)
            self._report.begin(self._optimizer.steps, self._minibatches[0])
            figures.expect(sum(len(bin.targets) for bins in self._minibatches for bin in bins))
            self._pass_ahead()
        else:
            figures = copy.deepcopy(
                self._taken
            )  # of an update that fails there is nothing in the row
        epoch, place = divmod(number, len(self._minibatches))
        counts = torch.zeros(2, dtype=torch.float64, device=self._model.output_weight.device)
        for bin, known in zip(self._minibatches[place], self._known[place], strict=True):
            self._stop.check()
            packing = bin.packing()
            logprobs, entropy = response_logprobs(self._model, bin, packing, self._config)
            if number == 0:
                self._parity.compare(bin, logprobs)
                known.proximal = logprobs.detach()
                self._report.add(bin, logprobs, entropy)
            if self._objective.kl_coef and known.reference is None:
                known.reference = completed_reference(bin, self._under_reference)
            found = bin_loss(_inputs(bin, known, logprobs, entropy), self._objective)
            found.loss.backward()
            counts[0] += found.not_finite
            counts[1] += len(logprobs)
            # Drift is that of the batch's first weights, and so counted in the first epoch alone.
            figures.add(
                replace(found.outcome, proximal_logprobs=known.proximal if epoch == 0 else None)
            )
        self._require_finite(counts)
        self._figures_with_this = figures

    def updated(self) -> None:
        """The update was taken: its figures count. Not collective."""
        self._figures = self._figures_with_this
        self._counted += 1

    def row(self) -> dict[str, float | None]:
        """The figures of the updates that were taken: see StepFigures.row; the loss is their mean."""
        row = self._taken.row(self._model.shards.sum_figures)
        loss = row["loss"]
        if loss is None:
            return row
        return row | {"loss": loss / self._counted}

    @property
    def _taken(self) -> StepFigures:
        assert self._figures is not None, "no update was taken"
        return self._figures

    def _pass_ahead(self) -> None:
        if not passes_ahead(self._objective, self._parity):
            return
        for bins, knowns in zip(self._minibatches[1:], self._known[1:], strict=True):
            for bin, known in zip(bins, knowns, strict=True):
                self._stop.check()
                with torch.no_grad():
                    known.proximal, _ = response_logprobs(
                        self._model, bin, bin.packing(), self._config
                    )
                    self._model.shards.release(self._model)
                self._parity.compare(bin, known.proximal)

    def _under_reference(self, bin: PackedBin) -> Tensor:
        if self._reference is None:
            raise RuntimeError(
                "tokens came without the reference's logprobs, and there is no reference; see Rules.reference"
            )
        with torch.no_grad():
            logprobs, _ = response_logprobs(self._reference, bin, bin.packing(), self._config)
            self._reference.shards.release(self._reference)
        return logprobs

    def _require_finite(self, counts: Tensor) -> None:
        if not is_import(
            self._objective.name
        ):  # those of the project are; and looking costs waiting for the device
            return
        not_finite, tokens = self._model.shards.sum_figures(counts).tolist()
        refuse_nonfinite(self._objective.name, int(not_finite), int(tokens))


def passes_ahead(objective: Objective, parity: ParityCheck | None = None) -> bool:
    """Whether minibatches after the first are forwarded before the first update, for logprobs under
    the weights until then.
    """
    return objective.correction.needs_proximal or (parity is not None and parity.compares)


def _sequence_of(bin: PackedBin) -> Tensor:
    spans = bin.sequences()
    if spans is None:
        return torch.zeros(0, dtype=torch.int64, device=bin.targets.device)
    places = torch.arange(spans.tokens, device=bin.targets.device, dtype=torch.int32)
    return torch.searchsorted(spans.cu_seqlens[1:], places, right=True)


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
    model: Decoder, bin: PackedBin, packing: Packing, config: TrainerConfig
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy ([n] float32 each) at the trained tokens; only these are projected to the
    vocabulary.
    """
    hidden = model.arithmetic.ops.rows(model(bin.tokens, packing), bin.sources)
    return model.chosen_logprobs(
        hidden,
        bin.targets,
        bin.sequences(),
        config.logprob_chunk,
        bin["temperatures"],
        entropy_gradient=bool(config.entropy_coef),
    )


def warm_up(model: Decoder, optimizer: MasterAdamW, config: TrainerConfig) -> None:
    """One pass over made-up tokens, whose gradient is forgotten: kernels are compiled when they are
    first used, which takes a GPU longer than many steps, and environments sample a first batch
    meanwhile. Collective.
    """
    device = model.output_weight.device
    length = max(1, min(64, model.geometry.max_positions // 2))
    # As in a batch that comes: responses that continue a prompt, if that is done here.
    parents = [NO_PARENT, 0, 0] if config.shares_prefixes else [NO_PARENT] * 3
    packing = Packing([length] * 3, device, parents)
    tokens = torch.zeros(packing.tokens, dtype=torch.int64, device=device)
    hidden = model.arithmetic.ops.rows(
        model(tokens, packing), torch.arange(packing.tokens, device=device)
    )
    counts = Packing([packing.tokens], device)
    temperatures = torch.full(tokens.shape, config.temperature, device=device)
    learns_entropy = bool(config.entropy_coef)
    logprobs, entropy = model.chosen_logprobs(
        hidden, tokens, counts, config.logprob_chunk, temperatures, learns_entropy
    )
    (logprobs + entropy if learns_entropy else logprobs).sum().backward()
    optimizer.zero_grad()
