"""Which weights sampled which token, out of the fields of a group. Pure: no I/O, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.wire import TrainerSession
from example_trainer.batch.ages import version_on_line


def versions_of(
    group: Mapping[str, Any],
    sequence: int,
    oldest: tuple[int | None, int | None],
    counts: tuple[int, int],
    present: int,
    lives: Sequence[TrainerSession],
) -> tuple[npt.NDArray[np.int64] | None, str | None]:
    """The weight version of each trained token of a sequence, on the trainer's line of weights.

    Args:
        sequence: its number in the group.
        oldest: version and epoch of the oldest weights behind it, None where nobody said: all of
            its tokens count as theirs where no more is said.
        counts: its sampled tokens, and how many of these are trained: nothing predicts a first
            token.
        present: the trainer's version.
        lives: of its run; see ages.

    Returns:
        [trained] int64, None where nothing is said; and what was wrong with spans that do not fit,
        which are passed over.
    """
    sampled, trained = counts
    versions = None
    if oldest[0] is not None:
        versions = np.full(
            trained, version_on_line(oldest[0], oldest[1], present, lives), dtype=np.int64
        )
    spans, epochs = (
        group.get(name) or [] for name in ("weight_version_spans", "weight_epoch_spans")
    )  # fmt: skip
    try:
        if not isinstance(spans, list) or not isinstance(epochs, list):
            raise TypeError("weight_version_spans or weight_epoch_spans is no list")
        if sequence >= len(spans) or spans[sequence] is None:
            return versions, None
        said = _expand(
            spans[sequence],
            epochs[sequence] if sequence < len(epochs) else None,
            sampled,
            present,
            lives,
        )
    except (TypeError, ValueError, OverflowError) as error:
        return versions, str(error)
    return said[sampled - trained :], None


def _expand(
    spans: Any, epochs: Any, sampled: int, present: int, lives: Sequence[TrainerSession]
) -> npt.NDArray[np.int64]:
    """One version for each sampled token, from `[[version, tokens], …]` and, if it is there,
    `[epoch, …]`.
    """
    pairs = [(int(version), int(tokens)) for version, tokens in spans]
    versions, counts = [version for version, _ in pairs], [tokens for _, tokens in pairs]
    span_epochs: list[int | None] = [None] * len(pairs)
    if epochs is not None:
        span_epochs = [int(epoch) for epoch in epochs]
    if len(span_epochs) != len(counts):
        raise ValueError(
            f"weight_epoch_spans has {len(span_epochs)} entries, "
            f"weight_version_spans has {len(counts)}"
        )
    if min(counts, default=0) < 0 or sum(counts) != sampled:
        raise ValueError(
            f"weight_version_spans {counts} do not add up to its {sampled} trained tokens"
        )
    line = [
        version_on_line(version, epoch, present, lives)
        for version, epoch in zip(versions, span_epochs, strict=True)
    ]
    return np.repeat(np.array(line, dtype=np.int64), counts)
