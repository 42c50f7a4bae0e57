"""Every trained token's logprob, sampled and recomputed, compared as 32-bit integers: equal bits,
or the run stops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from example_trainer.algorithm.losses import k3
from example_trainer.batch.groups import UNKNOWN_VERSION
from example_trainer.batch.packing import PackedBin
from example_trainer.errors import TrainerError
from example_trainer.weight_bridge.base import OneServerRefused
from vllm_patching.batch_invariant.provenance import provenance_difference
from vllm_patching.protocol.checksum import weights_checksum

logger = logging.getLogger(__name__)

Provenance = Mapping[str, str]


class ParityError(TrainerError):
    """Trainer and vLLM do not agree on a bit, or do not run the same kernels."""


class PairingError(ParityError, OneServerRefused):
    """A vLLM server does not run the trainer's kernels; others perhaps do."""


@dataclass(frozen=True)
class Mismatch:
    """The first token of a comparison whose two logprobs differ.

    Attributes:
        group, sequence, position: where it is: group of the batch, rollout of the group, place
            among the rollout's tokens.
        token: its id.
        sampled, recomputed: the two logprobs.
        weight_version: that the trainer held.
    """

    group: int
    sequence: int
    position: int
    token: int
    sampled: float
    recomputed: float
    weight_version: int

    def __str__(self) -> str:
        return (
            f"group {self.group}, sequence {self.sequence}, position {self.position}, token {self.token}: "
            f"vLLM {_with_bits(self.sampled)}, trainer {_with_bits(self.recomputed)}"
        )


def _with_bits(value: float) -> str:
    return f"{value!r} (0x{int(torch.tensor(value).view(torch.int32)) & 0xFFFFFFFF:08x})"


def weights_sha(masters: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits over every bit, name and shape of the float32 masters; equal runs log
    equal ones at every step.
    """
    return weights_checksum(sorted(masters.items()))


class ParityCheck:
    """Compares the logprobs of a step's tokens, and keeps the figures of the last step.

    Only what was sampled under the present weights can have their bits. What is older is trained
    on, where that is allowed, and counted apart, so that its divergence is that of older weights
    alone.

    Example:
        parity.begin(optimizer.steps)
        parity.compare(packed, logprobs)    # of every bin, before its gradient is taken
        row |= parity.row(optimizer.masters)

    Args:
        ours, theirs: which kernels the trainer and vLLM run, for the error.
        stop: raise at the first mismatch; False only counts, as a comparison with the mode off
            needs it.
        older: whether tokens of older weights, or of unknown weights, may be trained on.

    Attributes:
        first: the first token that differed in the whole run.
        compared_in_all, mismatched_in_all: tokens of the whole run.
    """

    def __init__(
        self, ours: Provenance, theirs: Provenance, stop: bool = True, older: bool = False
    ) -> None:
        self._ours, self._theirs, self._stop, self._older_allowed = ours, theirs, stop, older
        self.first: Mismatch | None = None
        self.compared_in_all, self.mismatched_in_all = 0, 0
        self._version = 0
        self._said_unknown = False
        self._reset()

    def _reset(self) -> None:
        self._compared, self._mismatched, self._older, self._older_known = 0, 0, 0, 0
        self._largest, self._kl, self._older_kl = 0.0, 0.0, 0.0

    def begin(self, version: int) -> None:
        """Begin a step with the weights of `version`."""
        self._reset()
        self._version = version

    def compare(self, packed: PackedBin, logprobs: Tensor) -> None:
        """Compare the trained tokens of a bin.

        Args:
            logprobs: [n] float32, recomputed by the trainer.

        Raises:
            ParityError: a token of the present weights differs, or came without a logprob; or one
                is of other weights, or of unknown ones, and that is not allowed.
        """
        recomputed, sampled = logprobs.detach(), packed["rollout_logprobs"]
        if recomputed.dtype != torch.float32 or sampled.dtype != torch.float32:
            raise TypeError(
                f"logprobs are compared as float32, not {recomputed.dtype} and {sampled.dtype}"
            )
        if not len(recomputed):
            return
        fresh = packed["versions"] == self._version
        self._check_versions(packed, fresh)
        different = fresh & (
            recomputed.contiguous().view(torch.int32) != sampled.contiguous().view(torch.int32)
        )
        compared, mismatched, missing = self._count(recomputed, sampled, fresh, different)
        if not mismatched:
            return
        self.first = self.first or _describe(
            packed, recomputed, int(different.int().argmax()), self._version
        )
        if self._stop:
            self._log_kernels()
            lost = f" ({missing} came without a logprob)" * bool(missing)
            raise ParityError(
                f"{mismatched} of {compared} tokens of a microbatch differ between vLLM and the trainer{lost}, "
                f"by up to {self._largest:.3g}; first {self.first}; {self._kernels()}; the log has both sides' kernels"
            )

    def _count(
        self, recomputed: Tensor, sampled: Tensor, fresh: Tensor, different: Tensor
    ) -> tuple[int, int, int]:
        """Add a bin to the figures.

        Returns:
            Its tokens of the present weights: all of them, the different ones, and the ones that came
            without a logprob.
        """
        unknown = sampled.isnan()
        log_ratio = (recomputed - sampled).masked_fill(unknown, 0.0).double()
        divergence = k3(log_ratio)
        figures = (
            fresh.sum(),
            different.sum(),
            (fresh & unknown).sum(),
            (~fresh & ~unknown).sum(),
            log_ratio.abs().masked_fill(~fresh, 0.0).max(),
            divergence.masked_fill(~fresh, 0.0).sum(),
            divergence.masked_fill(fresh, 0.0).sum(),
        )
        # One synchronisation for all of them.
        counted = torch.stack([figure.double() for figure in figures]).tolist()
        compared, mismatched, missing, older_known = map(int, counted[:4])
        self._compared += compared
        self.compared_in_all += compared
        self._mismatched += mismatched
        self.mismatched_in_all += mismatched
        self._older += len(recomputed) - compared
        self._older_known += older_known
        self._largest = max(self._largest, counted[4])
        self._kl += counted[5]
        self._older_kl += counted[6]
        return compared, mismatched, missing

    def _check_versions(self, packed: PackedBin, fresh: Tensor) -> None:
        """Refuse tokens of other weights, or warn once of unknown ones if older are allowed."""
        if not self._stop:
            return
        if not self._older_allowed:
            self._refuse_other_weights(packed, ~fresh)
        elif not self._said_unknown and bool((packed["versions"] == UNKNOWN_VERSION).any()):
            self._said_unknown = True
            logger.warning(
                "An environment does not say which weights sampled its tokens: those are trained on and compared with nothing"
            )

    def _refuse_other_weights(self, packed: PackedBin, other: Tensor) -> None:
        if not bool(other.any()):
            return
        index = int(other.int().argmax())
        (group, sequence), sampled = _sequence_of(packed, index), int(packed["versions"][index])
        raise ParityError(
            f"group {group}, sequence {sequence} was sampled under weight version "
            f"{None if sampled == UNKNOWN_VERSION else sampled}, the trainer holds {self._version}: its bits cannot be equal; "
            "let the environment wait for each step (--env.max_batches_offpolicy 0)"
        )

    def row(self, masters: Mapping[str, Tensor]) -> dict[str, int | float | str]:
        """The figures of the step, for the metrics: of the tokens sampled under its weights how
        many were compared, how many differ, the largest difference and their KL by k3 in nats per
        token; how many others there were, and their KL; and the hash of the masters after the step.
        """
        return {
            "compared_tokens": self._compared,
            "mismatched_tokens": self._mismatched,
            "older_tokens": self._older,
            "max_logprob_difference": self._largest,
            "parity_kl": self._kl / max(1, self._compared),
            "older_kl": self._older_kl / max(1, self._older_known),
            "weights_sha": weights_sha(masters),
        }

    def report(self) -> dict[str, Any]:
        """Return the counts for the rollout service: compared and different tokens of the step and
        of the whole run, and the first difference.
        """
        return {
            "parity": {
                "weight_version": self._version,
                "compared": self._compared,
                "mismatched": self._mismatched,
                "compared_in_all": self.compared_in_all,
                "mismatched_in_all": self.mismatched_in_all,
                "first": None if self.first is None else asdict(self.first),
            }
        }

    def _kernels(self) -> str:
        difference = provenance_difference(self._ours, self._theirs)
        return f"kernels differ: {difference}" if difference else "both sides name the same kernels"

    def _log_kernels(self) -> None:
        for name in sorted({*self._ours, *self._theirs}):
            logger.error(
                "[Parity] %s: trainer %s, vLLM %s",
                name,
                self._ours.get(name, "missing"),
                self._theirs.get(name, "missing"),
            )


def _sequence_of(packed: PackedBin, index: int) -> tuple[int, int]:
    """Group and number of the sequence that a trained token belongs to."""
    number = int(torch.searchsorted(packed.counts.cumsum(0), index, right=True))
    group, sequence = packed.orders[number].tolist()
    return group, sequence


def _describe(packed: PackedBin, recomputed: Tensor, index: int, version: int) -> Mismatch:
    group, sequence = _sequence_of(packed, index)
    return Mismatch(
        group,
        sequence,
        int(packed.positions[index]),
        int(packed.targets[index]),
        float(packed["rollout_logprobs"][index]),
        float(recomputed[index]),
        version,
    )


def require_same_kernels(ours: Provenance, theirs: Provenance | None, server: str) -> None:
    """Refuse a server that does not run this trainer's kernels.

    Args:
        theirs: the server's provenance; None if it is not in deterministic mode.
        server: its address.

    Raises:
        PairingError: names the first difference.
    """
    if not theirs:
        raise PairingError(
            f"the vLLM server at {server} is not in deterministic mode; start it with --deterministic"
        )
    difference = provenance_difference(ours, theirs)
    if difference:
        raise PairingError(
            f"the vLLM server at {server} does not run this trainer's kernels, so their bits would differ: {difference}; "
            "run both on the same kind of GPU with the same versions"
        )
