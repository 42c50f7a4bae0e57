"""Every loss, and distillation, against the formula written out for one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.algorithm.advantages import BOUNDS
from example_trainer.algorithm.losses import (
    BUILT_IN,
    MAX_LOG_RATIO,
    LossInputs,
    LossSettings,
    TokenLosses,
    grpo,
    gspo,
    token_losses,
)
from example_trainer.algorithm.objective import (
    distillation_advantage,
    distillation_loss,
    teacher_kl,
    untaught_share,
)
from example_trainer.errors import BatchError

Slope = tuple[float, float, bool, bool]


"""Loss of a token, its derivative by the token's logprob, and whether the lower and the upper bound
act."""


def clipped_surrogate(ratio: float, advantage: float, s: LossSettings) -> Slope:
    """PPO's, by cases."""
    low, high = 1 - s.clip_low, 1 + s.clip_high
    if advantage > 0 and ratio > high:
        return -high * advantage, 0.0, False, True
    if advantage < 0 and ratio < low:
        return -low * advantage, 0.0, True, False
    if advantage < 0 and s.dual_clip is not None and ratio > s.dual_clip:
        return -s.dual_clip * advantage, 0.0, False, True
    return -ratio * advantage, -ratio * advantage, False, False


def bounded_weight(ratio: float, advantage: float, logprob: float, s: LossSettings) -> Slope:
    """CISPO's."""
    low, high = 1 - s.clip_low, 1 + s.clip_high
    weight = min(max(ratio, low), high)
    return -weight * advantage * logprob, -weight * advantage, ratio < low, ratio > high


def written_out(
    name: str, logprobs: list[float], old: list[float], advantages: list[float], s: LossSettings
) -> list[Slope]:
    """One sequence, token by token."""
    ratios = [math.exp(new - past) for new, past in zip(logprobs, old, strict=True)]
    mean = math.exp(
        math.fsum(new - past for new, past in zip(logprobs, old, strict=True)) / len(ratios)
    )
    done = []
    for ratio, advantage, logprob in zip(ratios, advantages, logprobs, strict=True):
        if name == "cispo":
            done.append(bounded_weight(ratio, advantage, logprob, s))
        elif name == "reinforce":
            done.append((-ratio * advantage, -ratio * advantage, False, False))
        else:
            done.append(clipped_surrogate(mean if name == "gspo" else ratio, advantage, s))
    return done


def made_up(
    seed: int, lengths: list[int], spread: float = 0.5, dtype: torch.dtype = torch.float64
) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    logprobs = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    old = logprobs + spread * torch.randn(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    sequence = torch.arange(len(lengths)).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64)
    )
    return LossInputs(
        logprobs.to(dtype).requires_grad_(),
        old.to(dtype),
        advantages.to(dtype),
        sequence,
        len(lengths),
    )


def slopes(inputs: LossInputs, result: TokenLosses) -> Tensor:
    (found,) = torch.autograd.grad(result.losses.sum(), inputs.logprobs)
    return found


def run(name: str, inputs: LossInputs, limits: LossSettings) -> TokenLosses:
    return token_losses(name, BUILT_IN[name], inputs, limits)


lengths_of_sequences = st.lists(st.integers(1, 12), min_size=1, max_size=5)


bounds = st.builds(
    LossSettings, st.floats(0.05, 1.0), st.floats(0.05, 1.5), st.none() | st.floats(1.1, 3.0)
)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), lengths=lengths_of_sequences, limits=bounds)
def test_losses_gradients_and_clipping_are_those_of_the_formula(
    name: str, seed: int, lengths: list[int], limits: LossSettings
) -> None:
    if "dual_clip" not in BOUNDS[name]:
        limits = LossSettings(limits.clip_low, limits.clip_high)
    inputs = made_up(seed, lengths)
    result = run(name, inputs, limits)
    rows = [
        tensor.detach().split(lengths)
        for tensor in (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    ]
    expected = [
        token
        for new, old, advantages in zip(*rows, strict=True)
        for token in written_out(name, new.tolist(), old.tolist(), advantages.tolist(), limits)
    ]
    losses, gradient, low, high = zip(*expected, strict=True)
    torch.testing.assert_close(
        result.losses.detach(), torch.tensor(losses, dtype=torch.float64), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(
        slopes(inputs, result), torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-12
    )
    assert (result.clipped_low.tolist(), result.clipped_high.tolist()) == ([*low], [*high])


@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_where_nothing_is_held_back_the_gradient_is_that_of_the_loss(name: str) -> None:
    """Losses that stop no gradient on purpose, by finite differences."""
    inputs = made_up(3, [4, 1, 7])

    def losses(logprobs: Tensor) -> Tensor:
        changed = LossInputs(
            logprobs, inputs.old_logprobs, inputs.advantages, inputs.sequence, inputs.sequences
        )
        return run(name, changed, LossSettings(0.2, 0.28, 3.0)).losses

    assert torch.autograd.gradcheck(losses, (inputs.logprobs,))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), lengths=lengths_of_sequences, limits=bounds)
def test_gspo_by_tokens_is_gspo_where_a_sequence_has_one_advantage(
    seed: int, lengths: list[int], limits: LossSettings
) -> None:
    """Value and gradient, averaged over a sequence's tokens, against the sequence's own objective
    under autograd.
    """
    made = made_up(seed, lengths)
    per_sequence = made.advantages[: len(lengths)]
    inputs = LossInputs(
        made.logprobs, made.old_logprobs, per_sequence[made.sequence], made.sequence, made.sequences
    )
    whole = []
    for new, old, advantage in zip(
        inputs.logprobs.split(lengths),
        inputs.old_logprobs.split(lengths),
        per_sequence,
        strict=True,
    ):
        ratio = (new - old).mean().exp()
        bounded = ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high)
        whole.append(-torch.minimum(ratio * advantage, bounded * advantage))
    by_tokens = torch.stack([part.mean() for part in gspo(inputs, limits).losses.split(lengths)])
    torch.testing.assert_close(by_tokens, torch.stack(whole), rtol=1e-11, atol=1e-12)
    found, expected = (
        torch.autograd.grad(x.sum(), inputs.logprobs)[0] for x in (by_tokens, torch.stack(whole))
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), lengths=lengths_of_sequences, limits=bounds)
def test_on_policy_every_gradient_is_the_plain_policy_gradient(
    name: str, seed: int, lengths: list[int], limits: LossSettings
) -> None:
    inputs = made_up(seed, lengths, spread=0.0, dtype=torch.float32)
    result = run(name, inputs, limits)
    assert torch.equal(slopes(inputs, result), -inputs.advantages)  # to the bit
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), lengths=lengths_of_sequences)
def test_what_lies_in_a_bin_beside_a_sequence_changes_no_bit_of_it(
    name: str, seed: int, lengths: list[int]
) -> None:
    packed, limits = made_up(seed, lengths, dtype=torch.float32), LossSettings(0.2, 0.28)
    together = run(name, packed, limits)
    gradient, start = slopes(packed, together), 0
    for length in lengths:
        part = slice(start, start + length)
        alone = LossInputs(
            packed.logprobs.detach()[part].clone().requires_grad_(),
            packed.old_logprobs[part],
            packed.advantages[part],
            torch.zeros(length, dtype=torch.int64),
            1,
        )
        apart = run(name, alone, limits)
        assert torch.equal(apart.losses, together.losses[part])
        assert torch.equal(slopes(alone, apart), gradient[part])
        assert torch.equal(apart.clipped_high, together.clipped_high[part])
        start += length


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_absurd_ratios_stay_finite(name: str, advantage: float) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([-0.0, -500.0, -1e4, -0.5, -30.0], requires_grad=True),
        old_logprobs=torch.tensor([-500.0, -0.0, -0.0, -1e4, -30.0]),
        advantages=torch.full((5,), advantage),
        sequence=torch.tensor([0, 1, 1, 1, 2]),
        sequences=3,
    )
    for limits in (
        LossSettings(0.2, 0.2),
        LossSettings(1.0, math.inf),
        LossSettings(0.2, 0.2, 3.0),
    ):
        result = run(name, inputs, limits)
        assert result.losses.isfinite().all()
        assert slopes(inputs, result).isfinite().all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_bin_without_trained_tokens_has_a_gradient_of_nothing(name: str) -> None:
    inputs = made_up(0, [], dtype=torch.float32)
    result = run(name, inputs, LossSettings(0.2, 0.2))
    assert slopes(inputs, result).shape == result.clipped_low.shape == (0,)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        (1.5, 1.0, None, -1.28, 0.0),  # beyond the upper bound, and better than average: stopped
        (0.5, 1.0, None, -0.5, -0.5),  # below the lower bound, and better: still pulled up
        (1.5, -1.0, None, 1.5, 1.5),  # beyond the upper bound, and worse: still pushed down
        (0.5, -1.0, None, 0.8, 0.0),  # below the lower bound, and worse: stopped
        (1.1, 2.0, None, -2.2, -2.2),  # within the bounds
        (5.0, -2.0, None, 10.0, 10.0),  # far beyond, and worse: pushed ever harder,
        (5.0, -2.0, 3.0, 6.0, 0.0),  # but for the second bound
        (2.5, -2.0, 3.0, 5.0, 5.0),
    ],
)
def test_clipping_in_numbers(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float
) -> None:
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    inputs = LossInputs(logprobs, -one, advantage * one, torch.zeros(1, dtype=torch.int64), 1)
    result = grpo(inputs, LossSettings(0.2, 0.28, dual_clip))
    assert result.losses.item() == pytest.approx(loss, rel=1e-12)
    assert slopes(inputs, result).item() == pytest.approx(slope, rel=1e-12)
    assert bool(result.clipped_low | result.clipped_high) == (slope == 0.0)


def differs(name: str, **changed: float) -> bool:
    inputs = made_up(5, [6, 1, 8], spread=1.5)
    usual: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.2}
    once, again = (run(name, inputs, LossSettings(**limits)) for limits in (usual, usual | changed))
    return not (
        torch.equal(once.losses, again.losses)
        and torch.equal(slopes(inputs, once), slopes(inputs, again))
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_table_says_which_bounds_a_loss_knows(name: str) -> None:
    """Flags that the table does not list for a loss are refused."""
    known = BOUNDS[name]
    assert differs(name, clip_low=0.5) == ("clip_eps" in known)
    assert differs(name, clip_high=0.5) == ("clip_eps_high" in known)
    assert differs(name, dual_clip=1.2) == ("dual_clip" in known)
    assert BOUNDS.keys() == BUILT_IN.keys()


NAN = float("nan")
STUDENT = torch.tensor([-1.0, -0.25, -3.0, -2.0, -50.0], dtype=torch.float64)
TEACHER = torch.tensor([-2.5, -0.75, NAN, -0.5, -1.0], dtype=torch.float64)
RATIOS = [1.5, 0.5, 0.0, -1.5, -MAX_LOG_RATIO]


def test_the_advantage_is_the_negative_log_ratio_without_gradient() -> None:
    student = STUDENT.clone().requires_grad_()
    found = distillation_advantage(student, TEACHER, 0.5)
    assert not found.requires_grad
    assert found.tolist() == [-0.5 * ratio for ratio in RATIOS]
    assert distillation_advantage(torch.tensor([NAN]), torch.tensor([-1.0]), 1.0).tolist() == [0.0]


def test_the_loss_is_half_the_square_and_its_gradient_the_log_ratio() -> None:
    student = STUDENT.clone().requires_grad_()
    losses = distillation_loss(student, TEACHER, 2.0)
    beyond = MAX_LOG_RATIO * 49.0 - MAX_LOG_RATIO**2 / 2  # linear from the limit on
    assert losses.tolist() == [2 * 1.125, 2 * 0.125, 0.0, 2 * 1.125, 2 * beyond]
    losses.sum().backward()
    assert student.grad is not None
    assert student.grad.tolist() == [2 * ratio for ratio in RATIOS]
    inner = STUDENT[:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: distillation_loss(x[[0, 1, 3]], TEACHER[[0, 1, 3]], 0.7), (inner,)
    )


@pytest.mark.parametrize("form", ["loss", "advantage"])
def test_the_expected_gradient_is_that_of_the_exact_reverse_kl(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True
    )
    # Every token once, with its probability in place of samples.
    if form == "loss":
        per_token = distillation_loss(logprobs, teacher, 1.0)
    else:
        per_token = -distillation_advantage(logprobs, teacher, 1.0) * logprobs
    (expected,) = torch.autograd.grad((logprobs.exp().detach() * per_token).sum(), logits)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(expected, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ["loss", "advantage"])
def test_a_student_that_samples_and_is_scored_becomes_its_teacher(form: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = (2 * torch.randn(8, generator=generator, dtype=torch.float64)).log_softmax(0)

    def reverse_kl() -> float:
        logprobs = logits.detach().log_softmax(0)
        return float((logprobs.exp() * (logprobs - teacher)).sum())

    before = reverse_kl()
    for _ in range(200):
        sampled = torch.multinomial(
            logits.detach().softmax(0), 64, replacement=True, generator=generator
        )
        logprobs = logits.log_softmax(0)[sampled]
        if form == "loss":
            loss = distillation_loss(logprobs, teacher[sampled], 1.0).mean()
        else:
            loss = -(distillation_advantage(logprobs, teacher[sampled], 1.0) * logprobs).mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.data -= 0.5 * gradient
    assert reverse_kl() < 0.02 * before


def test_the_figure_is_the_kl_in_expectation_and_counts_what_is_known() -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(1)
    # k3 of one token at a time, weighted by its probability.
    each = torch.stack([teacher_kl(student[i : i + 1], teacher[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(
        (student.exp() * each).sum(), (student.exp() * (student - teacher)).sum()
    )
    with_unknown = teacher_kl(
        torch.cat([student, torch.tensor([-1.0])]), torch.cat([teacher, torch.tensor([NAN])])
    )
    torch.testing.assert_close(with_unknown, each.sum())


def test_a_batch_without_a_teacher_is_refused_and_a_partly_scored_one_is_counted() -> None:
    assert untaught_share(3, 4) == 0.25
    assert untaught_share(0, 0) == 1.0
    with pytest.raises(
        BatchError, match=r"none of the 7 trained tokens.*--env\.teacher_url"
    ) as error:
        untaught_share(0, 7)
    assert "\n" not in str(error.value)
    assert math.isclose(untaught_share(7, 7), 0.0)
