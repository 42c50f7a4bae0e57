"""A rank of FSDP2 reads its own rows of a checkpoint, and gets what it would take of the whole."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from example_trainer.errors import ModelError
from example_trainer.models import Decoder
from example_trainer.models.hf_checkpoint import read_weights, save_model
from example_trainer.parallel.fsdp import FsdpShards
from tests.example_trainer.models.test_layout import geometries
from tests.example_trainer.parallel.spread_cases import Mesh
from tests.example_trainer.weight_bridge.test_send_plan import MIXTURE
from vllm_patching.weights.families import Geometry


@dataclass
class Held:
    """The part of a model that one rank holds: float32 masters of its rows."""

    geometry: Geometry
    dtype: torch.dtype
    shards: FsdpShards
    locals: dict[str, Tensor]

    def held_tensors(self) -> dict[str, Tensor]:
        return self.locals


def of_rank(model: Decoder, rank: int, ranks: int) -> Held:
    shards = FsdpShards(Mesh(rank, ranks))  # type: ignore[arg-type]
    local = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        shards.whole_shape(name, parameter)
        local[name] = torch.full(shards.local_shape(name, rank), float("nan"))
    return Held(model.geometry, model.dtype, shards, local)


def random_model(geometry: Geometry, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(geometry, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return model


def read_by_every_rank(model: Decoder, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        for rank in range(ranks):
            held = of_rank(model, rank, ranks)
            read_weights(held, Path(folder))  # type: ignore[arg-type]
            for name, parameter in model.named_parameters():
                wanted = held.shards.take(name, parameter.detach()).float()
                assert torch.equal(held.locals[name], wanted), (rank, name)


@settings(deadline=None, max_examples=25)
@given(geometry=geometries(), seed=st.integers(0, 2**31), ranks=st.integers(1, 5))
def test_each_rank_reads_what_it_takes_of_the_whole(
    geometry: Geometry, seed: int, ranks: int
) -> None:
    read_by_every_rank(random_model(geometry, seed), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_experts_are_rows(ranks: int) -> None:
    read_by_every_rank(random_model(MIXTURE), ranks)


def test_a_rank_copies_no_other_rank_s_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(MIXTURE)
    save_model(model, tmp_path)
    moved = list[int]()
    to = Tensor.to

    def counted(self: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if args and isinstance(args[0], torch.device):
            moved.append(self.numel())
        return to(self, *args, **keywords)

    monkeypatch.setattr(Tensor, "to", counted)
    held = of_rank(model, 1, 3)
    read_weights(held, tmp_path)  # type: ignore[arg-type]
    assert sum(moved) == sum(local.numel() for local in held.locals.values())


def test_a_tensor_of_another_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    model = random_model(MIXTURE)
    save_model(model, tmp_path)
    wider = replace(model.geometry, moe_intermediate_size=2 * MIXTURE.moe_intermediate_size)
    for rank in range(3):
        held = of_rank(Decoder(wider, torch.bfloat16, "meta"), rank, 3)
        with pytest.raises(ModelError, match=r"experts\.0\.gate_proj\.weight has shape"):
            read_weights(held, tmp_path)  # type: ignore[arg-type]
