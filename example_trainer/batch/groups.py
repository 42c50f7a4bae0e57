"""From the rollout service's groups to checked sequences with an advantage for each token. Pure: no
I/O, no state.

Conventions of the wire: `tokens`, `masks` and `inference_logprobs` of a sequence have the same
length; `masks` holds -100 where a token is not trained (the prompt) and the token's id where it is;
`inference_logprobs[t]` is the logprob of `tokens[t]` given those before it, 1.0 at prompt
positions. Above 0 it is a placeholder wherever it stands, and not taken for a logprob.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from atroposlib.wire import TrainerSession
from example_trainer.algorithm.advantages import Advantages, find_advantages
from example_trainer.batch import fields
from example_trainer.batch.fields import (
    TOKEN_FIELDS,
    GroupError,
    Sampling,
    SamplingRules,
    age,
    sampling_of,
    teacher_logprobs,
    versions_of,
)

# What is made of answers that ran into their limit, and of sequences that are too long for the
# trainer. Pure.
#
# Source: the soft overlong punishment is DAPO's (Yu et al., arXiv:2503.14476, equation 13).

LENGTH = "length"
"""The finish reason of an answer that ran into its limit."""


@dataclass(frozen=True)
class LengthRules:
    """The options about lengths.

    Attributes:
        truncated_answers: answers that ran into their limit are trained on, or masked: not trained
            on, and in the baseline of the others; or every answer is penalised for coming near its
            limit, see `penalty`.
        buffer: tokens before the limit over which the penalty grows; all of them where the limit is
            less.
        most: the penalty at the limit.
        too_long: sequences longer than the trainer's limit are masked, or dropped as if they had
            never been there.
    """

    truncated_answers: Literal["train", "mask", "penalise"] = "train"
    buffer: int = 128
    most: float = 1.0
    too_long: Literal["mask", "drop"] = "mask"

    @property
    def penalises(self) -> bool:
        """Whether scores fall with the length of answers."""
        return self.truncated_answers == "penalise"

    def penalty(self, tokens: int, limit: int) -> float:
        """What is added to the score of an answer, 0 or less.

            0                                          tokens ≤ limit - buffer
            most · ((limit - buffer) - tokens) / buffer      up to the limit
            -most                                      beyond it

        A buffer above the limit, which the paper has no equation for, counts as the limit: with it
        the shortest answer would be penalised already.

        Args:
            tokens: of the answer.
            limit: that it was sampled with.
        """
        if not self.penalises:
            return 0.0
        buffer = max(1, min(self.buffer, limit))
        return self.most * max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


NOT_TRAINED = -100


@dataclass(frozen=True)
class TrainedSequence:
    """One rollout.

    Attributes:
        tokens: [length] int64, prompt and response.
        positions: [trained] int64, ascending: which tokens are trained. Position 0 never is, since
            nothing predicts it. None of them where the sequence is masked for its length.
        fields: [trained] each, by their names in TOKEN_FIELDS; those that are unknown are not there.
            `sequence[name]` is one of them, or its fill values.
        score: the reward, as the environment gave it.
        weight_version: of the oldest weights that any of its tokens was sampled under; None if it
            was not said.
        order: place in the batch (group, sequence within the group), which settles ties.
        weight_epoch: of the trainer that made those weights; None if it was not said. See ages.
        finish_reason: why the sampler ended it, "length" where it ran into its limit; None if it
            was not said.
        success: whether it solved its item, independent of its score; None if unknown.
        env_id: the rollout service's number for the environment that it is from; None if it was not
            said.
        sampled: how many tokens of it were sampled, trained or not; not given: as many as are
            trained.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    fields: Mapping[str, npt.NDArray[Any]]
    score: float
    weight_version: int | None
    order: tuple[int, int]
    weight_epoch: int | None = None
    finish_reason: str | None = None
    success: bool | None = None
    env_id: int | None = None
    sampled: int | None = None

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self.fields:
            return TOKEN_FIELDS[name].filled(len(self.positions))
        return self.fields[name]

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        if self.sampled is None:
            return len(self.positions)
        return self.sampled

    def with_fields(self, **rows: npt.NDArray[Any]) -> TrainedSequence:
        """Return the sequence with these numbers of its trained tokens."""
        return replace(self, fields={**self.fields, **rows})

    def masked(self) -> TrainedSequence:
        """Return the sequence with none of its tokens trained."""
        none = {name: row[:0] for name, row in self.fields.items()}
        return replace(
            self, positions=self.positions[:0], fields=none, sampled=self.response_length
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
        least_limit: the least limit of an answer that may be penalised for its length.
        unpenalised: groups whose answers would be, but for the advantages that they bring along.
    """

    sequences: list[TrainedSequence] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    too_long: int = 0
    ignored_overrides: set[str] = field(default_factory=set)
    unusable_spans: list[str] = field(default_factory=list)
    narrowed: set[str] = field(default_factory=set)
    no_logprobs: int = 0
    least_limit: int = sys.maxsize
    unpenalised: int = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens with a loss."""
        return sum(len(sequence.positions) for sequence in self.sequences)

    @property
    def taught_tokens(self) -> int:
        """Trained tokens that have a teacher's logprob."""
        return sum(int(np.isfinite(one["teacher_logprobs"]).sum()) for one in self.sequences)

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

    def with_advantages(self, advantages: Sequence[float]) -> list[TrainedSequence]:
        """Its sequences, with the advantages that it brought along or, if it brought none, these."""
        sequences = []
        for i, sequence in enumerate(self.sequences):
            if self.zeroed[i]:
                row = np.zeros(len(sequence.positions), dtype=np.float32)
            elif self.own is None:
                row = np.full(len(sequence.positions), advantages[i], dtype=np.float32)
            else:
                row = self.own[i][sequence.positions]
            sequence = sequence.with_fields(advantages=row)
            if self.masked[i]:
                sequence = sequence.masked()
            sequences.append(sequence)
        return sequences


def parse_batch(
    groups: Sequence[Mapping[str, Any]],
    max_tokens: int,
    vocab_size: int,
    rules: Rules | None = None,
    version: int = sys.maxsize,
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
    reader = _GroupReader(batch, max_tokens, vocab_size, rules, version, lives)
    parsed = []
    for number, group in enumerate(groups):
        try:
            parsed.append(reader.read(group, number))
        except GroupError as error:
            batch.invalid.append(f"group {number}: {error}")
    scored = [group.scores for group in parsed if group.own is None and group.scores]
    computed: Iterator[Sequence[float]] = iter(())
    if scored:
        computed = iter(rules.advantages(scored))
    for one in parsed:
        advantages: Sequence[float] = ()
        if one.own is None and one.scores:
            advantages = next(computed)
        batch.sequences += one.with_advantages(advantages)
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
        tokens = fields.rows(group, "tokens", np.int64)
        count = len(tokens)
        scores = fields.scores(group, count)
        masks = fields.rows(group, "masks", np.int64, count)
        rows = fields.token_rows(group, count, self._unread)
        versions, epochs = (
            fields.optional_ints(group, f"weight_{name}", count) for name in ("versions", "epochs")
        )
        own = fields.own_advantages(group, [len(row) for row in tokens])
        zeroed = fields.zeroed(group, count, self.batch.ignored_overrides)
        params = fields.per_sequence(group, "sampling_params", count)
        reasons = fields.words(group, "finish_reasons", count)
        successes = fields.truths(group, "successes", count)
        sequences, shaped, unusable, narrowed = [], [], [], set[str]()
        for i, row in enumerate(tokens):
            self._check_tokens(row, masks[i], i)
            sampled = np.flatnonzero(masks[i] != NOT_TRAINED).astype(np.int64)
            positions = sampled[sampled > 0]
            oldest, counts = (versions[i], epochs[i]), (len(sampled), len(positions))
            by_token, problem = versions_of(group, i, oldest, counts, self.present, self.lives)
            if problem is not None:
                unusable.append(f"sequence {i} of group {number}: {problem}")
            sampling = sampling_of(params[i], i, len(sampled), self.rules.sampling)
            narrowed.update(sampling.narrowed)
            trained = fields.at_positions(rows, i, len(row), positions)
            trained["versions"] = by_token
            trained["temperatures"] = sampling.last_temperatures(len(positions))
            if self.rules.teacher:
                trained["teacher_logprobs"] = teacher_logprobs(group, i, row, positions)
            sequence = TrainedSequence(
                tokens=row,
                positions=positions,
                fields={name: values for name, values in trained.items() if values is not None},
                score=scores[i],
                weight_version=versions[i],
                order=(number, i),
                weight_epoch=epochs[i],
                finish_reason=reasons[i],
                success=successes[i],
                env_id=_env_id(group),
                sampled=len(sampled),
            )
            self._require_reference(sequence)
            sequences.append(sequence)
            shaped.append(scores[i] + self._penalty(sequence, sampling, own is not None))
        # Only now: of a group that is not valid, what it says is passed over.
        self.batch.unusable_spans += unusable
        self.batch.narrowed |= narrowed
        if "rollout_logprobs" in rows:
            missing = (np.isnan(sequence["rollout_logprobs"]).sum() for sequence in sequences)
            self.batch.no_logprobs += int(sum(missing))
        self.batch.unpenalised += self.rules.lengths.penalises and own is not None
        masked = list(map(self._is_masked, sequences))
        return self._without_long(_Group(sequences, shaped, own, zeroed, masked))

    @property
    def _unread(self) -> tuple[str, ...]:
        if self.rules.reference == "unused":
            return ("reference_logprobs",)
        return ()

    def _require_reference(self, sequence: TrainedSequence) -> None:
        """Check that the reference's logprobs came along if nothing here could compute them."""
        if self.rules.reference != "required" or len(sequence.tokens) > self.max_tokens:
            return
        missing = np.isnan(sequence["reference_logprobs"])
        if not missing.any():
            return
        problem = " is missing"
        if "reference_logprobs" in sequence.fields:
            count = f"{int(missing.sum())} of {len(missing)}"
            problem = f"[{sequence.order[1]}] has placeholders at {count} trained positions"
        raise GroupError(
            f"ref_logprobs{problem}, and with --ref-logprobs-from-workers no reference is loaded "
            "here; look at the reference workers"
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
        begin = int(places[0])
        if len(gaps):
            begin = int(places[gaps[-1] + 1])
        tokens = int(places[-1]) + 1 - begin
        limit = sampling.max_tokens
        if limit is None:
            limit = self.max_tokens - begin
        if not self._is_masked(sequence):
            self.batch.least_limit = min(limit, self.batch.least_limit)
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


def _env_id(group: Mapping[str, Any]) -> int | None:
    env_id = group.get("env_id")
    if isinstance(env_id, bool) or not isinstance(env_id, int):
        return None
    return env_id
