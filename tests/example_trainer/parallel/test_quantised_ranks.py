"""8-bit moments over two ranks: each rank's part has the bits of one process, and a checkpoint
serves any number of ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.models import Decoder, load_model, save_model
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.runs import SavedStep
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.quantised_worker import (
    CONFIG,
    GEOMETRY,
    QUANTISED,
    RUN,
    SAVED,
    STEPS,
    made,
    train,
)

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a first checkpoint, and the checkpoints of one process after SAVED and STEPS steps."""
    folder = tmp_path_factory.mktemp("quantised")
    torch.manual_seed(0)
    model = Decoder(GEOMETRY, torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    save_model(model, folder / "start")
    (folder / "start" / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(str(folder / "start"), torch.bfloat16)
    optimizer = made(model)
    checkpoints = Checkpoints(folder / "one", RUN, keep_states=None)
    for steps in (SAVED, STEPS):
        train(model, optimizer, steps)
        checkpoints.save(model, optimizer, {})
    return folder


@pytest.mark.parametrize("kind", ["fsdp", "tensor_parallel"])
def test_ranks_save_the_bits_of_one_process_which_goes_on_from_them(
    kind: str, processes: Processes, folder: Path
) -> None:
    worker = Path(__file__).with_name("quantised_worker.py")
    command = [sys.executable, "-m", "tests.forked_ranks", worker, kind, folder]
    processes.finish(
        processes.start(kind, command, environment={"PYTHONPATH": str(ROOT)}), seconds=240
    )
    for step in (SAVED, STEPS):
        one, many = (
            load_file(folder / who / f"step_{step}" / "trainer_state" / "optimizer.safetensors")
            for who in ("one", kind)
        )
        assert one.keys() == many.keys()
        assert sum(tensor.dtype == torch.uint8 for tensor in many.values()) == 2 * QUANTISED
        assert [key for key, tensor in one.items() if not torch.equal(many[key], tensor)] == []
        weights, theirs = (
            load_file(folder / who / f"step_{step}" / "model.safetensors") for who in ("one", kind)
        )
        assert {tensor.dtype for tensor in theirs.values()} == {torch.bfloat16}
        assert [
            key for key, tensor in weights.items() if not torch.equal(theirs[key], tensor)
        ] == []
    saved = SavedStep.read(folder / kind / f"step_{SAVED}")
    model = load_model(str(saved.path), torch.bfloat16)
    optimizer = made(model)
    load_state(saved, optimizer)
    train(model, optimizer, STEPS)
    there = load_file(folder / "one" / f"step_{STEPS}" / "trainer_state" / "optimizer.safetensors")
    assert [
        key for key, tensor in optimizer.state_dict().items() if not torch.equal(tensor, there[key])
    ] == []
