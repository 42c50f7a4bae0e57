"""Returns and advantages of rewards that come step by step."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from atroposlib.type_definitions import number

NumpyArrayLike = np.ndarray | Sequence[np.ndarray] | Sequence[Sequence]
BoolVector = np.ndarray


def allclose_to_first(
    values: NumpyArrayLike,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    return_vector: bool = False,
) -> BoolVector | bool:
    """Whether every array is close to the first one.

    Args:
        values: shape (n, …), not jagged.
        rtol, atol, equal_nan: as for `numpy.isclose`.
        return_vector: give the answer for each of the n arrays.

    Returns:
        One bool, or with `return_vector` an array of bools of shape (n,).
    """
    array = np.asarray(values)
    each = (
        np.isclose(array, array[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
        .reshape(len(array), -1)
        .all(axis=1)
    )
    if return_vector:
        return np.asarray(each)
    return bool(np.all(each))


def _flatten(data: Any) -> Any:
    if isinstance(data, int | float):
        return [data]
    if isinstance(data, list):
        return chain.from_iterable(map(_flatten, data))
    raise ValueError(f"expected numbers and lists of them, found {type(data).__name__}")


def compute_stats(data: Sequence[number | Sequence]) -> dict[str, float]:
    """`mean` and population variance `var` over all numbers of a nested, possibly jagged list.

    Raises:
        ValueError: there is no number, or something that is neither a number nor a list.
    """
    values = np.fromiter(_flatten(data), dtype=float)
    if values.size == 0:
        raise ValueError("no numbers to compute statistics of")
    return {"mean": float(values.mean()), "var": float(values.var())}


def compute_discounted_returns(rewards: np.ndarray | Sequence[float], gamma: float) -> np.ndarray:
    """Discounted returns G_t = r_t + gamma * G_(t+1).

    Args:
        rewards: shape (steps,).
        gamma: discount, 0 to 1.

    Returns:
        Shape (steps,); float32 when the rewards are no array.
    """
    steps = rewards if isinstance(rewards, np.ndarray) else np.asarray(rewards, dtype=np.float32)
    returns = np.empty_like(steps)
    following = 0.0
    for t in range(len(steps) - 1, -1, -1):
        following = steps[t] + gamma * following
        returns[t] = following
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[number]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[np.ndarray]:
    """Advantages per step, from rewards normalised over all steps of the group (DeepSeekMath,
    4.1.3: process supervision).

    Args:
        rewards: [trajectory][step], may be jagged.
        gamma: discount of the sum over the steps that follow; None for 1, the paper's.
        std_tol: least standard deviation.

    Returns:
        One array per trajectory: at each step the sum of the normalised rewards from there on.

    Raises:
        ValueError: the rewards are (nearly) all equal, or there are none.
    """
    stats = compute_stats([list(row) for row in rewards])
    deviation = stats["var"] ** 0.5
    if deviation < std_tol:
        raise ValueError(
            f"the rewards' standard deviation {deviation:g} is below {std_tol:g}: all steps are worth the same"
        )
    normalised = [(np.asarray(row, dtype=float) - stats["mean"]) / deviation for row in rewards]
    if gamma is None:
        gamma = 1.0
    return [compute_discounted_returns(row, gamma) for row in normalised]
