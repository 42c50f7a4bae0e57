"""Made-up training work: random weights of a shape, and packed bins of random tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from bench.gpu.shapes import SHAPES
from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder
from example_trainer.models.shards import Shards
from example_trainer.process import StopSignal
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import BatchGradients, make_objective
from vllm_patching.weights.families import Geometry


def geometry_of(shape: str, positions: int = 4096) -> Geometry:
    """The geometry of a key of SHAPES, with room for sequences of `positions` tokens."""
    return Geometry.from_config({**SHAPES[shape], "max_position_embeddings": positions}, shape)


@torch.no_grad()
def dtype_on(device: torch.device) -> torch.dtype:
    """Return the type of weights on a device: bfloat16 on a GPU, float32 on a CPU."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float32


def random_weights(model: nn.Module, shards: Shards | None = None, seed: int = 0) -> None:
    """Fill a model in place: matrices with small noise, norms with ones.

    The same seed gives the same weights on one device.
    """
    shards = shards or Shards()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        local = shards.local(parameter)
        if "norm" in name:
            local.fill_(1.0)
        else:
            local.normal_(
                std=0.02, generator=torch.Generator(local.device).manual_seed(seed + number)
            )


def gradient_of(
    model: Decoder,
    optimizer: MasterAdamW,
    bins: Sequence[PackedBin],
    config: TrainerConfig,
    reference: Decoder | None = None,
) -> None:
    """The gradient of a batch of one update, and its figures: all of a step that comes before the
    optimizer. Collective.
    """
    gradients = BatchGradients(
        model, optimizer, [bins], config, make_objective(config), StopSignal(), reference
    )
    gradients.accumulate(0)
    gradients.updated()
    gradients.row()


@dataclass(frozen=True)
class Work:
    """The content of one bin: as many groups of sequences as fit its tokens, shared or not.

    Attributes:
        length: tokens of each sequence.
        prompt: tokens that come first and are not trained; the sequences of a group have the same.
        group: sequences in a group.
        tokens: at most so many in the bin, if every sequence were forwarded whole.
        share: a group's prompt is forwarded once.
    """

    length: int
    tokens: int
    prompt: int = 1
    group: int = 1
    share: bool = False

    @property
    def groups(self) -> int:
        return self.tokens // (self.length * self.group)

    @property
    def sequences(self) -> int:
        return self.groups * self.group


def random_bin(work: Work, vocab_size: int, device: torch.device, seed: int = 0) -> PackedBin:
    """A bin of random tokens, packed as the trainer packs a batch; the seed decides them, and the
    advantages.

    Raises:
        ValueError: not one group fits.
    """
    if not work.groups:
        raise ValueError(
            f"{work.group} sequences of {work.length} tokens do not fit a bin of {work.tokens}"
        )
    draw = np.random.default_rng(seed)
    sequences = []
    for group in range(work.groups):
        prompt = draw.integers(3, vocab_size, work.prompt)
        for number in range(work.group):
            tokens = np.concatenate(
                (prompt, draw.integers(3, vocab_size, work.length - work.prompt))
            )
            sequences.append(
                _sequence(tokens, work.prompt, float(draw.normal()), (group, number), vocab_size)
            )
    (((packed,),),) = pack_batch(
        Batch(sequences),
        tokens_per_bin=work.tokens,
        ranks=1,
        normalisation="token",
        max_tokens=work.length,
        share_prefixes=work.share,
    )
    return packed.to(device)


def random_batch(count: int, lengths: tuple[int, int], vocab_size: int, seed: int = 0) -> Batch:
    """Sequences of lengths between these, each other than the rest; the second half of each is
    trained.
    """
    draw = np.random.default_rng(seed)
    sequences = []
    for number in range(count):
        tokens = draw.integers(3, vocab_size, int(draw.integers(lengths[0], lengths[1] + 1)))
        sequences.append(
            _sequence(tokens, len(tokens) // 2, float(draw.normal()), (number, 0), vocab_size)
        )
    return Batch(sequences)


def _sequence(
    tokens: Any, prompt: int, advantage: float, order: tuple[int, int], vocab_size: int
) -> TrainedSequence:
    trained = len(tokens) - prompt
    return TrainedSequence(
        tokens=tokens,
        positions=np.arange(prompt, len(tokens)),
        fields={
            "rollout_logprobs": np.full(trained, -math.log(vocab_size), np.float32),
            "advantages": np.full(trained, advantage, np.float32),
        },
        score=0.0,
        weight_version=None,
        order=order,
    )


@contextmanager
def joined_group(ranks: int, device: torch.device) -> Iterator[torch.device]:
    """torch's default process group of the processes that torchrun started, if there are several;
    gives this one's device.
    """
    if ranks == 1:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    yield device
    # not after an error: the others wait in a collective, and the launcher ends them
    dist.destroy_process_group()
