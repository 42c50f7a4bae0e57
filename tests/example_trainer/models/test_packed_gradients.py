"""Packed, shared or recomputed: the gradient of a batch is that of its sequences, each computed by
itself, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.models import Decoder, Geometry
from example_trainer.models.ops import reference
from example_trainer.models.packing import NO_PARENT, Packing
from example_trainer.models.shards import GradientSums
from tests.example_trainer.models import textbook

QWEN3 = Geometry(
    architecture="Qwen3ForCausalLM", vocab_size=23, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=6, max_positions=64, rms_norm_eps=1e-6, rope_theta=1e4, qk_norm=True,
    tie_word_embeddings=True,
)  # fmt: skip
BIASED = replace(
    QWEN3, architecture="LlamaForCausalLM", num_kv_heads=4, qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True,
    tie_word_embeddings=False,
)  # fmt: skip
GEOMETRIES = {"tied, norms of heads": QWEN3, "untied, biases": BIASED}


def make_model(geometry: Geometry, seed: int = 0) -> Decoder:
    model = Decoder(geometry, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
            )
        # float64 angles, as the textbook has them
        frequencies = geometry.rope_theta ** -(
            torch.arange(0, geometry.head_dim, 2).double() / geometry.head_dim
        )
        angles = torch.outer(torch.arange(geometry.max_positions).double(), frequencies)
        model.rotary = torch.cat((angles.cos(), angles.sin()), -1)
    return model


@dataclass(frozen=True)
class Tree:
    """Spans and what each continues; every span ends a sequence, which is trained from its second
    token on.

    Attributes:
        paths: the spans of each span's sequence, in order.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def paths(self) -> list[list[int]]:
        paths: list[list[int]] = []
        for number, parent in enumerate(self.parents):
            paths.append([number] if parent == NO_PARENT else [*paths[parent], number])
        return paths


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    parents = [draw(st.integers(NO_PARENT, number - 1)) for number in range(len(lengths))]
    return Tree(tuple(lengths), tuple(parents))


def sequence_rows(tree: Tree) -> list[Tensor]:
    """For each span the rows, among the packed tokens, of its whole sequence."""
    spans = [torch.arange(first, end) for first, end in Packing(tree.lengths).spans()]
    return [torch.cat([spans[part] for part in path]) for path in tree.paths]


def weights_of(sequence: Tensor) -> Tensor:
    """Something else for each token of each sequence."""
    return torch.cos(
        1.7 * sequence[1:].double() + torch.arange(len(sequence) - 1).double() * len(sequence)
    )


def packed_gradients(
    model: Decoder, tree: Tree, tokens: Tensor, totals: bool
) -> tuple[float, dict[str, Tensor]]:
    """Gradient of Σ weight · logprob over every token of every sequence, computed once per span."""
    rows = sequence_rows(tree)
    sources = torch.cat([row[:-1] for row in rows])
    targets = torch.cat([tokens[row[1:]] for row in rows])
    weights = torch.cat([weights_of(tokens[row]) for row in rows])
    counts = [len(row) - 1 for row in rows if len(row) > 1]
    model.arithmetic.sums = GradientSums(model) if totals else None
    packing = Packing(tree.lengths, parents=tree.parents)
    hidden = model.arithmetic.ops.rows(model(tokens, packing), sources)
    logprobs, _ = model.chosen_logprobs(
        hidden, targets, Packing(counts) if counts else None, chunk=5
    )
    loss = (weights * logprobs).sum()
    loss.backward()
    if model.arithmetic.sums is not None:
        assert all(parameter.grad is None for parameter in model.parameters()), (
            "autograd got what belongs to a sum"
        )
        return loss.item(), model.arithmetic.sums.take()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def textbook_gradients(
    model: Decoder, sequences: Sequence[Tensor]
) -> tuple[float, dict[str, Tensor]]:
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        logprobs = textbook.logits(parameters, model.geometry, sequence).log_softmax(-1)
        loss = (
            loss
            + (weights_of(sequence) * logprobs[:-1].gather(1, sequence[1:, None]).squeeze(1)).sum()
        )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("totals", [False, True], ids=["autograd", "totals"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@settings(max_examples=8, derandomize=True)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_a_shared_prefix_is_computed_once_and_counts_for_all(
    geometry: str, totals: bool, recompute: bool, tree: Tree, seed: int
) -> None:
    model = make_model(GEOMETRIES[geometry])
    model.gradient_checkpointing = recompute
    tokens = torch.randint(
        0, 23, (sum(tree.lengths),), generator=torch.Generator().manual_seed(seed)
    )
    loss, ours = packed_gradients(model, tree, tokens, totals)
    sequences = [tokens[row] for row in sequence_rows(tree)]
    exact_loss, exact = textbook_gradients(model, sequences)
    assert loss == pytest.approx(exact_loss, rel=1e-10, abs=1e-10)
    assert ours.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(
            ours[name], gradient, atol=1e-10, rtol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_sums_are_those_of_all_passes_and_begin_anew() -> None:
    model = make_model(QWEN3)
    tokens = torch.arange(11) % 23
    _, once = packed_gradients(model, Tree((5, 6), (NO_PARENT, NO_PARENT)), tokens, totals=True)
    model.arithmetic.sums = sums = GradientSums(model)
    for part in (tokens[:5], tokens[5:]):
        packing = Packing([len(part)])
        logprobs, _ = model.chosen_logprobs(
            model(part, packing)[:-1], part[1:], Packing([len(part) - 1])
        )
        (weights_of(part) * logprobs).sum().backward()
    taken = sums.take()
    for name, gradient in once.items():
        torch.testing.assert_close(taken[name], gradient, atol=1e-12, rtol=1e-10)
    assert sums.take() == {}


def test_a_frozen_parameter_gets_no_sum() -> None:
    model = make_model(QWEN3)
    frozen = model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    _, sums = packed_gradients(
        model, Tree((4,), (NO_PARENT,)), torch.tensor([1, 2, 3, 4]), totals=True
    )
    names = {name for name, parameter in model.named_parameters() if parameter is not frozen}
    assert sums.keys() == names


def test_parameters_may_move_to_other_memory() -> None:
    """As they do when a server's memory becomes the trainer's: what the model computes with is what
    is there now.
    """
    model = make_model(QWEN3)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    model.arithmetic.sums = GradientSums(model)
    before = model(tokens, Packing([5]))
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert not model(tokens, Packing([5])).any()
    assert before.any()


def test_without_targets_every_parameter_still_gets_its_zeros() -> None:
    model = make_model(BIASED)
    hidden = reference.rows(
        model(torch.zeros(1, dtype=torch.long), Packing([1])), torch.zeros(0, dtype=torch.long)
    )
    logprobs, entropy = model.chosen_logprobs(hidden, torch.zeros(0, dtype=torch.long), None)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
