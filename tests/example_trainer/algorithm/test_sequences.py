"""Means over sequences against the mean, alone and packed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.algorithm.losses import sequence_lengths, sequence_mean


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
