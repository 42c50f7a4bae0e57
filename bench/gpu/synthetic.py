"""Made-up training work: random weights of a shape, and packed bins of random tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from bench.gpu.shapes import SHAPES
from example_trainer.batch.bins import UNKNOWN_VERSION, PackedBin
from example_trainer.models.geometry import Geometry
from example_trainer.models.packing import NO_PARENT
from example_trainer.models.shards import Shards


def geometry_of(shape: str, positions: int = 4096) -> Geometry:
    """The geometry of a key of SHAPES, with room for sequences of `positions` tokens."""
    return Geometry.from_config({**SHAPES[shape], "max_position_embeddings": positions}, shape)


@torch.no_grad()
def random_weights(model: nn.Module, shards: Shards | None = None, seed: int = 0) -> None:
    """Fill a model in place: matrices with small noise, norms with ones. The same seed gives the same weights on one device."""
    shards = shards or Shards()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        local = shards.local(parameter)
        if "norm" in name:
            local.fill_(1.0)
        else:
            local.normal_(std=0.02, generator=torch.Generator(local.device).manual_seed(seed + number))


@dataclass(frozen=True)
class Work:
    """What one bin holds: as many groups of sequences as fit its tokens, shared or not.

    Attributes:
        length: tokens of each sequence.
        prompt: tokens that come first and are not trained; those of a group have the same.
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
    """A bin of random tokens; the seed decides them, and the advantages.

    Raises:
        ValueError: not one group fits.
    """
    if not work.groups:
        raise ValueError(f"{work.group} sequences of {work.length} tokens do not fit a bin of {work.tokens}")
    draw = torch.Generator().manual_seed(seed)
    answer = work.length - work.prompt
    lengths: list[int] = []
    parents: list[int] = []
    tokens, sources, targets = [], [], []
    at = 0
    for _ in range(work.groups):
        prompt = torch.randint(3, vocab_size, (work.prompt,), generator=draw)
        answers = torch.randint(3, vocab_size, (work.group, answer), generator=draw)
        if work.share:
            lengths += [work.prompt, *[answer] * work.group]
            first = len(parents)
            parents += [NO_PARENT, *[first] * work.group]
            tokens.append(prompt)
        for number, row in enumerate(answers):
            if not work.share:
                lengths.append(work.length)
                parents.append(NO_PARENT)
            tokens.append(row if work.share else torch.cat((prompt, row)))
            begin = at + work.prompt + number * (answer if work.share else work.length)
            before = at + work.prompt - 1 if work.share else begin - 1  # the row that predicts an answer's first token
            sources.append(torch.cat((torch.tensor([before]), torch.arange(begin, begin + answer - 1))))
            targets.append(row)
        at += work.prompt + work.group * answer if work.share else work.group * work.length
    trained = work.sequences * answer
    orders = torch.tensor([(number // work.group, number % work.group) for number in range(work.sequences)])
    return PackedBin(
        tokens=torch.cat(tokens),
        lengths=torch.tensor(lengths),
        parents=torch.tensor(parents),
        sources=torch.cat(sources),
        targets=torch.cat(targets),
        rollout_logprobs=torch.full((trained,), -math.log(vocab_size)),
        advantages=torch.randn(work.sequences, generator=draw).repeat_interleave(answer),
        weights=torch.full((trained,), 1.0 / trained),
        versions=torch.full((trained,), UNKNOWN_VERSION),
        positions=torch.arange(work.prompt, work.length).repeat(work.sequences),
        counts=torch.tensor([answer] * work.sequences),
        orders=orders,
    ).to(device)
