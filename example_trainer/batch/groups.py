"""From the rollout service's groups to checked sequences with an advantage for each token. Pure: no
I/O, no state.

Conventions of the wire: `tokens`, `masks` and `inference_logprobs` of a sequence have the same
length; `masks` holds -100 where a token is not trained (the prompt) and the token's id where it is;
`inference_logprobs[t]` is the logprob of `tokens[t]` given those before it, 1.0 at prompt
positions. Above 0 it is a placeholder wherever it stands, and not taken for a logprob.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from atroposlib.wire.weight_lineage import TrainerSession
from example_trainer.algorithm.advantages import Advantages, find_advantages
from example_trainer.batch import fields
from example_trainer.batch.ages import age
from example_trainer.batch.damaged_answers import UnreadableGroup
from example_trainer.batch.group_error import GroupError
from example_trainer.batch.lengths import LENGTH, LengthRules
from example_trainer.batch.reference_logprobs import reference_at, reference_rows
from example_trainer.batch.sampling import Sampling, SamplingRules, sampling_of
from example_trainer.batch.teacher_logprobs import ROUNDING, teacher_logprobs
from example_trainer.batch.version_spans import versions_of

NOT_TRAINED = -100


@dataclass(frozen=True)
class TrainedSequence:
    """One rollout.

    Attributes:
        tokens: [length] int64, prompt and response.
        positions: [trained] int64, ascending: which tokens are trained. Position 0 never is, since
            nothing predicts it. None of them where the sequence is masked for its length.
        rollout_logprobs: [trained] float32, NaN where the environment sent none, or a placeholder.
        advantages: [trained] float32.
        score: the reward, as the environment gave it.
        weight_version: of the oldest weights that any of its tokens was sampled under; None if it
            was not said.
        order: place in the batch (group, sequence within the group), which settles ties.
        weight_epoch: of the trainer that made those weights; None if it was not said. See ages.
        versions: [trained] int64, the weight version that each was sampled under, on the trainer's
            line of weights (see ages); that of the oldest for all where no more was said, None
            where nothing was.
        temperatures: [trained] float32, that each was sampled at; None if it was not said.
        finish_reason: why the sampler ended it, "length" where it ran into its limit; None if it
            was not said.
        success: whether it solved its item, independent of its score; None if unknown.
        env_id: the rollout service's number for the environment that it is from; None if it was not
            said.
        teacher_logprobs: [trained] float32, NaN where the teacher has none; None where no teacher
            scored it, or is wanted.
        reference_logprobs: [trained] float32, NaN where the reference has none; None where none
            came along, or is wanted.
        sampled: how many tokens of it were sampled, trained or not; not given: as many as are
            trained.
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
    temperatures: npt.NDArray[np.float32] | None = None
    finish_reason: str | None = None
    success: bool | None = None
    env_id: int | None = None
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    reference_logprobs: npt.NDArray[np.float32] | None = None
    sampled: int | None = None

    @property
    def response_length(self) -> int:
        """Sampled tokens."""
        return len(self.positions) if self.sampled is None else self.sampled

    def masked(self) -> TrainedSequence:
        """The same with nothing of it trained."""
        return replace(
            self,
            positions=self.positions[:0],
            rollout_logprobs=self.rollout_logprobs[:0],
            advantages=self.advantages[:0],
            versions=None if self.versions is None else self.versions[:0],
            temperatures=None if self.temperatures is None else self.temperatures[:0],
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[:0],
            reference_logprobs=None
            if self.reference_logprobs is None
            else self.reference_logprobs[:0],
            sampled=self.response_length,
        )


@dataclass(frozen=True)
class Rules:
    """What is made of what groups hold.

    Attributes:
        advantages: see algorithm.advantages; those of a group by itself are not what the scores of
            a batch may make.
        lengths, sampling: see there.
        teacher: whether a teacher's logprobs are read.
        reference: whether those of the reference are; if they are required, a group without them is
            left out.
    """

    advantages: Advantages = field(default_factory=lambda: find_advantages("group"))
    lengths: LengthRules = field(default_factory=LengthRules)
    sampling: SamplingRules = field(default_factory=SamplingRules)
    teacher: bool = False
    reference: Literal["unused", "optional", "required"] = "unused"


@dataclass
class Batch:
    """What one optimizer step is computed from.

    Attributes:
        sequences: all rollouts of all valid groups, in the order in which they came, but for those
            that were dropped.
        invalid: what was wrong with each group that was left out.
        too_long: how many sequences were longer than the length limit, masked or dropped.
        ignored_overrides: names of overrides that this trainer does not know.
        unusable_spans: what was wrong with each statement of versions by span that was passed over.
        narrowed: what changed the distribution that sequences were sampled from, besides their
            temperature.
        no_logprobs: trained tokens at which an environment sent a number above 0 as a logprob,
            which is unknown then.
        least_limit: the least limit of an answer that may be penalised for its length; None if none
            may.
        unpenalised: groups whose answers would be, but for the advantages that they bring along.
    """

    sequences: list[TrainedSequence] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    too_long: int = 0
    ignored_overrides: set[str] = field(default_factory=set)
    unusable_spans: list[str] = field(default_factory=list)
    narrowed: set[str] = field(default_factory=set)
    no_logprobs: int = 0
    least_limit: int | None = None
    unpenalised: int = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens with a loss."""
        return sum(len(sequence.positions) for sequence in self.sequences)

    @property
    def taught_tokens(self) -> int:
        """Trained tokens that have a teacher's logprob."""
        rows = (sequence.teacher_logprobs for sequence in self.sequences)
        return sum(int(np.isfinite(row).sum()) for row in rows if row is not None)

    def ages(self, version: int, lives: Sequence[TrainerSession] = ()) -> list[int]:
        """How many weight versions ago each sequence was begun, for those that say so, in a run of
        these lives.
        """
        return [
            age(s.weight_version, s.weight_epoch, version, lives)
            for s in self.sequences
            if s.weight_version is not None
        ]


@dataclass(frozen=True)
class _Group:
    """A valid group before it has advantages.

    Attributes:
        sequences: with advantages of 0.
        scores: what advantages are made of: those of the environment, less penalties.
        own: [length] of each sequence, the advantages that the group brought along; None if it
            brought none.
        zeroed: whether an override takes each one's advantages away.
        masked: whether each is not to be trained on.
    """

    sequences: list[TrainedSequence]
    scores: list[float]
    own: list[npt.NDArray[np.float32]] | None
    zeroed: list[bool]
    masked: list[bool]

    def with_advantages(self, found: Sequence[float]) -> list[TrainedSequence]:
        """Its sequences, with the advantages that it brought along or, if it brought none, these."""
        done = []
        for i, sequence in enumerate(self.sequences):
            count = len(sequence.positions)
            row = (
                np.full(count, found[i], dtype=np.float32)
                if self.own is None
                else self.own[i][sequence.positions]
            )
            sequence = replace(sequence, advantages=np.zeros_like(row) if self.zeroed[i] else row)
            done.append(sequence.masked() if self.masked[i] else sequence)
        return done


def parse_batch(
    groups: Sequence[Mapping[str, Any]],
    max_tokens: int,
    vocab_size: int,
    rules: Rules | None = None,
    version: int | None = None,
    lives: Sequence[TrainerSession] = (),
) -> Batch:
    """Check the groups of a batch, and work out advantages from the scores of all of them.

    A group's own `advantages` (for each sequence one number, bare or in a list, or one per token)
    replace those that are made of scores. The override `set_advantage_to_zero`, for a sequence or
    the whole group, is obeyed. A group that is not valid is left out whole.

    Args:
        groups: as `/batch` returns them; groups arrive whole.
        max_tokens: longer sequences are not trained on.
        vocab_size: token ids lie below it.
        rules: not given: advantages by group, and what is the default for the rest.
        version: the highest that the trainer can have when it trains on the batch; not given: what
            was sampled is taken at its word.
        lives: of the trainer's run; see ages.

    Raises:
        NonFiniteError, ConfigError: the function for advantages is the user's, and fails.
    """
    batch, rules = Batch(), rules or Rules()
    reader = _GroupReader(
        batch, max_tokens, vocab_size, rules, sys.maxsize if version is None else version, lives
    )
    parsed = []
    for number, group in enumerate(groups):
        try:
            parsed.append(reader.read(group, number))
        except GroupError as error:
            batch.invalid.append(f"group {number}: {error}")
    scored = [group.scores for group in parsed if group.own is None and group.scores]
    found = iter(rules.advantages(scored) if scored else [])
    for one in parsed:
        batch.sequences += one.with_advantages(
            next(found) if one.own is None and one.scores else ()
        )
    return batch


@dataclass(frozen=True)
class _GroupReader:
    """Reads groups into a batch.

    Attributes:
        batch: is told what is passed over.
        present: the trainer's version.
        others: see parse_batch.
    """

    batch: Batch
    max_tokens: int
    vocab_size: int
    rules: Rules
    present: int
    lives: Sequence[TrainerSession]

    def read(self, group: Mapping[str, Any], number: int) -> _Group:
        """Check a group.

        Raises:
            GroupError: it is not valid, or must not be trained on.
        """
        if isinstance(group, UnreadableGroup):
            raise GroupError(group.reason)
        tokens, masks = (
            fields.rows(group, "tokens", np.int64),
            fields.rows(group, "masks", np.int64),
        )
        count = len(tokens)
        scores = fields.scores(group, count)
        if len(masks) != count:
            raise GroupError(f"masks has {len(masks)} sequences, tokens has {count}")
        logprobs = (
            fields.rows(group, "inference_logprobs", np.float32)
            if group.get("inference_logprobs")
            else None
        )
        if logprobs is not None and len(logprobs) != count:
            raise GroupError(
                f"inference_logprobs has {len(logprobs)} sequences, tokens has {count}"
            )
        referenced = None if self.rules.reference == "unused" else reference_rows(group, count)
        versions, epochs = (
            fields.optional_ints(group, f"weight_{name}", count) for name in ("versions", "epochs")
        )
        own = fields.own_advantages(group, [len(row) for row in tokens])
        zeroed = fields.zeroed(group, count, self.batch.ignored_overrides)
        said = fields.listed_per_sequence(group, "sampling_params", count)
        reasons = fields.listed_per_sequence(group, "finish_reasons", count)
        successes = fields.listed_per_sequence(group, "successes", count)
        sequences, shaped, masked, unusable, narrowed, no_logprobs = [], [], [], [], set[str](), 0
        for i, row in enumerate(tokens):
            self._check_tokens(row, masks[i], i)
            sampled = np.flatnonzero(masks[i] != NOT_TRAINED).astype(np.int64)
            positions = sampled[sampled > 0]
            oldest, counts = (versions[i], epochs[i]), (len(sampled), len(positions))
            by_token, problem = versions_of(group, i, oldest, counts, self.present, self.lives)
            if problem is not None:
                unusable.append(f"sequence {i} of group {number}: {problem}")
            sampling = sampling_of(said[i], i, len(sampled), self.rules.sampling)
            narrowed.update(sampling.narrowed)
            warmth = sampling.temperatures
            taken = _logprobs_at(logprobs, i, row, positions)
            no_logprobs += int((taken > ROUNDING).sum())
            sequence = TrainedSequence(
                tokens=row,
                positions=positions,
                rollout_logprobs=np.where(taken > ROUNDING, np.float32(np.nan), taken),
                advantages=np.zeros(len(positions), dtype=np.float32),
                score=scores[i],
                weight_version=versions[i],
                order=(number, i),
                weight_epoch=epochs[i],
                versions=by_token,
                temperatures=None if warmth is None else warmth[len(warmth) - len(positions) :],
                finish_reason=None if reasons[i] is None else str(reasons[i]),
                success=successes[i] if isinstance(successes[i], bool) else None,
                env_id=_env_id(group),
                teacher_logprobs=teacher_logprobs(group, i, row, positions)
                if self.rules.teacher
                else None,
                reference_logprobs=self._reference(referenced, i, row, positions),
                sampled=len(sampled),
            )
            sequences.append(sequence)
            shaped.append(scores[i] + self._penalty(sequence, sampling, own is not None))
            masked.append(self._is_masked(sequence))
        # Only now: of a group that is not valid, what it says is passed over.
        self.batch.unusable_spans += unusable
        self.batch.narrowed |= narrowed
        self.batch.no_logprobs += no_logprobs
        self.batch.unpenalised += self.rules.lengths.penalises and own is not None
        read = _Group(sequences, shaped, own, zeroed, masked)
        return self._without_long(read)

    def _reference(
        self,
        rows: list[npt.NDArray[np.float32]] | None,
        i: int,
        row: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32] | None:
        trained = positions if len(row) <= self.max_tokens else positions[:0]
        required = self.rules.reference == "required"
        found = reference_at(rows, i, len(row), trained, required)
        return (
            found
            if found is None or len(trained) == len(positions)
            else np.full(len(positions), np.nan, dtype=np.float32)
        )

    def _check_tokens(
        self, row: npt.NDArray[np.int64], mask: npt.NDArray[np.int64], i: int
    ) -> None:
        if len(mask) != len(row):
            raise GroupError(f"masks[{i}] has {len(mask)} entries, tokens[{i}] has {len(row)}")
        strange = row[(row < 0) | (row >= self.vocab_size)]
        if len(strange):
            raise GroupError(
                f"tokens[{i}] holds {strange[0]}, and the model's ids go from 0 to {self.vocab_size - 1}; is its tokenizer in "
                "use?"
            )

    def _penalty(self, sequence: TrainedSequence, sampling: Sampling, has_own: bool) -> float:
        """Of the last answer: the sampled tokens behind the last one that was given."""
        places = sequence.positions
        if not self.rules.lengths.penalises or has_own or not len(places):
            return 0.0
        gaps = np.flatnonzero(np.diff(places) > 1)
        begin = int(places[gaps[-1] + 1] if len(gaps) else places[0])
        tokens = int(places[-1]) + 1 - begin
        limit = self.max_tokens - begin if sampling.max_tokens is None else sampling.max_tokens
        if not self._is_masked(sequence):
            self.batch.least_limit = (
                limit if self.batch.least_limit is None else min(limit, self.batch.least_limit)
            )
        return self.rules.lengths.penalty(tokens, limit)

    def _is_masked(self, sequence: TrainedSequence) -> bool:
        mask_truncated = self.rules.lengths.truncated_answers == "mask"
        return len(sequence.tokens) > self.max_tokens or (
            mask_truncated and sequence.finish_reason == LENGTH
        )

    def _without_long(self, group: _Group) -> _Group:
        """A group without sequences that are to be dropped; what is too long is counted."""
        long = [len(sequence.tokens) > self.max_tokens for sequence in group.sequences]
        self.batch.too_long += sum(long)
        if self.rules.lengths.too_long != "drop":
            return group
        kept = [i for i, drop in enumerate(long) if not drop]
        return _Group(
            [group.sequences[i] for i in kept],
            [group.scores[i] for i in kept],
            None if group.own is None else [group.own[i] for i in kept],
            [group.zeroed[i] for i in kept],
            [group.masked[i] for i in kept],
        )


def _logprobs_at(
    logprobs: list[npt.NDArray[np.float32]] | None,
    i: int,
    row: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    if logprobs is None:
        return np.full(len(positions), np.nan, dtype=np.float32)
    if len(logprobs[i]) != len(row):
        raise GroupError(
            f"inference_logprobs[{i}] has {len(logprobs[i])} entries, tokens[{i}] has {len(row)}"
        )
    taken = logprobs[i][positions]
    if not np.isfinite(taken).all():
        raise GroupError(f"inference_logprobs[{i}] holds NaN or infinity at a trained position")
    return taken


def _env_id(group: Mapping[str, Any]) -> int | None:
    found = group.get("env_id")
    return found if isinstance(found, int) and not isinstance(found, bool) else None
