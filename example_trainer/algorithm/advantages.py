"""What each rollout, and each token of it, counts in the loss: pure functions of plain numbers.

Sources: advantages are those of DeepSeekMath (Shao et al., arXiv:2402.03300, section 4.1.2); leaving out the division by the
standard deviation, and dividing by a constant instead of the response's length, are Dr. GRPO's (Liu et al., arXiv:2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Normalisation = Literal["token", "sequence", "constant"]


def group_advantages(scores: Sequence[float], divide_by_std: bool = True) -> list[float]:
    """How much better each rollout of a group is than the group's mean (DeepSeekMath, section 4.1.2).

        A_i = (r_i - mean(r)) / std(r)        with the population's standard deviation

    Args:
        scores: one finite reward per rollout of the group.
        divide_by_std: False leaves the difference as it is (Dr. GRPO), so that easy and hard problems weigh alike.

    Returns:
        One advantage per rollout. A group whose scores are all equal teaches nothing: all zeros.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0 or np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())):
        return [0.0] * len(scores)
    centred = values - values.mean()
    result: list[float] = (centred / values.std() if divide_by_std else centred).tolist()
    return result


def token_weights(lengths: Sequence[int], normalisation: Normalisation, max_tokens: int) -> list[float]:
    """The weight of each trained token of each sequence in the loss of a whole batch.

    The weights are those of the whole batch, not of a bin: summing the weighted loss over bins, in any split, then gives
    the loss, and the gradient, of one large batch.

    Args:
        lengths: trained tokens of each sequence of the batch.
        normalisation: "token", every token of the batch weighs the same; "sequence", every sequence does, as in equation 3
            of DeepSeekMath; "constant", the sum over tokens divided by sequences × `max_tokens` (Dr. GRPO).
        max_tokens: the constant.

    Returns:
        For each sequence the weight of any one of its tokens.
    """
    trained = [length for length in lengths if length > 0]
    if normalisation == "token":
        total = sum(trained)
        return [1.0 / total if length > 0 else 0.0 for length in lengths]
    if normalisation == "sequence":
        return [1.0 / (length * len(trained)) if length > 0 else 0.0 for length in lengths]
    return [1.0 / (len(trained) * max_tokens) if length > 0 else 0.0 for length in lengths]
