"""What is to be corrected needs the logprobs that rollouts were sampled with: whether they came
along.
"""

from __future__ import annotations

from example_trainer.batch.figures import BatchFigures
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError
from example_trainer.options.section import flag_of

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
    given = [name for name in _ASKED_FOR_BY if corrected and name in config.model_fields_set]
    if limited:
        given.append("sequence_kl_limit")
    if figures.targets_with_logprobs or not given:
        return
    remedies = ["give --correction none"] * corrected + ["leave out --sequence-kl-limit"] * limited
    raise BatchError(
        f"{_said(config, given[0])}: none of the batch's tokens came with the logprob that it was sampled with, so nothing can "
        f"be corrected; let the environment send inference_logprobs, or {' and '.join(remedies)}"
    )


def uncorrected_note(config: TrainerConfig, figures: BatchFigures) -> str | None:
    """What to say of a batch of which not all tokens came with their logprobs; None if nothing is
    missed.
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
        f"{missing / figures.forwarded_targets:.1%} of a batch's tokens came without the logprobs that they were sampled with: "
        f"that sampler and trainer differ is not corrected there ({acting}); missing_rollout_logprobs in metrics.jsonl has the "
        "share of each step"
    )


def _said(config: TrainerConfig, name: str) -> str:
    return f"{flag_of(name)} {getattr(config, name)}"
