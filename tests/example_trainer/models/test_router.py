"""Losses of a mixture's routers against their definitions, and the figures of a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.models.router import (
    IDLE_STEPS,
    ROUTER_FIGURES,
    RouterLosses,
    Routers,
    RouterSums,
    balance_loss,
    loss_gradient,
    router_figures,
)

CPU = torch.device("cpu")


def drawn_logits(seed: int, tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def z_loss(logits: Tensor) -> Tensor:
    """The mean of lse(l)² over logits [tokens, experts] of one layer."""
    return logits.double().logsumexp(-1).square().mean()


def best(k: int):  # type: ignore[no-untyped-def]
    """Route as a model does: the k most probable experts, and their probabilities."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        values, experts = logits.softmax(-1).topk(k)
        return values, experts

    return route


def test_an_even_load_has_the_balance_loss_1_and_a_collapsed_one_the_number_of_experts() -> None:
    even, collapsed = torch.full((4,), 0.25), torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert balance_loss(even, even).item() == 1
    assert balance_loss(collapsed, collapsed).item() == 4
    assert balance_loss(even, collapsed).item() == 1, "P alone does not make it larger"


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 12),
    experts=st.integers(1, 6),
    balance=st.sampled_from([0.0, 0.3]),
    z=st.sampled_from([0.0, 0.7]),
)
def test_the_gradient_is_that_of_the_definitions(
    seed: int, tokens: int, experts: int, balance: float, z: float
) -> None:
    logits = drawn_logits(seed, tokens, experts).requires_grad_()
    shares = torch.nn.functional.one_hot(logits.argmax(-1), experts).double().mean(0)
    loss = balance * balance_loss(logits.softmax(-1).mean(0), shares) + z * z_loss(logits)
    (expected,) = torch.autograd.grad(loss, logits)
    count = torch.tensor(float(tokens), dtype=torch.float64)
    gradient = loss_gradient(logits.detach(), shares, count, RouterLosses(balance, z))
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    again=st.booleans(),
)
def test_bins_do_not_change_gradient_or_figures(seed: int, sizes: list[int], again: bool) -> None:
    """Passes over parts of an update add up to the whole, with layers computed twice or once."""
    logits, weight = drawn_logits(seed, sum(sizes), 5), drawn_logits(seed + 1, 5, 2)
    routers = Routers([3], 5)
    routers.losses = RouterLosses(0.4, 0.2)
    counted = routers.begin_update(CPU)
    with torch.no_grad(), routers.passing():
        routers.choose(3, logits, best(2))
    shares = counted.shares()
    routers.begin_update(CPU)
    routers.give_losses(torch.tensor(float(len(logits))), shares)
    gradients = []
    for part in logits.split(sizes):
        leaf = part.clone().requires_grad_()
        with routers.passing():
            values, experts = routers.choose(3, leaf, best(2))
        if again:  # as in a backward pass with gradient checkpointing
            values, experts = routers.choose(3, leaf, best(2))
        (values * weight[experts].sum(-1)).sum().backward()
        gradients.append(leaf.grad)
    with routers.passing(counts=False):
        leaf = logits[:1].clone().requires_grad_()
        values, _ = routers.choose(3, leaf, best(2))
    values.sum().backward()
    plain = logits[:1].clone().requires_grad_()
    best(2)(plain)[0].sum().backward()
    assert torch.equal(leaf.grad, plain.grad), "an empty bin has no losses"

    whole = logits.clone().requires_grad_()
    values, experts = best(2)(whole)
    f = shares[0].double()
    loss = 0.4 * balance_loss(whole.softmax(-1).mean(0), f) + 0.2 * z_loss(whole)
    ((values * weight[experts].sum(-1)).sum() + loss).backward()
    torch.testing.assert_close(torch.cat(gradients), whole.grad, atol=1e-6, rtol=1e-6)
    routers.updated()
    row = routers.row(lambda values: values)
    assert row["router_z_loss"] == pytest.approx(z_loss(logits).item())
    assert row["router_balance_loss"] == pytest.approx(
        balance_loss(logits.softmax(-1).mean(0), f).item(), rel=1e-6
    )


def test_figures_of_layers_in_closed_form() -> None:
    """Layer 0 sends all tokens to expert 0; layer 1 is even."""
    sums = RouterSums(2, 4, CPU)
    logits = torch.zeros(4, 4)
    sums.add(0, logits, torch.zeros(4, 1, dtype=torch.int64))
    sums.add(1, logits, torch.arange(4)[:, None])
    assert router_figures(sums) == {
        "expert_load": 2.5,
        "expert_load_max": 4,
        "unused_experts": 3,
        "router_entropy": pytest.approx(math.log(4)),
        "router_balance_loss": pytest.approx(1),
        "router_z_loss": pytest.approx(math.log(4) ** 2),
    }


def test_ranks_add_their_sums_up() -> None:
    logits = drawn_logits(5, 10, 4)
    whole, halves = RouterSums(1, 4, CPU), [RouterSums(1, 4, CPU) for _ in range(2)]
    whole.add(0, logits, logits.topk(2).indices)
    for half, part in zip(halves, logits.split((3, 7)), strict=True):
        half.add(0, part, part.topk(2).indices)
    other = halves[1]._flat.flatten()
    joined = halves[0].over_ranks(lambda values: values + other)
    assert router_figures(joined) == pytest.approx(router_figures(whole))


def test_an_update_that_was_not_taken_has_no_figures() -> None:
    routers = Routers([0], 2)
    for tokens, taken in ((3, False), (5, True), (2, True)):
        routers.begin_update(CPU)
        with routers.passing(), torch.no_grad():
            routers.choose(0, torch.tensor([[1.0, 0.0]]).expand(tokens, 2), best(1))
        if taken:
            routers.updated()
    totals: list[Tensor] = []

    def total(values: Tensor) -> Tensor:
        totals.append(values)
        return values

    row = routers.row(total)
    assert totals[0][0].item() == 7, "choices of expert 0"
    assert row.keys() == set(ROUTER_FIGURES)


def test_a_step_without_tokens_has_no_figures_and_idles_no_expert() -> None:
    routers = Routers([0], 2)
    for _ in range(IDLE_STEPS):
        routers.begin_update(CPU)
        routers.updated()
        assert set(routers.row(lambda values: values).values()) == {None}
        assert routers.warning() is None


def test_an_expert_that_stays_without_tokens_is_named_once() -> None:
    routers = Routers([1, 4], 3)
    lines, used = [], torch.arange(3)[:, None]
    for step in range(2 * IDLE_STEPS + 3):
        routers.begin_update(CPU)
        with routers.passing(), torch.no_grad():
            routers.choose(1, torch.zeros(3, 3), lambda logits: (logits[:, :1], used))
            # Expert 2 of layer 4 gets a token in one step alone.
            chosen = used.clamp(max=1 + (step == IDLE_STEPS + 1))
            routers.choose(4, torch.zeros(3, 3), lambda logits, c=chosen: (logits[:, :1], c))
        routers.updated()
        routers.row(lambda values: values)
        lines.append(routers.warning())
    assert [step for step, line in enumerate(lines) if line] == [
        IDLE_STEPS - 1,
        2 * IDLE_STEPS + 1,
    ]
    assert lines[IDLE_STEPS - 1] == (
        "experts without a token in the last 20 steps: 2 of layer 4; they learn nothing; "
        "--router-balance-coef 0.01 spreads the tokens"
    )


def line_after_one_expert(routers: Routers, experts: int) -> str:
    """The line about idle experts, where one expert of layer 0 had every token."""
    for _ in range(IDLE_STEPS):
        routers.begin_update(CPU)
        with routers.passing(), torch.no_grad():
            routers.choose(0, torch.eye(experts)[:1], best(1))
        routers.updated()
        routers.row(lambda values: values)
    line = routers.warning()
    assert line is not None
    return line


def test_many_idle_experts_are_counted() -> None:
    routers = Routers([0], 16)
    line = line_after_one_expert(routers, 16)
    assert "8 of layer 0, 7 more;" in line


def test_the_line_about_idle_experts_asks_for_more_than_is_given() -> None:
    routers = Routers([0], 2)
    routers.losses = RouterLosses(balance=0.02)
    line = line_after_one_expert(routers, 2)
    assert line.endswith("nothing; --router-balance-coef above 0.02 spreads the tokens more")
