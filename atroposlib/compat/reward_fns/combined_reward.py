"""Several reward functions as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.compat.reward_fns.registry import registry
from atroposlib.compat.reward_fns.reward_function import RewardFunction

NORMALIZATIONS = ("none", "sum", "minmax")


class CombinedReward(RewardFunction):
    """The weighted sum of other rewards.

    Args:
        rewards: names or configurations, as `registry.create` takes them.
        normalization: "none"; "sum", divided by the sum of the weights; or "minmax", stretched over
            0 to 1 within each call (left as it is where all are equal).
        weight: factor of the whole.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any]],
        normalization: str = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"normalization {normalization!r} is not known; there are {', '.join(NORMALIZATIONS)}"
            )
        self.normalization = normalization
        self.reward_functions = [registry.create(entry) for entry in rewards]

    @property
    def name(self) -> str:
        """Its own name, or those of its parts."""
        return (
            self._name or f"combined({','.join(reward.name for reward in self.reward_functions)})"
        )

    def set_wandb_logger(self, logger: Any) -> None:
        """Log to this, and each part too."""
        super().set_wandb_logger(logger)
        for reward in self.reward_functions:
            reward.set_wandb_logger(logger)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """The combined scores."""
        parts = [reward(completions, **kwargs) for reward in self.reward_functions]
        totals = [sum(scores) for scores in zip([0.0] * len(completions), *parts, strict=True)]
        if self.normalization == "sum":
            weights = sum(abs(reward.weight) for reward in self.reward_functions)
            return [total / (weights or 1.0) for total in totals]
        if self.normalization == "minmax" and totals and min(totals) < max(totals):
            least, most = min(totals), max(totals)
            return [(total - least) / (most - least) for total in totals]
        return totals


registry.register(CombinedReward, "combined")
