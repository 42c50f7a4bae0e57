"""Distillation against closed forms: values, gradients in float64, and the exact reverse KL of a
small categorical.
"""

import math

import pytest
import torch

from example_trainer.algorithm.losses import MAX_LOG_RATIO
from example_trainer.algorithm.objective import (
    distillation_advantage,
    distillation_loss,
    teacher_kl,
    untaught_share,
)
from example_trainer.errors import BatchError

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
