"""Bins on their way from rank 0 to all ranks: as bytes, in a thread of each, while the ranks train
on those before.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from example_trainer.batch.bins import PackedBin
from example_trainer.parallel.ranks import Ranks

Minibatches = Sequence[Sequence[PackedBin]]
"""One rank's bins of each minibatch."""

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
            messages = [encode(share) for share in shares]
            for rank in self._waiting:
                message = messages[rank % len(shares)]
                self._send(torch.tensor([len(message)]), rank)
                self._send(message, rank)
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
        length = int(self._receive(torch.empty(1, dtype=torch.int64)))
        return decode(self._receive(torch.empty(length, dtype=torch.uint8)))

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


def encode(share: Minibatches) -> Tensor:
    """Return one rank's bins as bytes."""
    buffer = io.BytesIO()
    torch.save([[one.tensors() for one in bins] for bins in share], buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def decode(data: Tensor) -> Minibatches:
    """Return the bins that were encoded."""
    share = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return [[PackedBin.of(tensors) for tensors in bins] for bins in share]
