"""Bins on their way from rank 0 to all ranks: as bytes, in a thread of each, while the ranks train
on those before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from example_trainer.batch.bins import PackedBin
from example_trainer.parallel.ranks import Ranks

Sizes = list[int]
"""Of one bin: its tokens, spans, trained tokens and sequences."""
Minibatches = Sequence[Sequence[PackedBin]]
"""One rank's bins of each minibatch."""

_SPANS, _SEQUENCES = ("lengths", "parents"), ("counts", "orders", "unreferenced")
_FLOATS = (
    "rollout_logprobs",
    "advantages",
    "weights",
    "temperatures",
    "teacher_logprobs",
    "reference_logprobs",
)
_INTS = (
    "tokens",
    *_SPANS,
    "sources",
    "targets",
    "versions",
    "positions",
    *_SEQUENCES,
    "reference_pass",
)
_NAME, _WHAT = "bins", "handing out a batch"
_LOOK_SECONDS = 0.02
"""How often a rank looks for a batch. It does not wait in a message of Gloo's, which nothing but
the other side can end."""


class BinChannel:
    """Over which rank 0 hands out a batch's bins, to as many calls of `receive` on each other rank
    as it makes of `send`.

    A rank for which the run is over leaves when it likes, also when rank 0 is about to send: one of
    the two is the first to say so, by a claim to the rank's share. If that is rank 0, the rank
    takes its bins before it leaves; if not, it is sent none.

    No two of its methods are called at the same time by threads of a process. Making one is
    collective.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.new_group(_NAME)
        self._name = f"{_NAME} of channel {ranks.groups}"
        self._batches = 0  # sent, or received
        self._waiting = list(range(1, ranks.world_size))  # who has not left

    def send(self, minibatches: Sequence[Sequence[Sequence[PackedBin]]]) -> Minibatches:
        """On rank 0: hand them out, and return this rank's own.

        Args:
            minibatches: of each the bins of each data-parallel rank; one share is for all ranks.
                None at all: nothing of the batch can be trained on, which the others are told so.

        Raises:
            RankError: a rank is gone, or silent for longer than --rank-timeout.
        """
        shares: Sequence[Minibatches] = list(zip(*minibatches, strict=True)) or [[]]
        if self._ranks.world_size > 1:
            self._waiting = [rank for rank in self._waiting if self._ranks.claim(self._share(rank))]
            self._batches += 1
            messages = [_message(share) for share in shares]
            for rank in self._waiting:
                for part in messages[rank % len(shares)]:
                    self._send(part, rank)
        return shares[0]

    def receive(self, over: Callable[[], bool]) -> Minibatches | None:
        """On another rank: its own bins, on the host, when they come; None once nobody waits for
        them any more.

        A batch takes as long as the environments need, or as the step before it: the deadline is
        that of the thread which trains, in `Batches.next`.

        Raises:
            RankError: rank 0 is gone, or silent for longer than --rank-timeout in the middle of a
                batch.
        """
        share = self._share(self._ranks.rank)
        while not self._ranks.is_claimed(share):
            if over():
                return None
            time.sleep(_LOOK_SECONDS)
        self._batches += 1
        lengths = self._receive(torch.empty(2, dtype=torch.int64))
        data, text = self._receive(torch.empty(int(lengths.sum()), dtype=torch.uint8)).split(
            lengths.tolist()
        )
        sizes: list[list[Sizes]] = json.loads(text.numpy().tobytes())
        bins = iter(decode(data, [size for minibatch in sizes for size in minibatch]))
        return [list(islice(bins, len(minibatch))) for minibatch in sizes]

    def leave(self) -> None:
        """On another rank, when it receives no more: rank 0 does not wait for it. What is on its
        way to it is dropped.

        Raises:
            RankError: rank 0 is gone, or silent for longer than --rank-timeout in the middle of a
                batch.
        """
        if not self._ranks.claim(self._share(self._ranks.rank)):
            self.receive(lambda: True)

    def _share(self, rank: int) -> str:
        """The name of a rank's bins of the next batch."""
        return f"{self._name}, batch {self._batches}, rank {rank}"

    def _send(self, message: Tensor, rank: int) -> None:
        try:
            self._group.send([message], rank, 0).wait()
        except RuntimeError as error:
            raise self._ranks.lost(_WHAT, error) from error

    def _receive(self, message: Tensor) -> Tensor:
        try:
            self._group.recv([message], 0, 0).wait()
        except RuntimeError as error:
            raise self._ranks.lost(_WHAT, error) from error
        return message


def _message(share: Minibatches) -> tuple[Tensor, Tensor]:
    """How long its parts are, and these: the bins, and their sizes as JSON."""
    data = encode([one for bins in share for one in bins])
    text = torch.frombuffer(
        bytearray(json.dumps([sizes_of(bins) for bins in share]).encode()), dtype=torch.uint8
    )
    return torch.tensor([len(data), len(text)]), torch.cat([data, text])


def sizes_of(bins: Sequence[PackedBin]) -> list[Sizes]:
    """What `decode` must be told about bins."""
    return [[len(one.tokens), len(one.lengths), len(one.targets), len(one.counts)] for one in bins]


def encode(bins: Sequence[PackedBin]) -> Tensor:
    """All tensors of some bins as bytes; those of 8 bytes a number come first, so that every one is
    aligned.
    """
    tensors = [one.tensors() for one in bins]
    rows = [fields[name] for names in (_INTS, _FLOATS) for fields in tensors for name in names]
    return torch.cat(
        [
            torch.empty(0, dtype=torch.uint8),
            *(row.contiguous().flatten().view(torch.uint8) for row in rows),
        ]
    )


def decode(data: Tensor, sizes: Sequence[Sizes]) -> list[PackedBin]:
    """The bins that were encoded, as views of the bytes."""
    fields: list[dict[str, Tensor]] = [{} for _ in sizes]
    begin = 0
    for names, dtype in ((_INTS, torch.int64), (_FLOATS, torch.float32)):
        for found, size in zip(fields, sizes, strict=True):
            for name in names:
                shape = _shape(name, size)
                end = begin + shape.numel() * dtype.itemsize
                found[name] = data[begin:end].view(dtype).view(shape)
                begin = end
    return [PackedBin(**found) for found in fields]


def _shape(name: str, size: Sizes) -> torch.Size:
    tokens, spans, trained, sequences = size
    if name == "orders":
        return torch.Size((sequences, 2))
    if name == "reference_pass":
        return torch.Size((1,))
    return torch.Size(
        (
            tokens
            if name == "tokens"
            else spans
            if name in _SPANS
            else sequences
            if name in _SEQUENCES
            else trained,
        )
    )
