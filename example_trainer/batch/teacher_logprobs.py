"""A teacher's logprobs of the sampled tokens, out of the `distill_*` fields of a group. Pure: no
I/O, no state.

On the wire, `distill_token_ids[i][t]` and `distill_logprobs[i][t]` are k token ids and the
teacher's logprobs of these in the place of `tokens[i][t]`, given the tokens before it: raw
log-softmax, at temperature 1. The sampled token's entry is usually the first. Positions that are
not trained hold anything, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from example_trainer.batch.group_error import GroupError

ROUNDING = 1e-3
"""How far above 0 a logprob may lie by rounding, in nats; further up it is no logprob, such as the
1.0 of prompt positions."""
LEAST = float(np.finfo(np.float32).min)
_first = itemgetter(0)


def teacher_logprobs(
    group: Mapping[str, Any],
    sequence: int,
    tokens: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32] | None:
    """What the teacher says of one sequence's trained tokens.

    Args:
        group: as `/batch` returns it.
        sequence: its number in the group.
        tokens: [length] of the sequence.
        positions: [n] which of them are trained, ascending.

    Returns:
        [n] float32 logprobs in nats, NaN where the sampled token is not among the ids; None if no
        teacher scored the group.

    Raises:
        GroupError: the fields do not line up with each other or with the tokens, or hold what is no
            logprob; names the index.
    """
    if group.get("distill_token_ids") is None and group.get("distill_logprobs") is None:
        return None
    ids, logprobs = (
        _rows(group, name, sequence, len(tokens))
        for name in ("distill_token_ids", "distill_logprobs")
    )
    trained, places = tokens[positions].tolist(), positions.tolist()
    told = _of_first_entries(
        list(map(ids.__getitem__, places)), list(map(logprobs.__getitem__, places)), trained
    )
    if told is not None:
        return told
    found = np.full(len(positions), np.nan, dtype=np.float32)
    for n, (position, token) in enumerate(zip(places, trained, strict=True)):
        where, candidates, scores = f"[{sequence}][{position}]", ids[position], logprobs[position]
        if not isinstance(candidates, list) or not isinstance(scores, list):
            raise GroupError(f"distill_token_ids{where} or distill_logprobs{where} is no list")
        if len(candidates) != len(scores):
            raise GroupError(
                f"distill_logprobs{where} has {len(scores)} entries, distill_token_ids{where} has {len(candidates)}"
            )
        if token not in candidates:
            continue
        score = scores[candidates.index(token)]
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not LEAST <= score <= ROUNDING
        ):
            raise GroupError(
                f"distill_logprobs{where} holds {score!r:.40} for token {token}, which is no logprob"
            )
        found[n] = score
    return found


def _of_first_entries(
    ids: Sequence[Any], logprobs: Sequence[Any], tokens: Sequence[int]
) -> npt.NDArray[np.float32] | None:
    """The logprobs if everything is in order and each token's entry is the first, as it is in what
    the SDK sends; else None.

    No statement is run for each token: a batch has a million of them, and the thread that reads it
    shares its interpreter with the one that trains.
    """
    if not set(map(type, ids)) | set(map(type, logprobs)) <= {list}:
        return None
    if (
        not all(ids)
        or list(map(len, ids)) != list(map(len, logprobs))
        or list(map(_first, ids)) != tokens
    ):
        return None
    scores = list(map(_first, logprobs))
    if not set(map(type, scores)) <= {int, float}:
        return None
    try:
        values = np.array(scores, dtype=np.float64)
    except OverflowError:
        return None
    return values.astype(np.float32) if ((values >= LEAST) & (values <= ROUNDING)).all() else None


def _rows(group: Mapping[str, Any], name: str, sequence: int, length: int) -> list[Any]:
    """The field's lists for one sequence, one for each of its tokens."""
    values, tokens = group.get(name), group["tokens"]
    if not isinstance(values, list) or len(values) != len(tokens):
        raise GroupError(f"{name} has {_count(values)} entries, tokens has {len(tokens)} sequences")
    row = values[sequence]
    if not isinstance(row, list) or len(row) != length:
        count = _count(row)
        raise GroupError(f"{name}[{sequence}] has {count} entries, tokens[{sequence}] has {length}")
    return row


def _count(values: Any) -> int | str:
    if not isinstance(values, list):
        return "no"
    return len(values)
