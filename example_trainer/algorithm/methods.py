"""What a published method chooses where the options say nothing: `--loss NAME` stands for all of its choices.

A method is a loss per token (algorithm/losses) together with how rewards become advantages and what each token counts. What a
flag of its own says wins over the method's choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from example_trainer.algorithm.advantages import Normalisation

KLPlace = Literal["loss", "reward"]


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        loss: name of the function in algorithm/losses.
        advantages: name of the function in algorithm/advantages.
        advantage_std: whether a group's advantages are divided by its standard deviation.
        loss_normalisation: see token_weights.
        clip_eps, clip_eps_high: how far the ratio may fall and rise; None for as far as it may fall.
        dual_clip: see losses.grpo; None for none.
        kl_in: where the divergence from the reference goes.
    """

    loss: str
    advantages: str = "group"
    advantage_std: bool = True
    loss_normalisation: Normalisation = "token"
    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    dual_clip: float | None = None
    kl_in: KLPlace = "loss"


METHODS: dict[str, Method] = {
    "grpo": Method("grpo"),
    "dr_grpo": Method("grpo", advantage_std=False, loss_normalisation="constant"),
    "dapo": Method("grpo", clip_eps_high=0.28),
    "gspo": Method("gspo", loss_normalisation="sequence", clip_eps=3e-4, clip_eps_high=4e-4),
    "cispo": Method("cispo", clip_eps=0.2, clip_eps_high=0.2),
    "rloo": Method("reinforce", advantages="leave_one_out", advantage_std=False, loss_normalisation="sequence"),
    "reinforce_pp": Method("grpo", advantages="batch", kl_in="reward"),
    "dual_clip": Method("grpo", dual_clip=3.0),
}


def method_named(loss: str) -> Method:
    """The method that `--loss` names; for a `module:function` of the user's own, GRPO's choices around that function."""
    return METHODS.get(loss) or Method(loss)
