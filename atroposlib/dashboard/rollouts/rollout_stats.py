"""The numbers of one rollout, from its group as it was posted and from the trainer's report. Pure.

An environment posted the group, and the service accepts fields of its own in it. A field of another
type than expected counts as missing.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.wire.groups import PROMPT_MASK

Floats = npt.NDArray[np.float32]
UNKNOWN_VERSION = -1
_BEFORE_A_PLACEHOLDER = 0.5
"""Logprobs of prompts are sent as 1.0. One that was sampled is at most 0, but for rounding."""


@dataclass(slots=True)
class Measured:
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


def told_of_each(group: Mapping[str, Any], name: str) -> list[Any]:
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
    return [sampled_places(mask) for mask in told_of_each(group, "masks")]


def measured(group: Mapping[str, Any], places: Sequence[npt.NDArray[np.int64]]) -> list[Measured]:
    """Return the numbers of each rollout of a group.

    Args:
        group: as it was posted.
        places: as `places_of` gives them.
    """
    rows = []
    tokens, reasons = told_of_each(group, "tokens"), told_of_each(group, "finish_reasons")
    for index, score in enumerate(group.get("scores") or []):
        sampled = places[index]
        numbers = Measured(None, len(tokens[index] or []), len(sampled))
        if isinstance(score, int | float) and math.isfinite(score):
            numbers.score = float(score)
        logprobs = logprobs_of(group, index)
        if len(logprobs):
            logprobs = logprobs[sampled]
            logprobs = logprobs[np.isfinite(logprobs)]
        if len(logprobs):
            numbers.mean_logprob = float(logprobs.mean(dtype=np.float64))
        versions = versions_of(group, index, len(sampled))
        versions = versions[versions != UNKNOWN_VERSION]
        if len(versions):
            numbers.oldest, numbers.newest = int(versions.min()), int(versions.max())
        if isinstance(reasons[index], str):
            numbers.finish_reason = reasons[index]
        rows.append(numbers)
    return rows


def sampled_places(mask: Any) -> npt.NDArray[np.int64]:
    """[sampled] int64, ascending: which tokens the model sampled."""
    row = np.asarray(mask if isinstance(mask, list) else [], dtype=np.int64)
    return np.flatnonzero(row != PROMPT_MASK)


def logprobs_of(group: Mapping[str, Any], index: int) -> Floats:
    """[tokens] float32, NaN where the sampler's logprob is not known; empty where none was sent."""
    row = told_of_each(group, "inference_logprobs")[index]
    if not isinstance(row, list) or len(row) != len(told_of_each(group, "tokens")[index] or []):
        return np.zeros(0, dtype=np.float32)
    taken = np.array(row, dtype=np.float32)  # None becomes NaN
    taken[taken > _BEFORE_A_PLACEHOLDER] = math.nan
    return taken


def versions_of(group: Mapping[str, Any], index: int, sampled: int) -> npt.NDArray[np.int64]:
    """[sampled] int64: the weight version of each sampled token, UNKNOWN_VERSION if the group does
    not have it.
    """
    spans = told_of_each(group, "weight_version_spans")[index]
    if isinstance(spans, list) and spans and sum(count for _, count in spans) == sampled:
        return np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(
            np.int64
        )
    version = told_of_each(group, "weight_versions")[index]
    if not isinstance(version, int):
        version = UNKNOWN_VERSION
    return np.full(sampled, version, dtype=np.int64)


def drift(sampler: Floats, trained: TrainedTokens) -> float | None:
    """Return the mean of |trainer's logprob - sampler's logprob| over a rollout, in nats per token.

    Args:
        sampler: [sampled] float32, NaN where it is not known.
        trained: the trainer's report.

    Returns:
        None if nothing can be compared.
    """
    ours = trained.logprobs
    # The first token of a sequence may be sampled, but it is never trained.
    behind = len(sampler) - trained.trained
    if behind not in (0, 1):
        return None
    theirs = sampler[behind : behind + len(ours)]
    difference = np.abs(ours.astype(np.float64) - theirs)
    difference = difference[np.isfinite(difference)]
    if not len(difference):
        return None
    return float(difference.mean())


def read_report(report: Any) -> list[tuple[int, int, TrainedTokens]]:
    """Return a report's entries: group of the batch, sequence of the group, and its numbers.

    Raises:
        ValueError: the report cannot be read. The message gives the reason.
    """
    if not isinstance(report, Mapping):
        raise ValueError(f"a report is an object, not {type(report).__name__}")
    version, sequences = report.get("weight_version", 0), []
    rows = report.get("sequences") or []
    if not isinstance(version, int) or not isinstance(rows, list):
        raise ValueError("a report has a weight_version and a list of sequences")
    for row in rows:
        try:
            group, sequence, trained = int(row["group"]), int(row["sequence"]), int(row["trained"])
            logprobs, entropies = _floats(row["logprobs"]), _floats(row["entropies"])
            if isinstance(row["advantages"], int | float):
                advantages = np.full(len(logprobs), row["advantages"], dtype=np.float32)
            else:
                advantages = _floats(row["advantages"])
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(
                f"a sequence of a report cannot be read: {type(error).__name__}: {error}"
            ) from None
        if (
            not len(logprobs) == len(entropies) == len(advantages) <= trained
            or min(group, sequence) < 0
        ):
            raise ValueError(
                f"sequence {sequence} of group {group}: {len(logprobs)} logprobs, {len(entropies)} entropies and "
                f"{len(advantages)} advantages of {trained} trained tokens"
            )
        sequences.append(
            (group, sequence, TrainedTokens(version, trained, logprobs, entropies, advantages))
        )
    return sequences


def _floats(text: str) -> Floats:
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError(f"{len(raw)} bytes are no float32 numbers")
    return np.frombuffer(raw, dtype="<f4").astype(np.float32)


def parity_of(report: Any) -> dict[str, Any] | None:
    """Return a report's token comparison; None if the report has none, or it cannot be read.

    Returns:
        weight_version, compared, mismatched, compared_in_all, mismatched_in_all and `first`.
    """
    parity = report.get("parity") if isinstance(report, Mapping) else None
    if not isinstance(parity, Mapping):
        return None
    names = ("weight_version", "compared", "mismatched", "compared_in_all", "mismatched_in_all")
    if not all(isinstance(parity.get(name), int) for name in names):
        return None
    first = parity.get("first")
    return {name: parity[name] for name in names} | {
        "first": dict(first) if isinstance(first, Mapping) else None
    }


def of_each_token(
    length: int, places: Sequence[int] | npt.NDArray[np.int64], values: Floats
) -> Floats:
    """[length] float32: the values at these places, NaN elsewhere."""
    row = np.full(length, math.nan, dtype=np.float32)
    row[np.asarray(places, dtype=np.int64)[: len(values)]] = values
    return row
