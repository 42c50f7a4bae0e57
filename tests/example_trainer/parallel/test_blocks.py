"""Scales of 8-bit moments over several ranks: each rank holds the scales of its own elements, and
together they are the whole.
"""

from __future__ import annotations

import math

import pytest
import torch

from example_trainer.models.decoder import Decoder
from example_trainer.models.shards import Shards, Split
from example_trainer.parallel.fsdp import FsdpShards
from example_trainer.parallel.tensor import TensorParallelShards
from example_trainer.training.quantised import QUANTISED_BLOCK, can_be_quantised, scale_shape
from tests.example_trainer.parallel.spread_cases import Mesh
from vllm_patching.weights.families import Geometry

GEOMETRY = Geometry(
    architecture="Qwen2ForCausalLM", vocab_size=67, hidden_size=512, intermediate_size=1024, num_layers=1, num_heads=4,
    num_kv_heads=1, head_dim=256, max_positions=64, rms_norm_eps=1e-6, rope_theta=1e4, qkv_bias=True,
)  # fmt: skip
RANKS = 4


def ranks_of(kind: str, shapes: dict[str, tuple[int, ...]]) -> list[Shards]:
    if kind == "tensor parallel":
        return [TensorParallelShards(GEOMETRY, Split(rank, RANKS, None)) for rank in range(RANKS)]
    found: list[Shards] = [FsdpShards(Mesh(rank, RANKS)) for rank in range(RANKS)]  # type: ignore[arg-type]
    for shards in found:
        for name, shape in shapes.items():
            shards.whole_shape(name, torch.empty(shape, device="meta"))
    return found


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
def test_ranks_hold_the_scales_of_their_own_elements(kind: str) -> None:
    shapes = {
        name: tuple(p.shape)
        for name, p in Decoder(GEOMETRY, torch.float32, "meta").named_parameters()
    }
    ranks, tried = ranks_of(kind, shapes), 0
    for name, shape in shapes.items():
        columns = ranks[0].local_shape(name, 0)[-1]
        if not can_be_quantised((*shape[:-1], columns), spread=True):
            continue
        tried += 1
        scale = torch.arange(math.prod(scale_shape(shape))).view(scale_shape(shape)) + 1.0
        parts = [shards.take(name, scale, QUANTISED_BLOCK) for shards in ranks]
        of_elements = scale.repeat_interleave(QUANTISED_BLOCK, dim=1)
        for rank, (shards, part) in enumerate(zip(ranks, parts, strict=True)):
            assert tuple(part.shape) == shards.local_shape(name, rank, QUANTISED_BLOCK), name
            assert torch.equal(
                part.repeat_interleave(QUANTISED_BLOCK, dim=1), shards.take(name, of_elements)
            ), name
        assert torch.equal(ranks[0].joined(name, parts, QUANTISED_BLOCK), scale), name
    assert tried == 6  # embedding and output matrix, two matrices of attention, two of the MLP
