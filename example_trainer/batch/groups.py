"""From the rollout service's groups to checked sequences with an advantage for each token. Pure: no I/O, no state.

Conventions of the wire: `tokens`, `masks` and `inference_logprobs` of a sequence have the same length; `masks` holds -100
where a token is not trained (the prompt) and the token's id where it is; `inference_logprobs[t]` is the logprob of
`tokens[t]` given those before it, 1.0 at prompt positions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.utils.lives import Life
from example_trainer.algorithm.advantages import group_advantages
from example_trainer.batch.ages import age, version_on_line
from example_trainer.batch.group_error import GroupError

NOT_TRAINED = -100


@dataclass(frozen=True)
class TrainedSequence:
    """One rollout.

    Attributes:
        tokens: [length] int64, prompt and response.
        positions: [trained] int64, ascending: which tokens are trained. Position 0 never is, since nothing predicts it.
        rollout_logprobs: [trained] float32, NaN where the environment sent none.
        advantages: [trained] float32.
        score: the reward.
        weight_version: of the oldest weights that any of its tokens was sampled under; None if it was not said.
        order: place in the batch (group, sequence within the group), which settles ties.
        weight_epoch: of the trainer that made those weights; None if it was not said. See ages.
        versions: [trained] int64, the weight version that each was sampled under, on the trainer's line of weights (see ages);
            that of the oldest for all where no more was said, None where nothing was.
        temperature: that it was sampled at; None if it was not said.
        finish_reason: why the sampler ended it, "length" where it ran into its limit; None if it was not said.
        env_id: the rollout service's number for the environment that it is from; None if it was not said.
        teacher_logprobs: [trained] float32, NaN where the teacher has none; None where no teacher scored it.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rollout_logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    score: float
    weight_version: int | None
    order: tuple[int, int]
    weight_epoch: int | None = None
    versions: npt.NDArray[np.int64] | None = None
    temperature: float | None = None
    finish_reason: str | None = None
    env_id: int | None = None
    teacher_logprobs: npt.NDArray[np.float32] | None = None


@dataclass
class Batch:
    """What one optimizer step is computed from.

    Attributes:
        sequences: all rollouts of all valid groups, in the order in which they came.
        invalid: what was wrong with each group that was left out.
        truncated: how many sequences were cut to the length limit.
        ignored_overrides: names of overrides that this trainer does not know.
        unusable_spans: what was wrong with each statement of versions by span that was passed over.
    """

    sequences: list[TrainedSequence] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    truncated: int = 0
    ignored_overrides: set[str] = field(default_factory=set)
    unusable_spans: list[str] = field(default_factory=list)

    @property
    def trained_tokens(self) -> int:
        """Tokens with a loss."""
        return sum(len(sequence.positions) for sequence in self.sequences)

    def ages(self, version: int, lives: Sequence[Life] = ()) -> list[int]:
        """How many weight versions ago each sequence was begun, for those that say so, in a run of these lives."""
        return [age(s.weight_version, s.weight_epoch, version, lives) for s in self.sequences if s.weight_version is not None]


def parse_batch(
    groups: Sequence[Mapping[str, Any]],
    max_tokens: int,
    vocab_size: int,
    divide_by_std: bool = True,
    version: int | None = None,
    lives: Sequence[Life] = (),
) -> Batch:
    """Check the groups of a batch and work out advantages, group by group.

    A group's own `advantages` (for each sequence one number, bare or in a list, or one per token) replace the
    group-relative ones. The override `set_advantage_to_zero`, for a sequence or the whole group, is obeyed. A group that is
    not valid is left out whole.

    Args:
        groups: as `/batch` returns them; groups arrive whole.
        max_tokens: longer sequences are cut there.
        vocab_size: token ids lie below it.
        divide_by_std: see group_advantages.
        version: the highest that the trainer can have when it trains on the batch; not given: what was sampled is taken at
            its word.
        lives: of the trainer's run; see ages.
    """
    batch = Batch()
    present = sys.maxsize if version is None else version
    for number, group in enumerate(groups):
        try:
            sequences = _parse_group(group, number, vocab_size, divide_by_std, batch.ignored_overrides)
            sequences = _with_versions(group, sequences, present, lives, batch.unusable_spans)
        except GroupError as error:
            batch.invalid.append(f"group {number}: {error}")
            continue
        batch.truncated += sum(len(sequence.tokens) > max_tokens for sequence in sequences)
        batch.sequences += [_cut(sequence, max_tokens) for sequence in sequences]
    return batch


def _parse_group(
    group: Mapping[str, Any], number: int, vocab_size: int, divide_by_std: bool, ignored: set[str]
) -> list[TrainedSequence]:
    tokens, masks = _rows(group, "tokens", np.int64), _rows(group, "masks", np.int64)
    scores = _scores(group, len(tokens))
    if len(masks) != len(tokens):
        raise GroupError(f"masks has {len(masks)} sequences, tokens has {len(tokens)}")
    logprobs = _rows(group, "inference_logprobs", np.float32) if group.get("inference_logprobs") else None
    if logprobs is not None and len(logprobs) != len(tokens):
        raise GroupError(f"inference_logprobs has {len(logprobs)} sequences, tokens has {len(tokens)}")
    versions, epochs = (_optional_ints(group, name, len(tokens)) for name in ("weight_versions", "weight_epochs"))
    advantages = _advantages(group, scores, [len(row) for row in tokens], divide_by_std)
    zeroed = _zeroed(group, len(tokens), ignored)
    sequences = []
    for i, row in enumerate(tokens):
        if len(masks[i]) != len(row):
            raise GroupError(f"masks[{i}] has {len(masks[i])} entries, tokens[{i}] has {len(row)}")
        strange = row[(row < 0) | (row >= vocab_size)]
        if len(strange):
            raise GroupError(
                f"tokens[{i}] holds {strange[0]}, and the model's ids go from 0 to {vocab_size - 1}; is its tokenizer in use?"
            )
        positions = np.flatnonzero(masks[i] != NOT_TRAINED).astype(np.int64)
        positions = positions[positions > 0]
        taken = np.full(len(positions), np.nan, dtype=np.float32)
        if logprobs is not None:
            if len(logprobs[i]) != len(row):
                raise GroupError(f"inference_logprobs[{i}] has {len(logprobs[i])} entries, tokens[{i}] has {len(row)}")
            taken = logprobs[i][positions]
            if not np.isfinite(taken).all():
                raise GroupError(f"inference_logprobs[{i}] holds NaN or infinity at a trained position")
        weight = np.zeros_like(advantages[i]) if zeroed[i] else advantages[i]
        sequences.append(
            TrainedSequence(row, positions, taken, weight[positions], scores[i], versions[i], (number, i), epochs[i])
        )
    return sequences


def _rows(group: Mapping[str, Any], name: str, kind: type[np.int64] | type[np.float32]) -> list[npt.NDArray[Any]]:
    value = group.get(name)
    if not isinstance(value, list) or not value:
        raise GroupError(f"{name} is missing or empty")
    try:
        rows = [np.asarray(row, dtype=kind) for row in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} is no list of lists of numbers ({error})") from error
    if any(row.ndim != 1 for row in rows):
        raise GroupError(f"{name} is no list of lists of numbers")
    return rows


def _optional_ints(group: Mapping[str, Any], name: str, count: int) -> list[int | None]:
    """One number for each sequence, None where there is none."""
    values = group.get(name) or [None] * count
    if len(values) != count:
        raise GroupError(f"{name} has {len(values)} entries, tokens has {count} sequences")
    return [None if value is None else int(value) for value in values]


def _with_versions(
    group: Mapping[str, Any],
    sequences: Sequence[TrainedSequence],
    present: int,
    lives: Sequence[Life],
    unusable: list[str],
) -> list[TrainedSequence]:
    """Say of each trained token which weights it was sampled under. Spans that do not fit are passed over, and named."""
    count = len(sequences)
    spans, epochs = group.get("weight_version_spans") or [None] * count, group.get("weight_epoch_spans") or [None] * count
    done = []
    for i, sequence in enumerate(sequences):
        versions = None
        if sequence.weight_version is not None:
            oldest = version_on_line(sequence.weight_version, sequence.weight_epoch, present, lives)
            versions = np.full(len(sequence.positions), oldest, dtype=np.int64)
        try:
            if i < len(spans) and spans[i] is not None:
                sampled = int(np.count_nonzero(np.asarray(group["masks"][i]) != NOT_TRAINED))
                said = _expand(spans[i], epochs[i] if i < len(epochs) else None, sampled, present, lives)
                versions = said[sampled - len(sequence.positions) :]  # nothing predicts a first token, so it is not trained
        except (TypeError, ValueError, OverflowError) as error:
            unusable.append(f"sequence {i} of group {sequence.order[0]}: {error}")
        done.append(replace(sequence, versions=versions))
    return done


def _expand(spans: Any, epochs: Any, sampled: int, present: int, lives: Sequence[Life]) -> npt.NDArray[np.int64]:
    """One version for each sampled token, from `[[version, tokens], …]` and, if it is there, `[epoch, …]`."""
    versions, counts = zip(*((int(version), int(tokens)) for version, tokens in spans), strict=True) if spans else ((), ())
    known = [None] * len(counts) if epochs is None else [int(epoch) for epoch in epochs]
    if len(known) != len(counts):
        raise ValueError(f"weight_epoch_spans has {len(known)} entries, weight_version_spans has {len(counts)}")
    if min(counts, default=0) < 0 or sum(counts) != sampled:
        raise ValueError(f"weight_version_spans {list(counts)} do not add up to its {sampled} trained tokens")
    line = [version_on_line(version, epoch, present, lives) for version, epoch in zip(versions, known, strict=True)]
    return np.repeat(np.array(line, dtype=np.int64), counts)


def _scores(group: Mapping[str, Any], count: int) -> list[float]:
    scores = group.get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise GroupError(
            f"scores has {len(scores) if isinstance(scores, list) else 'no'} entries, tokens has {count} sequences"
        )
    if any(isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score) for score in scores):
        raise GroupError(f"scores holds something that is no finite number: {scores}")
    return [float(score) for score in scores]


def _advantages(
    group: Mapping[str, Any], scores: list[float], lengths: list[int], divide_by_std: bool
) -> list[npt.NDArray[np.float32]]:
    """One advantage per token of each sequence."""
    given = group.get("advantages")
    per_sequence = group_advantages(scores, divide_by_std) if given is None else given
    if not isinstance(per_sequence, list) or len(per_sequence) != len(lengths):
        raise GroupError(f"advantages does not have one entry for each of {len(lengths)} sequences")
    rows = []
    for i, (value, length) in enumerate(zip(per_sequence, lengths, strict=True)):
        try:
            row = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise GroupError(f"advantages[{i}] is neither a number nor a list of numbers") from error
        row = np.full(length, row.item(), dtype=np.float32) if row.shape in ((), (1,)) else row
        if row.shape != (length,) or not np.isfinite(row).all():
            raise GroupError(f"advantages[{i}] is neither a finite number nor {length} of them, one per token")
        rows.append(row)
    return rows


def _zeroed(group: Mapping[str, Any], count: int, ignored: set[str]) -> list[bool]:
    """Which sequences an override sets to advantage 0."""
    overrides = group.get("overrides") or [{}] * count
    if len(overrides) != count:
        raise GroupError(f"overrides has {len(overrides)} entries, tokens has {count} sequences")
    whole = group.get("group_overrides") or {}
    for one in [whole, *overrides]:
        ignored.update(set(one or {}) - {"set_advantage_to_zero"})
    return [bool(whole.get("set_advantage_to_zero") or (one or {}).get("set_advantage_to_zero")) for one in overrides]


def _cut(sequence: TrainedSequence, max_tokens: int) -> TrainedSequence:
    if len(sequence.tokens) <= max_tokens:
        return sequence
    kept = int(np.searchsorted(sequence.positions, max_tokens))
    return replace(
        sequence,
        tokens=sequence.tokens[:max_tokens],
        positions=sequence.positions[:kept],
        rollout_logprobs=sequence.rollout_logprobs[:kept],
        advantages=sequence.advantages[:kept],
        versions=None if sequence.versions is None else sequence.versions[:kept],
    )
