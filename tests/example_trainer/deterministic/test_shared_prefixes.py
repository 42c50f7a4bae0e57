"""Deterministic training of rollouts that share prefixes: the logprobs of whole sequences to the
bit, and gradients that repeat.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from example_trainer.batch.groups import Batch
from example_trainer.batch.packing import PackedBin
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.deterministic.parity import ParityCheck, ParityError
from example_trainer.models import Decoder, Geometry
from example_trainer.models.packing import Packing
from example_trainer.models.shards import GradientSums
from example_trainer.training.step import response_logprobs
from tests.example_trainer.deterministic.layouts import MODELS
from tests.example_trainer.deterministic.training import (
    PROMPT,
    SMALL,
    bins,
    config,
    decoder_for,
    rollouts,
    train,
    tree_gradients,
)
from vllm_patching.batch_invariant.plan import SumPlan

MIXTURE = Geometry.from_config(MODELS["mixture"] | {"max_position_embeddings": 256})
TREE = Packing((70, 5, 12, 20), parents=(-1, 0, 1, 0))
"""A prompt that two turns continue, and a third turn behind the first, as one bin."""


def sharing(folder: Path, **changes: object) -> TrainerConfig:
    return config(folder, share_prefixes=True, **changes)


def figures(
    model: Decoder, packed: list[PackedBin], options: TrainerConfig
) -> dict[tuple[int, ...], Tensor]:
    """Logprob and entropy of each trained token, by the place of its sequence and its own."""
    found = {}
    for one in packed:
        with torch.no_grad():
            both = torch.stack(response_logprobs(model, one, options), dim=1)
        orders = one.orders.repeat_interleave(one.counts, dim=0)
        places = torch.cat((orders, one.positions[:, None]), dim=1).tolist()
        found |= {tuple(place): row for place, row in zip(places, both, strict=True)}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("geometry", "parts"), [(SMALL, 2), (MIXTURE, 1)])
def test_logprobs_and_entropies_have_the_bits_of_whole_sequences(
    geometry: Geometry, parts: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    drawn = decoder_for("cpu", geometry=geometry)
    model = deterministic_decoder(geometry, dtype, plan=SumPlan(parts))
    model.load_state_dict({name: p.to(dtype) for name, p in drawn.state_dict().items()})
    batch = rollouts(model, 7, 0, 4, shared=True)
    together, apart = bins(batch, share=True), bins(batch)
    spared = sum(len(one.tokens) for one in apart) - sum(len(one.tokens) for one in together)
    assert spared == 2 * PROMPT, "each prompt is forwarded once"
    options = sharing(tmp_path)
    shared, whole = (figures(model, packed, options) for packed in (together, apart))
    assert shared.keys() == whole.keys()
    assert len(shared) == batch.trained_tokens
    assert [place for place in whole if not torch.equal(shared[place], whole[place])] == []


@pytest.mark.parametrize("geometry", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_gradients_repeat_and_are_those_of_whole_sequences(geometry: Geometry) -> None:
    """In float64 the sums over whole sequences are the reference."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, geometry.vocab_size, (TREE.tokens,), generator=generator)
    drawn = decoder_for("cpu", geometry=geometry)
    exact = deterministic_decoder(geometry, torch.float64)
    exact.load_state_dict(drawn.state_dict())
    expected = tree_gradients(exact, tokens, TREE, together=False)
    shared, found = (tree_gradients(one, tokens, TREE, together=True) for one in (exact, drawn))
    assert found.keys() == shared.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.norm())
        assert float((shared[name] - gradient).norm()) < 1e-12 * scale, name
        assert float((found[name] - gradient).norm()) < 2e-5 * scale, name
    for recomputed in (False, True):
        drawn.gradient_checkpointing = recomputed
        again = tree_gradients(drawn, tokens, TREE, together=True)
        assert all(torch.equal(again[name], found[name]) for name in found), recomputed


def test_equal_rollouts_each_add_their_gradient(tmp_path: Path) -> None:
    """They share a span that continues none."""
    model = decoder_for("cpu")
    one = rollouts(model, 7, 0, 2).sequences[1]
    batch = Batch([one, replace(one, order=(one.order[0], 2))])
    (shared,), apart = bins(batch, share=True), bins(batch, tokens=1)
    assert (len(shared.lengths), len(shared.counts), len(apart)) == (1, 2, 2)
    found = []
    for packed in ([shared], apart):
        model.arithmetic.sums = sums = GradientSums(model)
        for part in packed:
            response_logprobs(model, part, sharing(tmp_path))[0].sum().backward()
        found.append(sums.take())
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, atol=1e-4, rtol=1e-4)


def test_equal_runs_have_equal_hashes(tmp_path: Path) -> None:
    """`train` compares each token with the sampler's, which has whole sequences."""
    reference = train(sharing(tmp_path), steps=2)
    assert len(set(reference)) == 2
    assert train(sharing(tmp_path), steps=2) == reference
    assert train(sharing(tmp_path, gradient_checkpointing=True), steps=2) == reference
    assert train(sharing(tmp_path, logprob_chunk=70), steps=2) == reference


def test_one_wrong_bit_behind_a_shared_prompt_is_found(tmp_path: Path) -> None:
    model, kernels = decoder_for("cpu"), {"linear": "reference"}
    (packed,) = bins(rollouts(model, 5, 0, 2, shared=True), tokens=1000, share=True)
    packed["rollout_logprobs"][-1] = torch.nextafter(
        packed["rollout_logprobs"][-1], torch.tensor(0.0)
    )
    logprobs, _ = response_logprobs(model, packed, sharing(tmp_path))
    number, position = int(packed.orders[-1, 1]), int(packed.positions[-1])
    place = f"first group 0, sequence {number}, position {position}"
    with pytest.raises(ParityError, match=f"1 of {len(logprobs)} tokens .*{place}"):
        ParityCheck(kernels, kernels).compare(packed, logprobs)
