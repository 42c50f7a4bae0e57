"""Advantages, their weights, and means over sequences, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from example_trainer.algorithm.advantages import (
    batch_advantages,
    exponential_advantages,
    find_advantages,
    group_advantages,
    group_batch_advantages,
    leave_one_out_advantages,
    token_weights,
)
from example_trainer.algorithm.losses import sequence_lengths, sequence_mean

scores = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=1, max_size=12)


class TestAdvantages:
    def test_closed_form(self) -> None:
        assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
            [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
        )
        assert group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=False) == [
            0.75,
            -0.25,
            -0.25,
            -0.25,
        ]

    @given(scores)
    def test_mean_is_zero_and_population_variance_is_one(self, rewards: list[float]) -> None:
        advantages = group_advantages(rewards)
        assert len(advantages) == len(rewards)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
        if max(rewards) - min(rewards) > 1e-3:
            assert math.fsum(a * a for a in advantages) / len(advantages) == pytest.approx(1)
            assert sorted(range(len(rewards)), key=lambda i: rewards[i]) == sorted(
                range(len(rewards)), key=lambda i: (round(advantages[i], 9), rewards[i])
            )

    @given(scores, st.floats(0.5, 20), st.floats(-50, 50))
    def test_scale_and_offset_of_the_reward_do_not_matter(
        self, rewards: list[float], scale: float, offset: float
    ) -> None:
        assume(max(rewards) - min(rewards) > 0.01)
        moved = [scale * reward + offset for reward in rewards]
        assert group_advantages(moved) == pytest.approx(group_advantages(rewards), abs=1e-6)

    @given(st.floats(-1e6, 1e6), st.integers(1, 30))
    def test_equal_scores_teach_nothing(self, value: float, size: int) -> None:
        assert group_advantages([value] * size) == [0.0] * size
        assert group_advantages([value] * size, divide_by_std=False) == [0.0] * size


class TestOtherBaselines:
    groups = st.lists(scores, min_size=1, max_size=4)

    def test_closed_forms(self) -> None:
        assert leave_one_out_advantages([1.0, 0.0, 0.0, 0.5]) == pytest.approx(
            [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3]
        )
        assert batch_advantages([[1.0, 0.0], [3.0]], divide_by_std=False) == [
            pytest.approx([-1 / 3, -4 / 3]),
            pytest.approx([5 / 3]),
        ]
        # Distances to the groups' means: ±1, ±3, and 0 for the one alone; their mean square is 4.
        assert group_batch_advantages([[0.0, 2.0], [10.0, 4.0], [7.0]]) == [
            pytest.approx([-0.5, 0.5]),
            pytest.approx([1.5, -1.5]),
            [0.0],
        ]
        assert group_batch_advantages([[0.0, 2.0], [10.0, 4.0]], divide_by_std=False) == [
            [-1.0, 1.0],
            [3.0, -3.0],
        ]

    @given(scores)
    def test_leave_one_out_is_the_difference_to_the_others_mean(self, rewards: list[float]) -> None:
        others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
        expected = [
            r - math.fsum(rest) / len(rest) if rest else 0.0
            for r, rest in zip(rewards, others, strict=True)
        ]
        assert leave_one_out_advantages(rewards) == pytest.approx(expected, abs=1e-6)

    @given(groups)
    def test_a_batch_is_one_group_and_its_std_one_unit(self, batch: list[list[float]]) -> None:
        flat = [score for group in batch for score in group]
        assert [a for group in batch_advantages(batch) for a in group] == group_advantages(flat)
        centred = [a for group in group_batch_advantages(batch) for a in group]
        assert [len(group) for group in group_batch_advantages(batch)] == [
            len(group) for group in batch
        ]
        if any(
            max(group) - min(group) > 5e-4 for group in batch
        ):  # scores differ by a thousandth or not at all
            assert math.fsum(a * a for a in centred) / len(centred) == pytest.approx(1)
        else:
            assert not any(centred)

    @pytest.mark.parametrize(
        "name", ["group", "leave_one_out", "batch", "group_batch", "exponential", "zero"]
    )
    def test_equal_scores_teach_nothing(self, name: str) -> None:
        assert find_advantages(name)([[0.1] * 7, [0.1]]) == [[0.0] * 7, [0.0]]
        assert find_advantages(name)([[0.1 + 0.2, 0.3], [0.3]]) == [[0.0, 0.0], [0.0]]

    def test_by_name(self) -> None:
        batch = [[1.0, 0.0], [3.0, 3.0], [2.0]]
        assert find_advantages("group")(batch) == [[1.0, -1.0], [0.0, 0.0], [0.0]]
        assert find_advantages("group", divide_by_std=False)(batch) == [
            [0.5, -0.5],
            [0.0, 0.0],
            [0.0],
        ]
        assert find_advantages("leave_one_out")(batch) == [[1.0, -1.0], [0.0, 0.0], [0.0]]
        assert find_advantages("batch")(batch) == batch_advantages(batch)
        assert find_advantages("group_batch")(batch) == group_batch_advantages(batch)
        assert find_advantages("exponential", beta=2.0)(batch) == [
            exponential_advantages(group, 2.0) for group in batch
        ]
        assert find_advantages("scores")(batch) == batch
        assert find_advantages("zero")(batch) == [[0.0, 0.0], [0.0, 0.0], [0.0]]


class TestExponential:
    betas = st.floats(0.01, 100)

    def test_closed_forms(self) -> None:
        # Weights 4, 2, 1, 1 have the mean 2.
        assert exponential_advantages(
            [2 * math.log(2), math.log(2), 0.0, 0.0], 1.0
        ) == pytest.approx([1, 0, -0.5, -0.5])
        assert exponential_advantages([0.2 * math.log(3), 0.0], 0.2) == pytest.approx([0.5, -0.5])
        # One correct answer of eight at β = 0.1: the others weigh exp(-10).
        rest = math.exp(-10)
        expected = [8 / (1 + 7 * rest) - 1, *[8 * rest / (1 + 7 * rest) - 1] * 7]
        assert exponential_advantages([1.0, *[0.0] * 7], 0.1) == pytest.approx(expected)

    @given(scores, betas)
    def test_it_is_the_formula(self, rewards: list[float], beta: float) -> None:
        assume((max(rewards) - min(rewards)) / beta < 600 and max(map(abs, rewards)) / beta < 600)
        weights = [math.exp(reward / beta) for reward in rewards]
        mean = math.fsum(weights) / len(weights)
        expected = [weight / mean - 1 for weight in weights]
        assert exponential_advantages(rewards, beta) == pytest.approx(expected, rel=1e-9, abs=1e-9)

    @given(scores, betas, st.floats(-50, 50))
    def test_they_sum_to_zero_within_bounds_and_an_offset_does_not_matter(
        self, rewards: list[float], beta: float, offset: float
    ) -> None:
        advantages = exponential_advantages(rewards, beta)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
        assert all(-1 <= advantage <= len(rewards) - 1 + 1e-9 for advantage in advantages)
        best = max(range(len(rewards)), key=rewards.__getitem__)
        assert advantages[best] == max(advantages)
        moved = exponential_advantages([reward + offset for reward in rewards], beta)
        assert moved == pytest.approx(advantages, rel=1e-6, abs=1e-6)

    @given(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
        st.floats(min_value=1e-300),
    )
    def test_every_finite_score_gives_finite_advantages(
        self, rewards: list[float], beta: float
    ) -> None:
        assume(math.isfinite(beta))
        with np.errstate(
            all="raise"
        ):  # what overflows inside does so on purpose, and nothing else does
            advantages = exponential_advantages(rewards, beta)
        assert all(math.isfinite(advantage) for advantage in advantages)
        if len(set(rewards)) == 1:
            assert advantages == [0.0] * len(rewards)

    def test_a_large_beta_is_the_distance_to_the_mean(self) -> None:
        rewards = [1.0, 0.0, 0.25]
        linear = [advantage / 1e6 for advantage in group_advantages(rewards, divide_by_std=False)]
        assert exponential_advantages(rewards, 1e6) == pytest.approx(linear, rel=1e-5)

    def test_no_rollout_has_no_advantage(self) -> None:
        assert exponential_advantages([], 0.1) == []


class TestTokenWeights:
    lengths = st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(any)

    @given(lengths)
    def test_token_and_sequence_weights_sum_to_one(self, lengths: list[int]) -> None:
        for normalisation in ("token", "sequence"):
            weights = token_weights(lengths, normalisation, max_tokens=100)  # type: ignore[arg-type]
            assert math.fsum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(
                1
            )

    def test_closed_forms(self) -> None:
        assert token_weights([1, 3, 0], "token", 10) == [0.25, 0.25, 0.0]
        assert token_weights([1, 4, 0], "sequence", 10) == [0.5, 0.125, 0.0]
        assert token_weights([1, 3, 0, 0], "constant", 10) == [0.025, 0.025, 0.0, 0.0], (
            "masked ones are in the divisor"
        )
        assert token_weights([1, 3], "constant", 10, sequences=4) == [0.025, 0.025]

    def test_a_batch_without_trained_tokens_has_no_weights(self) -> None:
        for normalisation in ("token", "sequence", "constant"):
            assert token_weights([0, 0], normalisation, 10) == [0.0, 0.0]  # type: ignore[arg-type]


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_each_token_has_the_mean_of_its_sequence_whatever_lies_beside_it(
    seed: int, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), generator=generator)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    packed = sequence_mean(values, sequence, len(lengths))
    assert sequence_lengths(sequence, len(lengths)).tolist() == lengths
    for part, own in zip(values.split(lengths), packed.split(lengths), strict=True):
        alone = sequence_mean(part, torch.zeros(len(part), dtype=torch.int64), 1)
        assert torch.equal(alone, own)  # to the bit
        torch.testing.assert_close(own, part.mean().expand(len(part)))


def test_the_mean_has_a_gradient() -> None:
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0, 0, 0, 1, 1])
    assert torch.autograd.gradcheck(lambda x: sequence_mean(x, sequence, 2).square(), values)
    assert torch.autograd.gradgradcheck(lambda x: sequence_mean(x, sequence, 2).pow(3), values)


def test_the_gradient_is_the_mean_of_the_gradients_to_the_bit() -> None:
    """Summed as the mean is, not by index: so it depends on no neighbour, and on no order of a
    GPU's threads.
    """
    values, gradient = torch.randn(2, 3000).unbind()
    sequence = torch.arange(3).repeat_interleave(torch.tensor([1, 2000, 999]))
    values.requires_grad_()
    mean = sequence_mean(values, sequence, 3)
    (found,) = torch.autograd.grad(mean, values, gradient)
    assert torch.equal(found, sequence_mean(gradient, sequence, 3))
    graph, nodes = [mean.grad_fn], set()
    while graph:
        node = graph.pop()
        if node is not None:
            nodes.add(node.name())
            graph += [below for below, _ in node.next_functions]
    assert not any("Index" in name for name in nodes), nodes


def test_no_tokens_have_no_mean() -> None:
    assert sequence_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0).shape == (0,)
