"""Every trained token's logprob, sampled and recomputed, compared as 32-bit integers: equal bits, or the run stops."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from example_trainer.algorithm.losses import k3
from example_trainer.batch.groups import Batch, MicroBatch
from example_trainer.errors import TrainerError
from example_trainer.training.optimizer import MasterAdamW
from vllm_patching.batch_invariant.provenance import provenance_difference
from vllm_patching.checksum import weights_checksum

logger = logging.getLogger(__name__)

Provenance = Mapping[str, str]


class ParityError(TrainerError):
    """Trainer and vLLM do not agree on a bit, or do not run the same kernels."""


@dataclass(frozen=True)
class Mismatch:
    """The first token of a comparison whose two logprobs differ.

    Attributes:
        group, sequence, position: where it is: group of the batch, rollout of the group, place among the rollout's tokens.
        token: its id.
        sampled, recomputed: the two logprobs.
    """

    group: int
    sequence: int
    position: int
    token: int
    sampled: float
    recomputed: float

    def __str__(self) -> str:
        return (
            f"group {self.group}, sequence {self.sequence}, position {self.position}, token {self.token}: "
            f"vLLM {_with_bits(self.sampled)}, trainer {_with_bits(self.recomputed)}"
        )


def _with_bits(value: float) -> str:
    return f"{value!r} (0x{int(torch.tensor(value).view(torch.int32)) & 0xFFFFFFFF:08x})"


def weights_sha(masters: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits over every bit, name and shape of the float32 masters; equal runs log equal ones at every step."""
    return weights_checksum(sorted(masters.items()))


class ParityCheck:
    """Compares the logprobs of a step's tokens, and keeps the figures of the last step.

    Example:
        parity.begin(batch, optimizer.steps)
        parity.compare(micro, logprobs)     # of every microbatch, before its gradient is taken
        row |= parity.row(optimizer)

    Args:
        ours, theirs: which kernels the trainer and vLLM run, for the error.
        stop: raise at the first mismatch; False only counts, as a comparison with the mode off needs it.
    """

    def __init__(self, ours: Provenance, theirs: Provenance, stop: bool = True) -> None:
        self._ours, self._theirs, self._stop = ours, theirs, stop
        self.first: Mismatch | None = None
        self._reset()

    def _reset(self) -> None:
        self._compared, self._mismatched = 0, 0
        self._largest, self._kl = 0.0, 0.0

    def begin(self, batch: Batch, version: int) -> None:
        """Begin a step; what is trained on must have been sampled under the weights that are trained.

        Raises:
            ParityError: a sequence was begun under other weights, or its version is not known.
        """
        self._reset()
        for sequence in batch.sequences:
            if self._stop and sequence.weight_version != version:
                raise ParityError(
                    f"group {sequence.order[0]}, sequence {sequence.order[1]} was sampled under weight version "
                    f"{sequence.weight_version}, the trainer holds {version}: its bits cannot be equal; let the environment "
                    "wait for each step (--env.max_batches_offpolicy 0)"
                )

    def compare(self, micro: MicroBatch, logprobs: Tensor) -> None:
        """Compare the trained tokens of a microbatch.

        Args:
            logprobs: [n] float32, recomputed by the trainer.

        Raises:
            ParityError: a token differs, or came without a logprob.
        """
        recomputed, sampled = logprobs.detach(), micro.rollout_logprobs
        if recomputed.dtype != torch.float32 or sampled.dtype != torch.float32:
            raise TypeError(f"logprobs are compared as float32, not {recomputed.dtype} and {sampled.dtype}")
        different = recomputed.contiguous().view(torch.int32) != sampled.contiguous().view(torch.int32)
        unknown = sampled.isnan()
        log_ratio = (recomputed - sampled).masked_fill(unknown, 0.0).double()
        figures = (different.sum(), unknown.sum(), log_ratio.abs().max(), k3(log_ratio).sum())
        mismatched, missing, largest, kl = torch.stack([figure.double() for figure in figures]).tolist()
        self._compared += len(recomputed)
        self._mismatched += int(mismatched)
        self._largest, self._kl = max(self._largest, largest), self._kl + kl
        if not mismatched:
            return
        self.first = self.first or _describe(micro, sampled, recomputed, int(different.int().argmax()))
        if self._stop:
            self._log_kernels()
            lost = f" ({int(missing)} came without a logprob)" if missing else ""
            raise ParityError(
                f"{int(mismatched)} of {len(recomputed)} tokens of a microbatch differ between vLLM and the trainer{lost}, "
                f"by up to {largest:.3g}; first {self.first}; {self._kernels()}; the log has both sides' kernels"
            )

    def row(self, optimizer: MasterAdamW) -> dict[str, int | float | str | None]:
        """The figures of the step, for the metrics: tokens compared, tokens that differ, the largest difference, KL by k3
        in nats per token, and the hash of the masters after the step."""
        return {
            "compared_tokens": self._compared,
            "mismatched_tokens": self._mismatched,
            "max_logprob_difference": self._largest,
            "parity_kl": self._kl / max(1, self._compared),
            "weights_sha": weights_sha(optimizer.masters),
        }

    def _kernels(self) -> str:
        difference = provenance_difference(self._ours, self._theirs)
        return f"kernels differ: {difference}" if difference else "both sides name the same kernels"

    def _log_kernels(self) -> None:
        for name in sorted({*self._ours, *self._theirs}):
            logger.error(
                "[Parity] %s: trainer %s, vLLM %s", name, self._ours.get(name, "missing"), self._theirs.get(name, "missing")
            )


class NoParity(ParityCheck):
    """Compares nothing: the mode is off."""

    def __init__(self) -> None:
        super().__init__({}, {}, stop=False)

    def begin(self, batch: Batch, version: int) -> None:
        return None

    def compare(self, micro: MicroBatch, logprobs: Tensor) -> None:
        return None

    def row(self, optimizer: MasterAdamW) -> dict[str, int | float | str | None]:
        return {}


def _describe(micro: MicroBatch, sampled: Tensor, recomputed: Tensor, index: int) -> Mismatch:
    length = micro.tokens.shape[1]
    source = int(micro.sources[index])
    group, sequence = micro.orders[source // length].tolist()
    return Mismatch(
        group, sequence, source % length + 1, int(micro.targets[index]), float(sampled[index]), float(recomputed[index])
    )


def require_same_kernels(ours: Provenance, theirs: Provenance | None, server: str) -> None:
    """Refuse a server that does not run this trainer's kernels.

    Args:
        theirs: what the server says of itself; None if it is not in deterministic mode.
        server: its address.

    Raises:
        ParityError: names the first difference.
    """
    if not theirs:
        raise ParityError(f"the vLLM server at {server} is not in deterministic mode; start it with --deterministic")
    difference = provenance_difference(ours, theirs)
    if difference:
        raise ParityError(
            f"the vLLM server at {server} does not run this trainer's kernels, so their bits would differ: {difference}; "
            "run both on the same kind of GPU with the same versions"
        )
