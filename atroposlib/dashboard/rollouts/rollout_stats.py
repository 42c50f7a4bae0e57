"""The numbers of one rollout, from its group as it was posted and from the trainer's report. Pure.

An environment posted the group, and the service accepts fields of its own in it. A field of another
type than expected counts as missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Base64Bytes, BaseModel, Field, FiniteFloat, NonNegativeInt, Strict

from atroposlib.wire import PROMPT_MASK

Floats = npt.NDArray[np.float32]
UNKNOWN_VERSION = -1
_BEFORE_A_PLACEHOLDER = 0.5
"""Logprobs of prompts are sent as 1.0. One that was sampled is at most 0, but for rounding."""


@dataclass(slots=True)
class RolloutNumbers:
    """Numbers by which people find a rollout.

    Attributes:
        score: the reward; None if it is not a finite number.
        tokens, sampled: number of tokens, and number of tokens that the model sampled.
        mean_logprob: mean of the sampler's logprobs of the sampled tokens, in nats; None without
            logprobs.
        oldest, newest: weight versions that sampled it; None if the group does not have them.
        finish_reason: reason for the end of its sampling; empty if the group does not have it.
    """

    score: float | None
    tokens: int
    sampled: int
    mean_logprob: float | None = None
    oldest: int | None = None
    newest: int | None = None
    finish_reason: str = ""


@dataclass(frozen=True)
class TrainedTokens:
    """The trainer's numbers for the first of a rollout's trained tokens.

    Attributes:
        weight_version: of the weights that it was computed with.
        trained: how many tokens of it were trained.
        logprobs, entropies, advantages: [some] float32, some ≤ trained.
    """

    weight_version: int
    trained: int
    logprobs: Floats
    entropies: Floats
    advantages: Floats


def entries_of(group: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field's entry for each rollout.

    The entries are None if the field is not a list with one entry per rollout.
    """
    scores, rows = group.get("scores"), group.get(name)
    if not isinstance(scores, list):
        return []
    if isinstance(rows, list) and len(rows) == len(scores):
        return rows
    return [None] * len(scores)


def places_of(group: Mapping[str, Any]) -> list[npt.NDArray[np.int64]]:
    """[sampled] int64 of each rollout of a group; see sampled_places."""
    return [sampled_places(mask) for mask in entries_of(group, "masks")]


def numbers_of(
    group: Mapping[str, Any], places: Sequence[npt.NDArray[np.int64]]
) -> list[RolloutNumbers]:
    """Return the numbers of each rollout of a group.

    Args:
        group: as it was posted.
        places: as `places_of` gives them.
    """
    rows = []
    tokens, reasons = entries_of(group, "tokens"), entries_of(group, "finish_reasons")
    for index, score in enumerate(group.get("scores") or []):
        sampled = places[index]
        numbers = RolloutNumbers(None, len(tokens[index] or []), len(sampled))
        if isinstance(score, int | float) and math.isfinite(score):
            numbers.score = float(score)
        logprobs = logprobs_of(group, index)
        if len(logprobs):
            numbers.mean_logprob = _mean(logprobs[sampled])
        versions = versions_of(group, index, len(sampled))
        versions = versions[versions != UNKNOWN_VERSION]
        if len(versions):
            numbers.oldest, numbers.newest = int(versions.min()), int(versions.max())
        if isinstance(reasons[index], str):
            numbers.finish_reason = reasons[index][:64]
        rows.append(numbers)
    return rows


def sampled_places(mask: Any) -> npt.NDArray[np.int64]:
    """[sampled] int64, ascending: which tokens the model sampled."""
    row = np.asarray(mask if isinstance(mask, list) else [], dtype=np.int64)
    return np.flatnonzero(row != PROMPT_MASK)


def logprobs_of(group: Mapping[str, Any], index: int) -> Floats:
    """[tokens] float32, NaN where the sampler's logprob is not known; empty where none was sent."""
    row = entries_of(group, "inference_logprobs")[index]
    if not isinstance(row, list) or len(row) != len(entries_of(group, "tokens")[index] or []):
        return np.zeros(0, dtype=np.float32)
    taken = np.array(row, dtype=np.float32)  # None becomes NaN
    taken[taken > _BEFORE_A_PLACEHOLDER] = math.nan
    return taken


def versions_of(group: Mapping[str, Any], index: int, sampled: int) -> npt.NDArray[np.int64]:
    """[sampled] int64: the weight version of each sampled token, UNKNOWN_VERSION if the group does
    not have it.
    """
    spans = entries_of(group, "weight_version_spans")[index]
    if isinstance(spans, list) and spans and sum(count for _, count in spans) == sampled:
        return np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(
            np.int64
        )
    version = entries_of(group, "weight_versions")[index]
    if not isinstance(version, int):
        version = UNKNOWN_VERSION
    return np.full(sampled, version, dtype=np.int64)


def drift(logprobs: Floats, places: npt.NDArray[np.int64], trained: TrainedTokens) -> float | None:
    """Return the mean of |trainer's logprob - sampler's logprob| over a rollout, in nats per token.

    Args:
        logprobs: [tokens] of the sampler, NaN where they are not known; empty where none were sent.
        places: [sampled] of the rollout; see `sampled_places`.
        trained: the trainer's report.

    Returns:
        None if nothing can be compared.
    """
    # The first token of a sequence may be sampled, but it is never trained.
    behind = len(places) - trained.trained
    if behind not in (0, 1) or not len(logprobs):
        return None
    sampler = logprobs[places][behind : behind + len(trained.logprobs)]
    difference = np.abs(trained.logprobs.astype(np.float64) - sampler)
    return _mean(difference)


def _mean(values: npt.NDArray[Any]) -> float | None:
    """Return the mean of the finite ones among values; None if there is none."""
    values = values[np.isfinite(values)]
    return float(values.mean(dtype=np.float64)) if len(values) else None


MOST_KERNELS, MOST_SERVERS = 100, 1000
"""Limits of a report."""
Provenance = Annotated[dict[str, str], Field(max_length=MOST_KERNELS)]


class ServerKernels(BaseModel):
    """The kernels of a vLLM server in deterministic mode.

    Attributes:
        kernels: operation -> kernel, with the versions and the plan.
        checks: batches that its self-test compared at its start.
        seconds: duration of that self-test.
    """

    kernels: Provenance
    checks: int | None = None
    seconds: FiniteFloat | None = None


class Kernels(BaseModel):
    """The kernels of a trainer, and of its servers by address."""

    trainer: Provenance
    servers: Annotated[dict[str, ServerKernels], Field(max_length=MOST_SERVERS)]


class Parity(BaseModel):
    """The comparison of tokens of one step, and of all steps so far.

    Attributes:
        older, older_in_all: tokens of older weights, which are compared with nothing.
        first: the first token that differed; None while none has.
        kernels: of the trainer and of its servers; None if the last report had the same.
    """

    weight_version: int
    compared: int
    mismatched: int
    older: int = 0
    compared_in_all: int
    mismatched_in_all: int
    older_in_all: int = 0
    first: dict[str, Any] | None = None
    kernels: Kernels | None = None


class SequenceReport(BaseModel):
    """The trainer's numbers for one sequence of a batch, by its group and its place in the group."""

    group: NonNegativeInt
    sequence: NonNegativeInt
    trained: NonNegativeInt
    logprobs: Base64Bytes
    entropies: Base64Bytes
    advantages: Annotated[float, Strict()] | Base64Bytes


class TrainerReport(BaseModel):
    """The numbers that a trainer reports with a batch. An invalid report raises ValueError."""

    weight_version: int = 0
    sequences: list[SequenceReport] = []
    parity: Parity | None = None

    def trained_tokens(self) -> Iterator[tuple[int, int, TrainedTokens]]:
        """Yield group of the batch, sequence of the group, and numbers of each sequence.

        Raises:
            ValueError: the numbers of a sequence do not belong together.
        """
        for row in self.sequences:
            logprobs, entropies = _floats(row.logprobs), _floats(row.entropies)
            if isinstance(row.advantages, float):
                advantages = np.full(len(logprobs), row.advantages, dtype=np.float32)
            else:
                advantages = _floats(row.advantages)
            if not len(logprobs) == len(entropies) == len(advantages) <= row.trained:
                raise ValueError(
                    f"sequence {row.sequence} of group {row.group}: {len(logprobs)} logprobs, "
                    f"{len(entropies)} entropies and {len(advantages)} advantages of "
                    f"{row.trained} trained tokens"
                )
            numbers = (logprobs, entropies, advantages)
            yield (
                row.group,
                row.sequence,
                TrainedTokens(self.weight_version, row.trained, *numbers),
            )


def _floats(raw: bytes) -> Floats:
    return np.frombuffer(raw, dtype="<f4").astype(np.float32)


def of_each_token(
    length: int, places: Sequence[int] | npt.NDArray[np.int64], values: Floats
) -> Floats:
    """[length] float32: the values at these places, NaN elsewhere."""
    row = np.full(length, math.nan, dtype=np.float32)
    row[np.asarray(places, dtype=np.int64)[: len(values)]] = values
    return row
