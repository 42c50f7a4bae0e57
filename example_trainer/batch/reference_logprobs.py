"""The reference model's logprobs of the sampled tokens: out of a group's `ref_logprobs`, and into
it. Pure: no I/O, no state.

On the wire `ref_logprobs[i]` is as long as `tokens[i]`: at each trained position the logprob of
that token under the reference, given the tokens before it and at the temperature that it was
sampled at, elsewhere 1.0. Above 0 a number is a placeholder wherever it stands, as in
`inference_logprobs`, and the token counts as one that nobody scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from example_trainer.batch import fields
from example_trainer.batch.group_error import GroupError
from example_trainer.batch.teacher_logprobs import ROUNDING

NOT_SCORED = 1.0


def reference_rows(group: Mapping[str, Any], count: int) -> list[npt.NDArray[np.float32]] | None:
    """What a group brings along; None if nothing.

    Args:
        count: its sequences.

    Raises:
        GroupError: it is no list of numbers for each sequence.
    """
    if not group.get("ref_logprobs"):
        return None
    rows = fields.rows(group, "ref_logprobs", np.float32)
    if len(rows) != count:
        raise GroupError(f"ref_logprobs has {len(rows)} sequences, tokens has {count}")
    return rows


def reference_at(
    rows: list[npt.NDArray[np.float32]] | None,
    i: int,
    length: int,
    positions: npt.NDArray[np.int64],
    required: bool = False,
) -> npt.NDArray[np.float32] | None:
    """What the reference says of the trained tokens of sequence `i`.

    Args:
        rows: of the group; see reference_rows.
        length: tokens of the sequence.
        positions: [n] which of them are trained.
        required: nothing here could compute what is missing.

    Returns:
        [n] float32 in nats, NaN where none came along; None if none came along for the group.

    Raises:
        GroupError: the row does not line up with the tokens, or holds what is no number, or less
            than is required.
    """
    if rows is None:
        if required and len(positions):
            raise GroupError(
                "ref_logprobs is missing, and with --ref-logprobs-from-workers no reference is loaded here; look at the "
                "reference workers"
            )
        return None
    if len(rows[i]) != length:
        raise GroupError(f"ref_logprobs[{i}] has {len(rows[i])} entries, tokens[{i}] has {length}")
    taken = rows[i][positions]
    if not np.isfinite(taken).all():
        raise GroupError(f"ref_logprobs[{i}] holds NaN or infinity at a trained position")
    missing = taken > ROUNDING
    if required and missing.any():
        raise GroupError(
            f"ref_logprobs[{i}] has placeholders at {int(missing.sum())} of {len(taken)} trained positions, and with "
            "--ref-logprobs-from-workers no reference is loaded here; look at the reference workers"
        )
    return np.where(missing, np.float32(np.nan), taken)


def wire_row(
    length: int, positions: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
) -> list[float]:
    """A sequence's row of `ref_logprobs`, of floats that are these float32 numbers exactly, as JSON
    then writes them.

    Args:
        length: tokens of the sequence.
        positions: [n] which of them were scored.
        logprobs: [n] float32.
    """
    row = np.full(length, NOT_SCORED, dtype=np.float64)
    row[positions] = logprobs
    values: list[float] = row.tolist()
    return values
