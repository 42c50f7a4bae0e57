"""What is known of one rollout, from its group as it was posted and from what the trainer told of
it. Pure.

A group is what an environment posted, so whatever was accepted must do: fields that are not what
they should be count as not there.
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


@dataclass(frozen=True)
class Measured:
    """Numbers of one rollout, by which it is found.

    Attributes:
        score: the reward; None where that is no number.
        tokens, sampled: how many it has, and how many of them the model sampled.
        mean_logprob: of the sampled ones under the sampler, in nats; None where nobody sent
            logprobs.
        oldest, newest: weight versions that sampled it; None where nobody said.
        finish_reason: why its sampling ended; empty where nobody said.
    """

    score: float | None
    tokens: int
    sampled: int
    mean_logprob: float | None
    oldest: int | None
    newest: int | None
    finish_reason: str


@dataclass(frozen=True)
class TrainedTokens:
    """What the trainer computed for the first of a rollout's trained tokens.

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


def sequences_of(group: Mapping[str, Any]) -> int:
    """Return the number of rollouts in a group."""
    scores = group.get("scores")
    return len(scores) if isinstance(scores, list) else 0


def told_of_each(group: Mapping[str, Any], name: str) -> list[Any]:
    """An entry for each rollout, None where nothing is said.

    What is no list of as many is the environment's own.
    """
    rows, count = group.get(name), sequences_of(group)
    return rows if isinstance(rows, list) and len(rows) == count else [None] * count


def places_of(group: Mapping[str, Any]) -> list[npt.NDArray[np.int64]]:
    """[sampled] int64 of each rollout of a group; see sampled_places."""
    return [sampled_places(mask) for mask in told_of_each(group, "masks")]


def measured(group: Mapping[str, Any], places: Sequence[npt.NDArray[np.int64]]) -> list[Measured]:
    """The numbers of each rollout of a group.

    Args:
        places: as `places_of` gives them.
    """
    found = []
    tokens, reasons = told_of_each(group, "tokens"), told_of_each(group, "finish_reasons")
    for index, score in enumerate(group.get("scores") or []):
        sampled = places[index]
        logprobs = logprobs_of(group, index)
        known = logprobs[sampled] if len(logprobs) else logprobs
        known = known[np.isfinite(known)]
        versions = versions_of(group, index, len(sampled))
        known_versions = versions[versions != UNKNOWN_VERSION]
        found.append(
            Measured(
                score=float(score)
                if isinstance(score, int | float) and math.isfinite(score)
                else None,
                tokens=len(tokens[index] or []),
                sampled=len(sampled),
                mean_logprob=float(known.mean(dtype=np.float64)) if len(known) else None,
                oldest=int(known_versions.min()) if len(known_versions) else None,
                newest=int(known_versions.max()) if len(known_versions) else None,
                finish_reason=reasons[index] if isinstance(reasons[index], str) else "",
            )
        )
    return found


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
    """[sampled] int64: the weight version that each sampled token is of, UNKNOWN_VERSION where
    nobody said.
    """
    spans = told_of_each(group, "weight_version_spans")[index]
    if isinstance(spans, list) and spans and sum(count for _, count in spans) == sampled:
        return np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(
            np.int64
        )
    version = told_of_each(group, "weight_versions")[index]
    return np.full(
        sampled, version if isinstance(version, int) else UNKNOWN_VERSION, dtype=np.int64
    )


def drift(sampler: Floats, trained: TrainedTokens) -> float | None:
    """How far sampler and trainer differ on a rollout: the mean of |logprob of the trainer - of the
    sampler|, in nats a token.

    Args:
        sampler: [sampled] float32, NaN where it is not known.

    Returns:
        None where nothing can be compared.
    """
    ours = trained.logprobs
    behind = (
        len(sampler) - trained.trained
    )  # the first token of a sequence may be sampled, but never trained
    if behind not in (0, 1):
        return None
    theirs = sampler[behind : behind + len(ours)]
    difference = np.abs(ours.astype(np.float64) - theirs)
    known = difference[np.isfinite(difference)]
    return float(known.mean()) if len(known) else None


def read_report(report: Any) -> list[tuple[int, int, TrainedTokens]]:
    """What a trainer reported: group of the batch, sequence of the group, and what was computed for
    it.

    Raises:
        ValueError: it is no report; says what is wrong.
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
            value = row["advantages"]
            advantages = (
                np.full(len(logprobs), value, dtype=np.float32)
                if isinstance(value, int | float)
                else _floats(value)
            )
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
    """What a report says of the comparison bit for bit: weight_version, compared, mismatched,
    compared_in_all, mismatched_in_all and `first`; None where it says nothing, or nothing that can
    be read."""
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
