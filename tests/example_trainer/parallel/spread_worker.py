"""Started by test_spread_training.py: train made-up models spread over the ranks, and write the
whole results.

python -m tests.forked_ranks spread_worker.py KIND FOLDER SEED…      KIND: fsdp, tensor_parallel or expert_parallel
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from atroposlib.wire import TrainerSession
from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder, load_model
from example_trainer.models.head import chosen_logprobs
from example_trainer.models.packing import Packing
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.parallel.tensor import TensorParallelShards, split_decoder
from example_trainer.training import checkpoints as checkpointing
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import Run, SavedStep
from tests.example_trainer.parallel.spread_cases import (
    make_config,
    make_optimizer,
    take_steps,
    whole_state,
)


def run_case(ranks: Ranks, kind: str, folder: Path, seed: int) -> None:
    make = partial(sharded_decoder, world_size=ranks.world_size)
    if kind == "expert_parallel":
        make = partial(make, expert_parallel=ranks.world_size)
    if kind == "tensor_parallel":
        make = partial(
            split_decoder, rank=ranks.rank, size=ranks.world_size, group=dist.group.WORLD
        )
    config = make_config(seed)
    model = load_model(str(folder / f"model-{seed}"), torch.float32, "cpu", make)
    reference = load_model(
        str(folder / f"model-{seed}"), torch.float32, "cpu", make
    ).requires_grad_(False)
    if isinstance(model.shards, TensorParallelShards):
        check_head(model)
    optimizer = make_optimizer(model, config)
    place = (ranks.rank, ranks.world_size)
    if kind == "tensor_parallel":
        place = (0, 1)
    figures = take_steps(model, optimizer, reference, config, seed, *place)
    state = whole_state(optimizer)
    again = make_optimizer(model, config)
    again.load_state(
        {key: tuple(tensor.shape) for key, tensor in state.items()},
        state.__getitem__,
        optimizer.steps,
    )
    resumed = whole_state(again)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in state.items()), (
        "a resumed optimizer has another state"
    )
    check_checkpoints(ranks, model, optimizer, again, folder / f"{kind}-{seed}-checkpoints", state)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = {name: model.shards.local(p).clone() for name, p in trained.items()}
    weights = {name: model.shards.whole(name, local).clone() for name, local in parameters.items()}
    if isinstance(model.shards, TensorParallelShards):
        equal = [name for name, what in model.shards.kinds.items() if what in ("equal", "partial")]
        rows = {name: model.shards.split.gather(optimizer.masters[name]) for name in equal}
        apart = [
            name
            for name, copies in rows.items()
            if not all(torch.equal(copies[0], copy) for copy in copies)
        ]
        assert not apart, f"ranks hold different values of {apart}"
    if ranks.is_main:
        save_file(
            {f"weight.{k}": v for k, v in weights.items()} | state,
            folder / f"{kind}-{seed}.safetensors",
        )
        (folder / f"{kind}-{seed}.json").write_text(json.dumps(figures))


def check_head(model: Decoder) -> None:
    """The split output head gives each row its own temperature, and the entropy its gradient, as
    the whole matrix does.
    """
    generator = torch.Generator().manual_seed(3)
    vocab, held = model.geometry.vocab_size, model.output_weight
    whole = torch.cat(model.split.gather(held.detach()))[:vocab].requires_grad_()
    hidden = torch.randn(7, held.shape[1], generator=generator).requires_grad_()
    targets, temperatures = (
        torch.randint(0, vocab, (7,), generator=generator),
        torch.linspace(0.5, 2, 7),
    )
    upstream = torch.randn(2, 7, generator=generator).unbind()
    found = model.chosen_logprobs(
        hidden, targets, Packing([7]), 3, temperatures, entropy_gradient=True
    )
    expected = chosen_logprobs(hidden, whole, targets, None, 3, temperatures, entropy_gradient=True)
    first, end = model.split.vocabulary_range(vocab)
    mine, part = torch.autograd.grad(found, (hidden, held), upstream)
    theirs, matrix = torch.autograd.grad(expected, (hidden, whole), upstream)
    pairs = (
        *zip(found, expected, strict=True),
        (mine, theirs),
        (part[: end - first], matrix[first:end]),
    )
    for ours, one_process in pairs:
        torch.testing.assert_close(ours, one_process, atol=1e-5, rtol=1e-5)


def check_checkpoints(
    ranks: Ranks,
    model: Decoder,
    optimizer: MasterAdamW,
    other: MasterAdamW,
    folder: Path,
    state: dict[str, torch.Tensor],
) -> None:
    """A checkpoint written in the background holds the whole state, read back by any rank; one
    rank's failure is every rank's.
    """
    checkpoints = Checkpoints(folder, Run("a", "model", (TrainerSession(1000, 0),)), ranks=ranks)
    write = checkpointing.write_safetensors

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpointing.write_safetensors = fail
    checkpoints.begin(model, optimizer, {})
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.wait()
    checkpointing.write_safetensors = write
    path = checkpoints.begin(model, optimizer, {})
    while not checkpoints.written():
        ranks.barrier("waiting for the checkpoint")
    saved = load_file(path / "trainer_state" / "optimizer.safetensors")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in state.items())
    other.load_state(
        {key: tuple(tensor.shape) for key, tensor in state.items()}, lambda key: 0 * state[key], 1
    )
    load_state(SavedStep.read(path), other)
    found = other.state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in optimizer.state_dict().items())
    whole = load_model(str(path), torch.float32)
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, state[f"master.{name}"]), name


if __name__ == "__main__":
    with join_ranks(60, torch.device("cpu")) as joined:
        for number in map(int, sys.argv[3:]):
            run_case(joined, sys.argv[1], Path(sys.argv[2]), number)
