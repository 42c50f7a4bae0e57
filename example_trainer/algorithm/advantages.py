"""Weights of rollouts and tokens in the loss, and the functions that options name.

Advantages are a function of the scores of a whole batch, group by group. They give one number per
    rollout. A function is one of ours by name, or the user's as `module:function`. If a group of
    rollouts has `advantages` of its own, they replace these.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from atroposlib.wire import scores_equal
from example_trainer.errors import ConfigError, NonFiniteError

# Functions that an option names: the project's own by a word, the user's as `module:function`.

Thing = TypeVar("Thing")


def make_importable(folders: Iterable[Path]) -> None:
    """Let modules be imported from these folders, behind all that can be imported already: nothing
    of the project is hidden.
    """
    for folder in map(str, (folder.resolve() for folder in folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def is_import(name: str) -> bool:
    """Return True if a name is a `module:function` of the user's."""
    return ":" in name


def built_in(flag: str, name: str, known: Mapping[str, Thing]) -> Thing:
    """Return the meaning of a word.

    Raises:
        ConfigError: nothing; the nearest one is named.
    """
    if name in known:
        return known[name]
    for near in difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        raise ConfigError(f"unknown {flag} {name}; did you mean {near}?")
    raise ConfigError(f"unknown {flag} {name}; there are {', '.join(known)}, or module:function")


def import_function(flag: str, name: str, parameters: int, expected: str) -> Callable[..., Any]:
    """Import a `module:function`.

    Args:
        flag: which option names it, for errors.
        parameters: how many it is called with, all of them positional.
        expected: what it should be, for errors.

    Raises:
        ConfigError: the module or function does not exist, the module cannot be imported, or the
            function cannot be called so.
    """
    module_name, _, function_name = name.partition(":")
    if not all(
        part.isidentifier() for part in [*module_name.split("."), *function_name.split(".")]
    ):
        raise ConfigError(
            f"{flag} {name} is not module:function, as in my_losses:mine; expected is {expected}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            raise ConfigError(
                f"{flag} {name}: there is no module {error.name} in the current directory, beside "
                "the --config file or among the installed ones. Give a file that can be imported"
            ) from error
        raise refusal(flag, name, f"importing it failed: {told(error)}", expected) from error
    except Exception as error:
        raise refusal(flag, name, f"importing it failed: {told(error)}", expected) from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise refusal(flag, name, f"{module_name} has no {function_name}", expected)
        found = getattr(found, part)
    if not callable(found):
        raise refusal(flag, name, f"it is not a function but {type(found).__name__}", expected)
    try:
        inspect.signature(found).bind(*[None] * parameters)
    except TypeError as error:
        count = "one argument" if parameters == 1 else f"{parameters} arguments"
        raise refusal(
            flag, name, f"it cannot be called with {count} ({error})", expected
        ) from error
    except ValueError:  # Python sees no signature; the function is tried later
        pass
    function: Callable[..., Any] = found
    return function


def refusal(flag: str, name: str, problem: str, expected: str) -> ConfigError:
    """Return the error line for a function that cannot be used."""
    return ConfigError(f"{flag} {name}: {problem}; expected is {expected}")


def told(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


Normalisation = Literal["token", "sequence", "constant"]
DEFAULT_BETA = 0.1
"""β of exponential advantages."""

Advantages = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""From the scores of a batch, one finite number per rollout of each group, to as many advantages in
the same order."""

_EXPECTED = "a function of the batch's scores, group by group, that returns one finite number per score, in the same order"
_MADE_UP = ((1.0, 0.0, 0.5), (0.25, 0.25), (1.0,), (-2.0, 3.0))
"""Scores to try a function on: among them a group whose scores are all equal, and one of a single
rollout."""


def group_advantages(scores: Sequence[float], divide_by_std: bool = True) -> list[float]:
    """Return each rollout's distance to its group's mean score.

        A_i = (r_i - mean(r)) / std(r)        with the population's standard deviation

    Sources: DeepSeekMath (Shao et al., arXiv:2402.03300, section 4.1.2); without the division, so
    that easy and hard problems weigh alike, Dr. GRPO (Liu et al., arXiv:2503.20783).

    Returns:
        One advantage per rollout. A group whose scores are all equal teaches nothing: all zeros.
    """
    values = np.asarray(scores, dtype=np.float64)
    if scores_equal(values):
        return [0.0] * len(scores)
    centred = values - values.mean()
    result: list[float] = (centred / values.std() if divide_by_std else centred).tolist()
    return result


def leave_one_out_advantages(scores: Sequence[float]) -> list[float]:
    """Return each rollout's distance to the mean score of the others in its group: RLOO (Ahmadian
    et al., arXiv:2402.14740).

        A_i = r_i - 1/(k-1) Σ_{j≠i} r_j

    The baseline does not depend on the rollout itself, so it adds no bias. It is k/(k-1) times the
    distance to the group's own mean. A rollout alone in its group has nothing to be compared with:
    0.
    """
    values = np.asarray(scores, dtype=np.float64)
    if scores_equal(values):
        return [0.0] * len(scores)
    result: list[float] = ((values - values.mean()) * (len(values) / (len(values) - 1))).tolist()
    return result


def batch_advantages(
    scores: Sequence[Sequence[float]], divide_by_std: bool = True
) -> list[list[float]]:
    """Return each rollout's distance to the batch's mean score: REINFORCE++ (Hu et al.,
    arXiv:2501.03262).

    A_i = (r_i - mean(all r)) / std(all r)        with the population's standard deviation
    """
    flat = group_advantages([score for group in scores for score in group], divide_by_std)
    return _in_groups(flat, scores)


def group_batch_advantages(
    scores: Sequence[Sequence[float]], divide_by_std: bool = True
) -> list[list[float]]:
    """Return each rollout's distance to its group's mean score, in units of the whole batch:
    REINFORCE++ with baseline (Hu et al., arXiv:2501.03262).

        d_i = r_i - mean(its group's r)        A_i = d_i / std(all d)        the mean of all d is 0

    A group whose rollouts differ by next to nothing stays small, where its own standard deviation
    would blow it up.
    """
    centred = np.array(
        [value for group in scores for value in group_advantages(group, divide_by_std=False)]
    )
    if divide_by_std and not scores_equal(centred):
        centred = centred / centred.std()
    return _in_groups(centred.tolist(), scores)


def exponential_advantages(scores: Sequence[float], beta: float) -> list[float]:
    """Weight each rollout of a group by the exponential of its score, and take 1 off.

        A_i = exp(r_i / β) / mean_j exp(r_j / β) - 1

    The group's highest score is subtracted first, which changes no advantage: every exponential
    then lies in (0, 1], so no finite score overflows. The advantages of a group sum to 0 and lie
    between -1 and k - 1 for k rollouts. A small β leaves a gradient to the best rollouts alone.
    With rewards of 0 and 1 and β = 0.1, one correct rollout of 8 has an advantage of almost 7, and
    the others of almost -1. Source: the on/off study of TorchTitan's deterministic_vllm_rl
    experiment.

    Args:
        scores: finite, one per rollout.
        beta: β, above 0, in units of the score.

    Returns:
        One advantage per rollout. If all scores are equal, each is exactly 0.
    """
    values = np.asarray(scores, dtype=np.float64)
    if scores_equal(values):
        return [0.0] * len(scores)
    # A distance beyond the range of float64 becomes -inf, whose exponential is 0, as it is for a
    # large finite distance.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((values - values.max()) / beta)
    result: list[float] = (weights / weights.mean() - 1.0).tolist()
    return result


def find_advantages(
    name: str, divide_by_std: bool = True, beta: float = DEFAULT_BETA
) -> Advantages:
    """Return a built-in function by name, or import one of the user's and try it on made-up scores.

    Args:
        name: one of BUILT_IN, or `module:function`.
        divide_by_std: `group` divides each group's advantages by its standard deviation; `batch`
            and
            `group_batch` divide all by the batch's. The others divide nothing.
        beta: of `exponential`; the others do not use it.

    Returns:
        A function that raises NonFiniteError where a user's gives NaN or infinity, and ConfigError
        where it fails otherwise.

    Raises:
        ConfigError: it does not exist, cannot be imported, or does not do what it should. The
            message is one line with the reason.
    """
    if not is_import(name):
        return built_in("--advantages", name, BUILT_IN)(divide_by_std, beta)
    function = import_function("--advantages", name, 1, _EXPECTED)

    def checked(scores: Sequence[Sequence[float]]) -> list[list[float]]:
        return _checked_advantages(name, function, scores)

    try:
        checked(_MADE_UP)
    except NonFiniteError as error:
        raise ConfigError(
            f"{error}, which were made up to try it; expected is {_EXPECTED}"
        ) from error
    return checked


def _checked_advantages(
    name: str, function: Callable[..., Any], scores: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Call a user's function, and check what it returns."""
    try:
        rows = [
            [float(value) for value in row] for row in function([list(group) for group in scores])
        ]
    except Exception as error:
        raise refusal("--advantages", name, f"it failed with {told(error)}", _EXPECTED) from error
    for group, (row, group_scores) in enumerate(zip(rows, scores, strict=False)):
        if len(row) != len(group_scores):
            what = f"{len(row)} advantages for the {len(group_scores)} rollouts of group {group}"
            raise refusal("--advantages", name, f"it returned {what}", _EXPECTED)
    if len(rows) != len(scores):
        what = f"it returned {len(rows)} groups for {len(scores)}"
        raise refusal("--advantages", name, what, _EXPECTED)
    for group, row in enumerate(rows):
        if not np.isfinite(row).all():
            raise NonFiniteError(
                f"--advantages {name} gave {row} for the scores {list(scores[group])} of group {group}"
            )
    return rows


BUILT_IN: dict[str, Callable[[bool, float], Advantages]] = {
    "group": lambda divide, _: lambda scores: [group_advantages(group, divide) for group in scores],
    "leave_one_out": lambda *_: (
        lambda scores: [leave_one_out_advantages(group) for group in scores]
    ),
    "batch": lambda divide, _: lambda scores: batch_advantages(scores, divide),
    "group_batch": lambda divide, _: lambda scores: group_batch_advantages(scores, divide),
    "exponential": lambda _, beta: (
        lambda scores: [exponential_advantages(group, beta) for group in scores]
    ),
    "scores": lambda *_: lambda scores: [list(group) for group in scores],
    "zero": lambda *_: lambda scores: [[0.0] * len(group) for group in scores],
}
"""Name -> (whether to divide, β) -> the function."""
DIVIDED = ("group", "batch", "group_batch")
"""Baselines whose advantages may be divided by a standard deviation."""


def _in_groups(flat: Sequence[float], groups: Sequence[Sequence[float]]) -> list[list[float]]:
    rest = iter(flat)
    return [[next(rest) for _ in group] for group in groups]


def token_weights(
    lengths: Sequence[int],
    normalisation: Normalisation,
    max_tokens: int,
    sequences: float | None = None,
) -> list[float]:
    """The weight of each trained token of each sequence in the loss of a whole batch.

    The weights count in the whole batch, not in a bin. Summing the weighted loss over bins, in any
    split, then gives the loss, and the gradient, of one large batch.

    Args:
        lengths: trained tokens of each sequence of the batch; 0 if it is masked.
        normalisation: "token": every trained token of the batch weighs the same. Under "sequence",
            every sequence with a trained token does, as in equation 3 of DeepSeekMath. With
            "constant", the weight is 1 / (sequences × `max_tokens`), as in Dr. GRPO, masked
            sequences
            included: what is left does not weigh more when more is masked.
        max_tokens: the constant.
        sequences: by which "constant" divides; not given: as many as there are lengths.

    Returns:
        For each sequence the weight of any one of its tokens.
    """
    trained = [length for length in lengths if length > 0]
    if normalisation == "token":
        total = sum(trained)
        return [1.0 / total if length > 0 else 0.0 for length in lengths]
    if normalisation == "sequence":
        return [1.0 / (length * len(trained)) if length > 0 else 0.0 for length in lengths]
    count = len(lengths) if sequences is None else sequences
    return [1.0 / (count * max_tokens) if length > 0 else 0.0 for length in lengths]


# The choices of published methods, which fill in options that are not given: `--loss NAME` stands
# for all choices of a method.
#
# A method is a loss per token (algorithm/losses) together with how rewards become advantages
# (algorithm/advantages.py) and what each token counts. A flag of its own wins over the
# method's choice. docs/algorithms.md has the equations, and where a row differs from its paper.

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
    if is_import(loss):
        return Method(loss)
    return built_in("--loss", loss, METHODS)
