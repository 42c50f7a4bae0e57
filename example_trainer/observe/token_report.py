"""Logprobs, entropies and advantages of a few sequences of a step, sent back with the
acknowledgement for the page of rollouts.

It costs a step next to nothing. Sequences are chosen on the host before the first pass. Their
values are copied to pinned memory behind the kernels that made them. They are read when the step's
figures have been waited for anyway.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from example_trainer.batch.packing import PackedBin

MOST_TOKENS = 32_768
"""Limit of a report: half a MiB of JSON, which every service takes as an acknowledgement."""

Place = tuple[int, int]
"""Group of the batch, sequence of the group."""


@dataclass(frozen=True)
class _Copied:
    """Numbers of one sequence: the count of its trained tokens, and [3, some] float32 on the host:
    logprobs, entropies, advantages of the first of them.
    """

    place: Place
    trained: int
    columns: Tensor


class TokenReport:
    """Collects what the first update of a batch computes for a few of its sequences, whose weights
    are the batch's version.

    With several ranks they are of rank 0's own share.

    Args:
        sequences: how many of a step, 0 for none. They are of as few groups as possible, chosen by
            the version alone.
        most_tokens: of all of them; of one for which there is no room left, the first tokens are
            reported, or none.

    Example:
        report.begin(optimizer.steps, bins)
        for bin in bins:
            ...
            report.add(bin, logprobs, entropy)
        report.take()
    """

    def __init__(self, sequences: int, most_tokens: int = MOST_TOKENS) -> None:
        self._sequences, self._most_tokens = sequences, most_tokens
        self._version = 0
        self._room: dict[Place, int] = {}
        self._copied: list[_Copied] = []
        self._done: torch.cuda.Event | None = None

    def begin(self, version: int, bins: Sequence[PackedBin]) -> None:
        """A batch begins, with the weights of `version`; what was collected before is forgotten.

        Not collective.
        """
        self._version, self._copied, self._done = version, [], None
        trained: dict[Place, int] = {}
        if self._sequences:
            for one in bins:
                places = map(tuple, one.orders.tolist())
                trained |= dict(zip(places, one.counts.tolist(), strict=True))
        self._room = chosen(trained, version, self._sequences, self._most_tokens)

    def add(self, bin: PackedBin, logprobs: Tensor, entropy: Tensor) -> None:
        """Copy what is wanted of a bin. Waits for nothing that the device still does.

        Args:
            logprobs, entropy: [n] float32, under the weights that the batch began with.
        """
        begin = 0
        for (group, sequence), count in zip(bin.orders.tolist(), bin.counts.tolist(), strict=True):
            room = self._room.get((group, sequence), 0)
            if room:
                part = slice(begin, begin + room)
                columns = torch.stack(
                    (logprobs.detach()[part], entropy.detach()[part], bin["advantages"][part])
                )
                self._copied.append(
                    _Copied((group, sequence), count, columns.to("cpu", non_blocking=True))
                )
                if columns.is_cuda:
                    self._done = torch.cuda.Event()
                    self._done.record()
            begin += count

    def take(self) -> dict[str, Any] | None:
        """Return the report since `begin` for the rollout service; None if it is empty.

        `logprobs`, `entropies` and `advantages` are little-endian float32 in base64, for the first
        of the sequence's trained tokens. An advantage that is the same for all is a number.
        `trained` counts them all.
        """
        copied, self._copied = self._copied, []
        if not copied:
            return None
        if self._done is not None:
            self._done.synchronize()  # long since, where the step's figures were read before
        return {
            "weight_version": self._version,
            "sequences": [_told(one) for one in sorted(copied, key=lambda c: c.place)],
        }


def chosen(
    trained: dict[Place, int], version: int, sequences: int, most_tokens: int
) -> dict[Place, int]:
    """Which sequences are reported, and how many tokens of each: whole groups in an order that the
    version settles.

    Args:
        trained: tokens of each sequence of the batch.
    """

    def drawn(place: Place) -> tuple[bytes, Place]:
        return hashlib.sha256(f"{version} {place[0]}".encode()).digest(), place

    room: dict[Place, int] = {}
    for place in sorted(trained, key=drawn)[:sequences]:
        taken = min(trained[place], most_tokens)
        if taken:
            room[place] = taken
            most_tokens -= taken
    return room


def _told(copied: _Copied) -> dict[str, Any]:
    group, sequence = copied.place
    logprobs, entropies, advantages = copied.columns.numpy()
    same = bool((advantages == advantages[0]).all())
    return {
        "group": group,
        "sequence": sequence,
        "trained": copied.trained,
        "logprobs": b64encode(logprobs.astype("<f4").tobytes()).decode(),
        "entropies": b64encode(entropies.astype("<f4").tobytes()).decode(),
        "advantages": float(advantages[0])
        if same
        else b64encode(advantages.astype("<f4").tobytes()).decode(),
    }
