"""Checkpoint tensors in the trainer's memory: the names under which an update finds them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from example_trainer.models.hf_checkpoint import load_model
from example_trainer.weight_bridge.checkpoint_sources import held_in, held_tensors
from tests.tiny_models import make_model
from vllm_patching.protocol.manifest import FlatSlice, source_view
from vllm_patching.weights.sharding import SourceSlice


class Holder(nn.Linear):
    """A model that lists its tensors itself."""

    def held_tensors(self) -> dict[str, torch.Tensor]:
        return {"own": self.weight}


def test_a_model_may_list_its_tensors_itself() -> None:
    assert held_tensors(nn.Linear(1, 1)).keys() == {"weight", "bias"}
    assert held_tensors(Holder(1, 1)).keys() == {"own"}


def test_a_slice_of_a_checkpoint_tensor_has_its_values_in_the_trainers_tensor(
    tmp_path: Path,
) -> None:
    tensors = make_model("Mixtral", tmp_path)
    model = load_model(str(tmp_path), torch.float32)
    held = held_tensors(model)
    moved = 0
    for name, whole in tensors.items():
        piece = SourceSlice(name, tuple(whole.shape), 0, whole.stride(), 0)
        shape, size = tuple(whole.shape), whole.nbytes
        item = FlatSlice("vllm", piece, shape, torch.float32, 0, size, learned=True)
        found = held_in(model)(item)
        source = held[found.slice.source]
        assert torch.equal(source_view(found, source.detach()).view_as(whole), whole), name
        moved += found.slice.source != name
    assert moved, "no tensor of the checkpoint is a part of another one"


def test_a_slice_of_a_parameter_is_left_alone() -> None:
    piece = SourceSlice("own", (2,), 0, (1,), 0)
    item = FlatSlice("own", piece, (2,), torch.float32, 0, 8)
    assert held_in(nn.Linear(1, 1))(item) is item
