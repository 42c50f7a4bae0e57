"""The planned bytes that a pass over a model of transformers keeps equal the measured ones."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from example_trainer.models import load_model
from example_trainer.models.packing import Packing
from example_trainer.models.transformers_activations import (
    Activations,
    Growth,
    measure_activations,
)
from example_trainer.models.transformers_layout import transformers_geometry
from example_trainer.models.transformers_model import TransformersModel
from tests.example_trainer.models.transformers_cases import checkpoint

CPU = torch.device("cpu")


def kept_by(model: TransformersModel, lengths: list[int]) -> int:
    """Bytes of the storages that a forward pass saves, without the model's own."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(torch.zeros(sum(lengths), dtype=torch.int64), Packing(lengths))
    assert hidden.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Next", "DeepseekV3"])
def test_what_is_measured_is_what_the_whole_model_keeps(name: str) -> None:
    geometry = transformers_geometry(checkpoint(name))
    activations = measure_activations(TransformersModel(geometry, torch.float32), CPU)
    model = load_model(str(checkpoint(name)), torch.float32)
    assert isinstance(model, TransformersModel)
    for lengths in ([64, 64], [64, 64, 64]):
        kept = kept_by(model, lengths)
        planned = activations.kept(sum(lengths), 0, recomputed=False)
        assert planned == pytest.approx(kept, rel=0.05)
    model.gradient_checkpointing = True
    inputs = 4 * geometry.hidden_size
    planned = activations.kept(200, inputs, recomputed=True)
    assert planned == pytest.approx(kept_by(model, [50, 50, 50, 50]), rel=0.4)


def test_growth_goes_through_both_passes() -> None:
    growth = Growth.through(100, 100 * 7 + 100**2 * 3, 200 * 7 + 200**2 * 3)
    assert growth == Growth(7.0, 3.0)
    assert growth.bytes(1000) == 7_000 + 3_000_000


def test_recomputed_layers_keep_their_inputs() -> None:
    activations = Activations((Growth(10, 0), Growth(30, 1)), Growth(5, 0))
    assert activations.kept(10, 2, recomputed=False) == 50 + 100 + 300 + 100
    assert activations.kept(10, 2, recomputed=True) == 50 + 2 * 2 * 10
    assert activations.largest(10) == 400
