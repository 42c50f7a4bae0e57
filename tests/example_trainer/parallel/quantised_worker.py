"""A rank of test_quantised_ranks.py: trains a wide model with 8-bit moments, saves, resumes on the
same ranks, and goes on.

python -m tests.forked_ranks quantised_worker.py KIND FOLDER      KIND: fsdp or tensor_parallel
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from atroposlib.wire import TrainerSession
from example_trainer.models import Decoder, Geometry, load_model
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.parallel.tensor import split_decoder
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import Run, SavedStep

RUN = Run("a", "model", (TrainerSession(1000, 0),))
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "bfloat16",
}  # fmt: skip
GEOMETRY = Geometry.from_config(CONFIG)
QUANTISED = 6
"""Matrices of GEOMETRY whose rows are whole blocks on each of two ranks: all of them."""
SAVED, STEPS = 2, 4


def made(model: Decoder, offload: bool = False) -> MasterAdamW:
    """Without clipping: the norm of the gradient is summed in another order over ranks."""
    return MasterAdamW(
        model,
        lr=0.01,
        weight_decay=0.1,
        max_grad_norm=0.0,
        shards=model.shards,
        in_8_bits=True,
        offload=offload,
    )


def train(model: Decoder, optimizer: MasterAdamW, until: int) -> None:
    """Gradients that are the same whatever the ranks are: of made-up whole tensors."""
    shards = optimizer.shards
    while optimizer.steps < until:
        for number, (name, shape) in enumerate(optimizer.whole_shapes.items()):
            whole = torch.randn(
                shape, generator=torch.Generator().manual_seed(100 * optimizer.steps + number)
            )
            optimizer.gradients()[name] = shards.take(name, whole).clone()
        optimizer.step()
        optimizer.write_weights()


def maker(kind: str, ranks: Ranks) -> partial[Decoder]:
    if kind == "fsdp":
        return partial(sharded_decoder, world_size=ranks.world_size)
    return partial(split_decoder, rank=ranks.rank, size=ranks.world_size, group=dist.group.WORLD)


def main(kind: str, folder: Path) -> None:
    with join_ranks(60, torch.device("cpu")) as ranks:
        make = maker(kind, ranks)
        model = load_model(str(folder / "start"), torch.bfloat16, "cpu", make)
        optimizer = made(model)
        checkpoints = Checkpoints(folder / kind, RUN, keep_states=None, ranks=ranks)
        train(model, optimizer, SAVED)
        path = checkpoints.save(model, optimizer, {})
        train(model, optimizer, STEPS)
        checkpoints.save(model, optimizer, {})
        resumed = made(load_model(str(path), torch.bfloat16, "cpu", make), offload=True)
        load_state(SavedStep.read(path), resumed)
        train(model, resumed, STEPS)
        there: dict[str, Tensor] = resumed.state_dict()
        different = [
            key
            for key, tensor in optimizer.state_dict().items()
            if not torch.equal(tensor, there[key])
        ]
        assert different == [], different


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
