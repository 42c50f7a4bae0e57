"""Losses and advantages of the user's own: found, tried, used, and refused in one line with the
fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from example_trainer.algorithm.advantages import find_advantages, make_importable
from example_trainer.algorithm.losses import (
    Loss,
    LossInputs,
    LossSettings,
    count_nonfinite,
    find_loss,
    refuse_nonfinite,
    token_losses,
)
from example_trainer.errors import BatchError, ConfigError, NonFiniteError

MODULE = """
import math
import torch
from example_trainer.algorithm.losses import TokenLosses

# losses
def mine(inputs, settings): return -inputs.log_ratio.exp() * inputs.advantages
def counted(inputs, settings):
    far = inputs.log_ratio.abs() > settings.clip_low
    return TokenLosses(-inputs.logprobs * inputs.advantages, far, ~far)
class Family:
    @staticmethod
    def member(inputs, settings, scale=2.0): return scale * mine(inputs, settings)
def one_argument(inputs): return inputs.logprobs
def summed(inputs, settings): return mine(inputs, settings).sum()
def whole_numbers(inputs, settings): return inputs.sequence
def in_half(inputs, settings): return mine(inputs, settings).bfloat16()
def unbounded(inputs, settings): return mine(inputs, settings) * (5 * inputs.log_ratio).exp()
def bounded_twice(inputs, settings): return -inputs.log_ratio.exp().clamp(max=settings.dual_clip * 1.0) * inputs.advantages
def nothing(inputs, settings): pass
def without_gradient(inputs, settings): return mine(inputs, settings).detach()
def of_another(inputs, settings): return mine(inputs, settings).detach() + torch.ones(6, requires_grad=True)
def infinite(inputs, settings): return inputs.logprobs / (inputs.advantages * 0)
def steep(inputs, settings): return (inputs.logprobs - inputs.old_logprobs).abs().sqrt()
def failing(inputs, settings): raise KeyError('a\\nb')
def masks_of_numbers(inputs, settings): return TokenLosses(inputs.logprobs, inputs.advantages, inputs.advantages)
def later(inputs, settings): return mine(inputs, settings)[: 6]
a_number = 3

# advantages
def centred(scores): return [[r - sum(g) / len(g) for r in g] for g in scores]
def by_array(scores):
    import numpy as np
    return [np.asarray(g) * 2 for g in scores]
def by_std(scores): return [[r / (math.fsum(g) - len(g) * g[0]) for r in g] for g in scores]
def not_a_number(scores): return [[math.nan] * len(g) for g in scores]
def one_for_each_group(scores): return [sum(g) for g in scores]
def too_few(scores): return [g[:2] for g in scores]
def flat(scores): return [[r] for g in scores for r in g]
def large_only(scores): return [[math.inf if r > 100 else r for r in g] for g in scores]
"""

SETTINGS = LossSettings(0.2, 0.2)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """The name of a module of the user's, in a folder that has been made importable."""
    name, before = "functions_of_a_user", list(sys.path)
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / f"{name}_wrong.py").write_text("def f(:\n")
    make_importable([tmp_path])
    yield name
    sys.path[:] = before
    for loaded in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[loaded]


def batch(tokens: int = 3) -> LossInputs:
    logprobs = torch.linspace(-1.0, -0.5, tokens).requires_grad_()
    return LossInputs(
        logprobs,
        logprobs.detach() - 0.5,
        torch.ones(tokens),
        torch.zeros(tokens, dtype=torch.int64),
        1,
    )


def test_a_loss_of_the_users(module: str) -> None:
    inputs = batch()
    for name, scale in (("mine", 1), ("Family.member", 2)):
        result = token_losses(name, find_loss(f"{module}:{name}", SETTINGS), inputs, SETTINGS)
        torch.testing.assert_close(result.losses, torch.full((3,), -scale * math.exp(0.5)))
        assert not (result.clipped_low | result.clipped_high).any()
    counted = token_losses("counted", find_loss(f"{module}:counted", SETTINGS), inputs, SETTINGS)
    assert counted.clipped_low.all()
    assert find_loss("grpo", SETTINGS) is find_loss("grpo", SETTINGS)


def test_a_loss_is_tried_with_what_the_flags_say(module: str) -> None:
    """One that needs --dual-clip can be used with it, and without it is refused before anything is
    loaded.
    """
    name = f"{module}:bounded_twice"
    loss = find_loss(name, LossSettings(0.2, 0.2, dual_clip=3.0))
    result = token_losses(name, loss, batch(), LossSettings(0.2, 0.2, dual_clip=1.5))
    torch.testing.assert_close(result.losses, torch.full((3,), -1.5))
    with pytest.raises(ConfigError, match=rf"^--loss {name}: a made-up batch made it fail with "):
        find_loss(name, SETTINGS)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one_argument", "it cannot be called with 2 arguments (too many positional arguments)"),
        ("summed", "it returned losses of shape [] for 6 tokens"),
        ("whole_numbers", "it returned torch.int64"),
        ("in_half", "it returned torch.bfloat16"),
        ("unbounded", "on a made-up batch its loss is ["),
        ("nothing", "it returned NoneType"),
        ("without_gradient", "what it returned has no gradient: it does not depend on logprobs"),
        ("of_another", "its gradient does not reach logprobs"),
        ("infinite", "on a made-up batch its loss is [-inf, -inf"),
        ("steep", "on a made-up batch its gradient is [nan"),
        ("failing", "a made-up batch made it fail with KeyError: "),
        ("masks_of_numbers", "its clipped_low is not a bool tensor of shape [6]"),
        ("a_number", "it is not a function but int"),
        ("absent", "functions_of_a_user has no absent"),
    ],
)
def test_losses_that_are_none_are_refused_in_one_line(module: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_loss(f"{module}:{name}", SETTINGS)
    assert str(caught.value).startswith(f"--loss {module}:{name}: {problem}")
    assert (
        "; expected is a function of LossInputs and LossSettings that returns one loss per trained token"
        in str(caught.value)
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "nowhere.at_all:f",
            "--loss nowhere.at_all:f: there is no module nowhere in the current directory, beside the --config",
        ),
        (
            "functions_of_a_user_broken:f",
            "--loss functions_of_a_user_broken:f: importing it failed: ModuleNotFoundError: No mod",
        ),
        (
            "functions_of_a_user_wrong:f",
            "--loss functions_of_a_user_wrong:f: importing it failed: SyntaxError: ",
        ),
        (
            "a/file.py:f",
            "--loss a/file.py:f is not module:function, as in my_losses:mine; expected is",
        ),
        ("grop", "unknown --loss grop; did you mean grpo?"),
        ("xyz", "unknown --loss xyz; there are grpo, gspo, cispo, reinforce, or module:function"),
    ],
)
def test_names_that_lead_nowhere(module: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_loss(name, SETTINGS)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_a_loss_that_goes_wrong_on_a_later_batch(module: str) -> None:
    """The trial has as many tokens as it returns."""
    name = f"{module}:later"
    loss = find_loss(name, SETTINGS)
    with pytest.raises(
        ConfigError,
        match=rf"^--loss {name}: it returned losses of shape \[6\] for 9 tokens; expected is",
    ):
        token_losses(name, loss, batch(9), SETTINGS)


def failing_with(error: Exception) -> Loss:
    def loss(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
        raise error

    return loss


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("a\nb"), "KeyError: 'a"),
        (
            RuntimeError("Expected all tensors to be on the same device\nException raised from"),
            "RuntimeError: Expected all tens",
        ),
    ],
)
def test_a_loss_that_fails_on_a_later_batch_is_named_in_one_line(
    error: Exception, told: str
) -> None:
    """A made-up batch is on the CPU and small: what a GPU or a long sequence shows comes in a step."""
    with pytest.raises(ConfigError) as caught:
        token_losses("m:f", failing_with(error), batch(), SETTINGS)
    assert str(caught.value).startswith(f"--loss m:f: it failed with {told}")
    assert str(caught.value).endswith("or TokenLosses")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("m:f", torch.OutOfMemoryError("CUDA out of memory.")),
        ("m:f", RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
        ("m:f", torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
        ("grpo", KeyError("a bug of ours")),
    ],
)
def test_what_is_not_a_losss_own_doing_comes_through(name: str, error: Exception) -> None:
    """Memory that runs out is the step's to see; a GPU's late errors and bugs of ours keep their
    place.
    """
    with pytest.raises(type(error)) as caught:
        token_losses(name, failing_with(error), batch(), SETTINGS)
    assert caught.value is error


def test_losses_that_are_not_finite_end_a_step_and_name_the_function() -> None:
    bins = [torch.tensor([1.0, math.nan, -math.inf]), torch.tensor([0.0])]
    count = int(sum(count_nonfinite(losses) for losses in bins))
    with pytest.raises(
        NonFiniteError,
        match=r"^--loss m:f is NaN or infinite for 2 of 4 tokens; .*--skip-nonfinite$",
    ):
        refuse_nonfinite("m:f", count, 4)
    refuse_nonfinite("m:f", int(count_nonfinite(bins[1])), 1)


def test_advantages_of_the_users(module: str) -> None:
    assert find_advantages(f"{module}:centred")([[1.0, 0.0], [5.0]]) == [[0.5, -0.5], [0.0]]
    doubled = find_advantages(f"{module}:by_array")([[1.0, 0.0], [5.0]])
    assert doubled == [[2.0, 0.0], [10.0]]
    assert type(doubled[0][0]) is float


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine", "it cannot be called with one argument (missing a required argument: 'settings')"),
        ("by_std", "it failed with ZeroDivisionError: "),
        (
            "not_a_number",
            "gave [nan, nan, nan] for the scores [1.0, 0.0, 0.5] of group 0, which were made up to try it",
        ),
        ("one_for_each_group", "it failed with TypeError: "),
        ("too_few", "it returned 2 advantages for the 3 rollouts of group 0"),
        ("flat", "it returned 1 advantages for the 3 rollouts of group 0"),
    ],
)
def test_advantages_that_are_none_are_refused_in_one_line(
    module: str, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_advantages(f"{module}:{name}")
    text = str(caught.value)
    assert text.startswith(f"--advantages {module}:{name}")
    assert problem in text
    assert text.endswith("; expected is a function of the batch's scores, group by group, that returns one finite number "
                         "per score, in the same order")  # fmt: skip
    assert "\n" not in text


def test_advantages_that_are_not_finite_in_a_batch_leave_the_batch_out(module: str) -> None:
    function = find_advantages(f"{module}:large_only")
    with pytest.raises(
        BatchError, match=r"large_only gave \[0.0, inf\] for the scores \[0.0, 200.0\] of group 1$"
    ):
        function([[1.0], [0.0, 200.0]])
