"""Every trained token's logprob, sampled and recomputed, compared as 32-bit integers: equal bits,
or the run stops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from example_trainer.algorithm.losses import k3
from example_trainer.batch.groups import UNKNOWN_VERSION
from example_trainer.batch.packing import PackedBin
from example_trainer.errors import TrainerError
from example_trainer.models.shards import Shards
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import OneServerRefused
from vllm_patching.batch_invariant.plan import ENTRY as PLAN
from vllm_patching.batch_invariant.provenance import provenance_difference
from vllm_patching.protocol.checksum import Part, Row, WeightSums, summary_of, weights_checksum

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


def weights_sha(
    masters: Mapping[str, Tensor], shards: Shards | None = None, ranks: Ranks | None = None
) -> str:
    """32 hexadecimal digits over every bit, name and shape of the float32 masters; equal runs log
    equal ones at every step. Collective.

    Ranks that hold parts of the masters get the digits of one process that holds all of them.

    Args:
        masters: this rank's part of each.
        shards: how they are spread.
    """
    named = sorted(masters.items())
    if shards is None or not shards.spread:
        return weights_checksum(named)
    ranks, rows, sums = ranks or Ranks(), list[Row](), list[list[int]]()
    for name, local in named:
        row, ranges = Row(name, shards.shape_of(name), local.dtype), shards.ranges(name, local)
        parts = [
            Part(0, first * local.itemsize, values) for first, values in ranges if values.numel()
        ]
        rows.append(row)
        sums.append([0, 0, 0])
        if parts:
            part_sums = WeightSums.of_parts([row], parts, local.device)
            part_sums.add(0, len(parts))
            sums[-1:] = part_sums.rows()
    return summary_of(rows, *ranks.gather(sums, "hashing the weights")).checksum


@dataclass(frozen=True)
class BinFigures:
    """The comparison of one bin.

    Attributes:
        compared, mismatched, missing: tokens of the present weights: all, the different ones, and
            the ones that came without a logprob.
        older, older_known: tokens of other weights: all, and the ones with a logprob.
        largest: difference of a compared token.
        kl, older_kl: sums of k3 over the compared and the older tokens.
        first: the first token that differs.
        refused: the reason why the bin may not be trained on; empty if it may.
    """

    compared: int = 0
    mismatched: int = 0
    missing: int = 0
    older: int = 0
    older_known: int = 0
    largest: float = 0.0
    kl: float = 0.0
    older_kl: float = 0.0
    first: Mismatch | None = None
    refused: str = ""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BinFigures:
        """The figures of `asdict`."""
        first = values["first"]
        return cls(**values | {"first": None if first is None else Mismatch(**first)})


class ParityCheck:
    """Compares the logprobs of a step's tokens, and keeps the figures of the last step.

    Only tokens that were sampled under the present weights can have their bits. Older tokens are
    trained on, where that is allowed, and counted apart, so that their divergence is due to older
    weights alone.

    Example:
        parity.begin(optimizer.steps)
        parity.compare(packed, logprobs)    # of every bin, before its gradient is taken
        row |= parity.row(optimizer.masters)

    Args:
        ours, theirs: which kernels the trainer and vLLM run, for the error.
        stop: raise at the first mismatch; False only counts, as a comparison with the mode off
            needs it.
        older: whether tokens of older weights, or of unknown weights, may be trained on.
        ranks: of the trainer; each compares the tokens of its own bins, and the figures are of all.
        same_tokens: every rank has the same bins, whose layers they split.
        servers: kernels and self-test of each paired server, by address, for the service.

    Attributes:
        first: the first token that differed in the whole run.
        compared_in_all, mismatched_in_all, older_in_all: tokens of the whole run.
    """

    def __init__(
        self,
        ours: Provenance,
        theirs: Provenance,
        stop: bool = True,
        older: bool = False,
        ranks: Ranks | None = None,
        same_tokens: bool = False,
        servers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self._ours, self._theirs, self._stop, self._older_allowed = ours, theirs, stop, older
        self._ranks, self._same_tokens = ranks or Ranks(), same_tokens
        self._servers = servers
        self._reported: dict[str, Any] = {}
        self.first: Mismatch | None = None
        self.compared_in_all = self.mismatched_in_all = self.older_in_all = 0
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
        """Compare the trained tokens of a bin; with several ranks, of each rank's. Collective: all
        ranks raise the same error.

        Args:
            logprobs: [n] float32, recomputed by the trainer.

        Raises:
            ParityError: a token of the present weights differs, or came without a logprob. Also if
                one is of other weights, or of unknown ones, and that is not allowed.
        """
        rows = self._ranks.shared(
            "comparing logprobs", lambda: asdict(self._figures(packed, logprobs.detach()))
        )
        bins = [BinFigures.from_json(row) for row in rows]
        for refused in filter(None, (one.refused for one in bins)):
            raise ParityError(refused)
        if self._same_tokens:
            bins = [max(bins, key=lambda one: one.mismatched)]
        self._add(bins)
        mismatched = sum(one.mismatched for one in bins)
        if not mismatched or not self._stop:
            return
        self._log_kernels()
        missing = sum(one.missing for one in bins)
        lost = f" ({missing} came without a logprob)" * bool(missing)
        raise ParityError(
            f"{mismatched} of {sum(one.compared for one in bins)} tokens of a microbatch differ "
            f"between vLLM and the trainer{lost}, by up to {self._largest:.3g}; first "
            f"{self.first}; {self._kernels()}. The log has both sides' kernels"
        )

    def _add(self, bins: Sequence[BinFigures]) -> None:
        """Add the bins of one pass to the figures of the step and of the run."""
        for one in bins:
            self._compared += one.compared
            self.compared_in_all += one.compared
            self._mismatched += one.mismatched
            self.mismatched_in_all += one.mismatched
            self._older += one.older
            self.older_in_all += one.older
            self._older_known += one.older_known
            self._largest = max(self._largest, one.largest)
            self._kl += one.kl
            self._older_kl += one.older_kl
            self.first = self.first or one.first

    def _figures(self, packed: PackedBin, recomputed: Tensor) -> BinFigures:
        """Compare the tokens of this rank's bin."""
        sampled = packed["rollout_logprobs"]
        if recomputed.dtype != torch.float32 or sampled.dtype != torch.float32:
            raise TypeError(
                f"logprobs are compared as float32, not {recomputed.dtype} and {sampled.dtype}"
            )
        if not len(recomputed):
            return BinFigures()
        fresh = packed["versions"] == self._version
        if refused := self._refused(packed, fresh):
            return BinFigures(refused=refused)
        different = fresh & (
            recomputed.contiguous().view(torch.int32) != sampled.contiguous().view(torch.int32)
        )
        figures = _count(recomputed, sampled, fresh, different)
        if not figures.mismatched:
            return figures
        first = _describe(packed, recomputed, int(different.int().argmax()), self._version)
        return replace(figures, first=first)

    def _refused(self, packed: PackedBin, fresh: Tensor) -> str:
        """The reason to refuse tokens of other weights; empty if there is none. Warn once of
        unknown ones if older are allowed.
        """
        if not self._stop:
            return ""
        if not self._older_allowed:
            return self._other_weights(packed, ~fresh)
        if not self._said_unknown and bool((packed["versions"] == UNKNOWN_VERSION).any()):
            self._said_unknown = True
            logger.warning(
                "An environment does not record which weights sampled its tokens: they are trained "
                "on and compared with nothing"
            )
        return ""

    def _other_weights(self, packed: PackedBin, other: Tensor) -> str:
        if not bool(other.any()):
            return ""
        index = int(other.int().argmax())
        (group, sequence), sampled = _sequence_of(packed, index), int(packed["versions"][index])
        return (
            f"group {group}, sequence {sequence} was sampled under weight version "
            f"{None if sampled == UNKNOWN_VERSION else sampled}, the trainer holds "
            f"{self._version}: its bits cannot be equal. Let the environment wait for each step "
            "(--env.max_batches_offpolicy 0)"
        )

    def row(
        self, masters: Mapping[str, Tensor], shards: Shards | None = None
    ) -> dict[str, int | float | str]:
        """The figures of the step, for the metrics. For the tokens sampled under its weights: how
        many were compared, how many differ and the largest difference. Then their KL by k3 in nats
        per token. For the other tokens: their number and their KL. Last, the hash of the masters
        after the step. Collective.

        Args:
            masters, shards: see weights_sha.
        """
        return {
            "compared_tokens": self._compared,
            "mismatched_tokens": self._mismatched,
            "older_tokens": self._older,
            "max_logprob_difference": self._largest,
            "parity_kl": self._kl / max(1, self._compared),
            "older_kl": self._older_kl / max(1, self._older_known),
            "weights_sha": weights_sha(masters, shards, self._ranks),
        }

    def report(self) -> dict[str, Any]:
        """Return the counts for the rollout service: compared, different and older tokens of the
        step and of the whole run, and the first difference. `kernels` is there if they are other
        ones than in the last report.
        """
        parity = {
            "weight_version": self._version,
            "compared": self._compared,
            "mismatched": self._mismatched,
            "older": self._older,
            "compared_in_all": self.compared_in_all,
            "mismatched_in_all": self.mismatched_in_all,
            "older_in_all": self.older_in_all,
            "first": None if self.first is None else asdict(self.first),
        }
        kernels = {"trainer": dict(self._ours), "servers": dict(self._servers)}
        if kernels != self._reported:
            parity["kernels"] = self._reported = kernels
        return {"parity": parity}

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


def _count(recomputed: Tensor, sampled: Tensor, fresh: Tensor, different: Tensor) -> BinFigures:
    """Compare a bin; its `fresh` tokens are of the present weights."""
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
    return BinFigures(
        compared=compared,
        mismatched=mismatched,
        missing=missing,
        older=len(recomputed) - compared,
        older_known=older_known,
        largest=counted[4],
        kl=counted[5],
        older_kl=counted[6],
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
        remedy = "run both on the same kind of GPU with the same versions"
        if difference.startswith(f"{PLAN}: "):
            remedy = (
                "start all vLLM servers of a run with the same --tensor-parallel-size, and with 1 "
                "behind a parameter server"
            )
        raise PairingError(
            f"the vLLM server at {server} does not run this trainer's kernels, so their bits would "
            f"differ: {difference}; {remedy}"
        )
