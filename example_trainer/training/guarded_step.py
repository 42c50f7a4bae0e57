"""One step on one batch, after which the trainer can go on whatever the batch did to its memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from example_trainer.algorithm.objective import Objective
from example_trainer.batch.bins import PackedBin
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import ParityCheck
from example_trainer.errors import ConfigError, NonFiniteError, OutOfMemoryError, RankError
from example_trainer.models import Decoder
from example_trainer.observe.token_report import TokenReport
from example_trainer.out_of_memory import ran_out_of_memory
from example_trainer.parallel.ranks import Ranks, first_line
from example_trainer.process import StopRequested, StopSignal
from example_trainer.training.optimizer import MasterAdamW, StepReport
from example_trainer.training.skipping import SkippedBatches
from example_trainer.training.step import BatchGradients

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long a rank that ran out of memory waits for the others to say the same, and a GPU has to
finish what it was given."""


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
    """The updates of a batch, and the end of its step. Collective.

    If the first update fails, nothing was learned. If a later one does, or a signal comes, what was
    learned stays: the other updates are left out, and the step is complete. After the first two
    errors the gradients are gone, and `optimizer.sound` says, alike on every rank, whether the
    weights can be gone on with. Batches whose later updates fail are counted with those that are
    left out: one more in a row than the options allow is an error here too, behind the end of its
    step.

    Between updates the model's parameters are written; after the last one that is the bridge's.

    Args:
        minibatches: this rank's bins of each; see BatchGradients for these and what follows.
        skipped: counts the failures of this run; not given: this batch's alone.

    Returns:
        The figures of the batch, with
            grad_norm: the largest of the updates';
            lr: learning rate;
            updates, updates_skipped: how many were taken, and left out.

    Raises:
        OutOfMemoryError: memory ran out in the first update, and every rank knows; what the batch
            took is free again. With several ranks, in any: they cannot go on from there, but the
            step is complete if there was an update before.
        NonFiniteError: see MasterAdamW.update and BatchGradients.accumulate, of the first update;
            of any if a weight is.
        BatchError: of either kind, in a later update, if there have been too many in a row.
        RankError: a rank ran out of memory, or its loss function failed, where others wait for it,
            and nothing collective is possible any more.
        StopRequested, ParityError, BatchError, ConfigError: see BatchGradients.accumulate;
            ConfigError only of a single rank.
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
                raise OutOfMemoryError(
                    f"{error}; this was update {number + 1} of {gradients.updates} of its batch, and those before are "
                    "kept, but several ranks cannot go on from here: start again with --resume auto"
                ) from error
            if isinstance(error, StopRequested):
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
        done, told = _attempt(work)
    except (NonFiniteError, StopRequested):
        _discard(optimizer)
        raise
    except ConfigError as error:
        if ranks.world_size == 1:
            raise
        # What a loss function does depends on the bin. Here an error is this rank's alone, and its
        # end must not be collective.
        raise RankError(
            f"rank {ranks.rank}: {error}; others wait for it in a transfer, so this trainer cannot go on, nor save what is "
            "newer than its last checkpoint; mend the function, and start again with --resume auto"
        ) from error
    if ranks.world_size > 1:
        told = _agree(ranks, optimizer, told)
    if told is None:
        assert done is not None
        return done
    _discard(optimizer)
    tokens, sequences = max((len(bin.tokens), len(bin.counts)) for bin in gradients.bins_of(number))
    raise OutOfMemoryError(
        f"out of memory at optimizer step {optimizer.steps}, in a pass over up to {tokens} tokens of {sequences} sequences "
        f"({told}); lower --tokens-per-microbatch or --seq-len, or add --gradient-checkpointing"
    )


def _attempt(work: Callable[[], StepReport]) -> tuple[StepReport | None, str | None]:
    """What the work gave, or how it ran out of memory.

    The error is let go of here: its frames hold the batch's tensors.
    """
    try:
        return work(), None
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return None, first_line(error)


def _agree(ranks: Ranks, optimizer: MasterAdamW, told: str | None) -> str | None:
    """What the first rank that ran out of memory says, on all of them; None if none did.

    Collective.
    """
    where = f"rank {ranks.rank} ran out of memory in a step ({told})"
    try:
        # Whoever fails comes at once. Ranks that wait for it in a transfer cannot come, and are
        # told by its end.
        mine = [told, optimizer.updates, optimizer.sound]
        outcomes = ranks.gather(mine, "taking a step", None if told is None else GRACE_SECONDS)
    except RankError as error:
        if told is None:
            raise
        raise RankError(
            f"{where} while others wait for it in a transfer, so this trainer cannot go on, nor save what is newer than its "
            "last checkpoint; lower --tokens-per-microbatch or --seq-len, or add --gradient-checkpointing, and start again "
            "with --resume auto"
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
