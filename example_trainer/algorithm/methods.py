"""What a published method chooses where the options say nothing: `--loss NAME` stands for all of
its choices.

A method is a loss per token (algorithm/losses) together with how rewards become advantages
(algorithm/advantages.py) and what each token counts. What a flag of its own says wins over the
method's choice. docs/algorithms.md has the equations, and where a row differs from its paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from example_trainer.algorithm.advantages import Normalisation
from example_trainer.algorithm.functions import built_in, is_import

KLPlace = Literal["loss", "reward"]


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        loss: name of the function in algorithm/losses.
        advantages: name of the function in algorithm/advantages.py.
        advantage_std: whether advantages are divided by a standard deviation; see find_advantages
            for which.
        loss_normalisation: see token_weights.
        clip_eps, clip_eps_high: how far the ratio may fall and rise; None for as far as it may
            fall. See the loss for what becomes of what goes further.
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
    # Shao et al., arXiv:2402.03300; there each sequence weighs the same, as with
    # --loss-normalisation sequence.
    "grpo": Method("grpo"),
    # Liu et al., arXiv:2503.20783: neither the difficulty of a problem nor the length of an answer
    # biases what it weighs.
    "dr_grpo": Method("grpo", advantage_std=False, loss_normalisation="constant"),
    # Yu et al., arXiv:2503.14476: clip-higher and the mean over tokens.
    "dapo": Method("grpo", clip_eps_high=0.28),
    # Zheng et al., arXiv:2507.18071: bounds of a whole sequence's ratio.
    "gspo": Method("gspo", loss_normalisation="sequence", clip_eps=3e-4, clip_eps_high=4e-4),
    # MiniMax-M1, arXiv:2506.13585: no lower bound; the paper gives no number for the upper one.
    "cispo": Method("cispo", clip_eps=1.0, clip_eps_high=1.0),
    # Williams, 1992, with the batch's mean reward as its baseline.
    "reinforce": Method(
        "reinforce",
        advantages="batch",
        advantage_std=False,
        loss_normalisation="constant",
        kl_in="reward",
    ),
    # Ahmadian et al., arXiv:2402.14740: the logprob of a whole answer, so a sum over its tokens,
    # not their mean.
    "rloo": Method(
        "reinforce",
        advantages="leave_one_out",
        advantage_std=False,
        loss_normalisation="constant",
        kl_in="reward",
    ),
    # Hu et al., arXiv:2501.03262; the second with the group's mean as baseline, and the divergence
    # in the loss.
    "reinforce_pp": Method("grpo", advantages="batch", kl_in="reward"),
    "reinforce_pp_baseline": Method("grpo", advantages="group_batch"),
    # Ye et al., arXiv:1912.09729: what a negative advantage can do is bounded too.
    "dual_clip": Method("grpo", dual_clip=3.0),
}

BOUNDS: dict[str, tuple[str, ...]] = {
    "grpo": ("clip_eps", "clip_eps_high", "dual_clip"),
    "gspo": ("clip_eps", "clip_eps_high"),
    "cispo": ("clip_eps", "clip_eps_high"),
    "reinforce": (),
}
"""Which bounds each of our losses knows. A function of the user's gets them all."""


def method_named(loss: str) -> Method:
    """The method that `--loss` names; for a `module:function` of the user's own, GRPO's choices
    around that function.

    Raises:
        ConfigError: no method has this name.
    """
    return Method(loss) if is_import(loss) else built_in("--loss", loss, METHODS)
