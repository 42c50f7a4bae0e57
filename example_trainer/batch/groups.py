"""From the rollout service's groups to checked sequences with an advantage for each token. Pure: no
I/O, no state.

Conventions of the wire: `tokens`, `masks` and `inference_logprobs` of a sequence have the same
length. `masks` holds -100 where a token is not trained (the prompt) and the token's id where it is.
`inference_logprobs[t]` is the logprob of `tokens[t]` given those before it, 1.0 at prompt
positions. Above 0 it is a placeholder wherever it stands, and not taken for a logprob.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from atroposlib.wire import (
    CONSTRAINED,
    GROUP_FIELDS,
    LARGEST_SCORE,
    NEUTRAL,
    PROMPT_LOGPROB,
    NullWhereUnknown,
    TrainerSession,
    effective_version,
    first_beyond,
)
from example_trainer.algorithm.advantages import Advantages, find_advantages
from vllm_patching.protocol.routed_experts import ExpertsError, from_wire

# Readers of a group's fields, which `atroposlib.wire.ScoredDataGroup` lists, and the writer
# of a row. Pure: no I/O, no state.

# The error of every reader of a group stands apart, so that the readers of single fields need not
# know the reader of the whole.


class GroupError(ValueError):
    """A group does not hold what the wire promises. The message names the field."""


# The age of rollouts across the sessions of a run's trainers, by the rule that the rollout service
# has too. Pure.


def version_on_line(
    version: int, epoch: int | None, present: int, lives: Sequence[TrainerSession]
) -> int:
    """Return the version of weights on the line that is trained on now; at most `present`.

    Args:
        version, epoch: of the weights; an epoch of None or 0: unknown, or they are from before any
            trainer.
        present: the trainer's version.
        lives: of the trainer's run, oldest first, the present one last.
    """
    if epoch:
        version = effective_version(epoch, version, lives)
    if (
        version > present
    ):  # of an earlier session without an epoch, or of a trainer that this one has replaced
        version = lives[-1].start - 1 if lives else present
    return min(version, present)


def age(version: int, epoch: int | None, present: int, lives: Sequence[TrainerSession]) -> int:
    """Count the weight versions between a sample's weights and the trainer's. Never negative.

    Args:
        version, epoch, present, lives: see version_on_line.
    """
    return present - version_on_line(version, epoch, present, lives)


# A teacher's logprobs of the sampled tokens, out of the `distill_*` fields of a group. Pure: no
# I/O, no state.
#
# On the wire, `distill_token_ids[i][t]` and `distill_logprobs[i][t]` are k token ids and the
# teacher's logprobs of these. They are for the place of `tokens[i][t]`, given the tokens before it.
# They are the raw log-softmax, at temperature 1. The sampled token's entry is usually the first.
# Positions that are not trained hold anything, or nothing.

ROUNDING = 1e-3
"""Largest logprob above 0 that counts as rounding, in nats. A larger number, such as the 1.0 of
prompt positions, is not a logprob."""
LEAST = float(np.finfo(np.float32).min)
_first = itemgetter(0)


def teacher_logprobs(
    group: Mapping[str, Any],
    sequence: int,
    tokens: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32] | None:
    """Read the teacher's logprobs of one sequence's trained tokens.

    Args:
        group: as `/batch` returns it.
        sequence: its number in the group.
        tokens: [length] of the sequence.
        positions: [n] which of them are trained, ascending.

    Returns:
        [n] float32 logprobs in nats, NaN where the sampled token is not among the ids; None if no
        teacher scored the group.

    Raises:
        GroupError: the fields do not line up with each other or with the tokens, or hold something
            that is not a logprob; names the index.
    """
    if group.get("distill_token_ids") is None and group.get("distill_logprobs") is None:
        return None
    ids, logprobs = (
        _rows(group, name, sequence, len(tokens))
        for name in ("distill_token_ids", "distill_logprobs")
    )
    trained, places = tokens[positions].tolist(), positions.tolist()
    fast = _of_first_entries(
        list(map(ids.__getitem__, places)), list(map(logprobs.__getitem__, places)), trained
    )
    if fast is not None:
        return fast
    values = np.full(len(positions), np.nan, dtype=np.float32)
    for n, (position, token) in enumerate(zip(places, trained, strict=True)):
        where, candidates, scores = f"[{sequence}][{position}]", ids[position], logprobs[position]
        if not isinstance(candidates, list) or not isinstance(scores, list):
            raise GroupError(f"distill_token_ids{where} or distill_logprobs{where} is not a list")
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
                f"distill_logprobs{where} holds {score!r:.40} for token {token}, which is not a "
                "logprob"
            )
        values[n] = score
    return values


def _of_first_entries(
    ids: Sequence[Any], logprobs: Sequence[Any], tokens: Sequence[int]
) -> npt.NDArray[np.float32] | None:
    """The logprobs if everything is in order and each token's entry is the first, as it is in what
    the SDK sends; else None.

    No statement is run for each token. A batch has a million of them, and the thread that reads it
    shares its interpreter with the training thread.
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


# The numbers that a rollout has for each of its trained tokens.
#
# `TOKEN_FIELDS` lists them once. Sequences, bins and the messages between ranks carry whatever is
# in it, so a new field is one line here. If a group brings the field along as one number for each
# token, `wire` names it and the group reader fills it in. The field's own line in
# `atroposlib.wire.ScoredDataGroup` describes it for environments and the service.

UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class TokenField:
    """One number for each trained token.

    Attributes:
        dtype: of the number.
        fill: stands where a sequence has no number.
        wire: field of a group that holds it for each token; None if the group reader works it out.
        largest: a number above it is a placeholder, as 1.0 is at prompt positions, and is replaced
            by `fill`. None if every number counts.
        ordering: whether the numbers decide, with the rest of a rollout's content, which bin the
            rollout comes into where lengths are equal. If "unless_filled": if they are not all
            `fill`.
    """

    dtype: type[np.int64] | type[np.float32]
    fill: float
    wire: str | None = None
    largest: float | None = None
    ordering: Literal["always", "unless_filled", "never"] = "always"

    def filled(self, length: int) -> npt.NDArray[Any]:
        """Return the numbers of tokens that have none."""
        return np.full(length, self.fill, dtype=self.dtype)

    def orders(self, row: npt.NDArray[Any]) -> bool:
        """Return True if these numbers decide where their rollout goes."""
        if self.ordering == "unless_filled":
            return not np.array_equal(row, self.filled(len(row)), equal_nan=True)
        return self.ordering == "always"


TOKEN_FIELDS = {
    "advantages": TokenField(np.float32, 0.0),
    "rollout_logprobs": TokenField(np.float32, math.nan, "inference_logprobs", ROUNDING),
    # The weight version that the token was sampled under, on the trainer's line of weights.
    "versions": TokenField(np.int64, UNKNOWN_VERSION),
    # The temperature that the token was sampled at; its logits are divided by it.
    "temperatures": TokenField(np.float32, 1.0, ordering="unless_filled"),
    "teacher_logprobs": TokenField(np.float32, math.nan, ordering="unless_filled"),
    # They are the same bits whether workers send them or the trainer computes them, so they must
    # not decide where a rollout goes.
    "reference_logprobs": TokenField(
        np.float32, math.nan, "ref_logprobs", ROUNDING, ordering="never"
    ),
}


# Which weights sampled which token, out of the fields of a group. Pure: no I/O, no state.


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
        oldest: version and epoch of the oldest weights behind it, None if unknown: all of
            its tokens count as theirs without spans.
        counts: its sampled tokens, and how many of these are trained: nothing predicts a first
            token.
        present: the trainer's version.
        lives: of its run; see ages.

    Returns:
        [trained] int64, None if unknown; and what was wrong with spans that do not fit,
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
            raise TypeError("weight_version_spans or weight_epoch_spans is not a list")
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


# The distribution that a sequence was sampled from, out of `sampling_params`, and whether it can
# be trained on. Pure.
#
# `sampling_params[i]` is an object of numbers: `temperature`, and the non-neutral ones of `top_p`,
# `top_k`, `min_p`, penalties and `min_tokens`. `max_tokens` only ends an answer. Where turns were
# sampled in different ways it is a list of such objects. Each has `tokens`, the number of sampled
# tokens that it is of.
#
# The trainer recomputes the logprob of each token under softmax(logits / temperature) over the whole
# vocabulary. It does not know other influences on the distribution: see BIAS.

IDLE = {**NEUTRAL, CONSTRAINED: (0.0,)}
"""Parameter that changes the distribution -> the values at which it does not."""
BIAS = (
    "the server's logprobs are of the distribution that was left or shifted, the trainer's of the "
    "whole one. So ratios are off by the probability that was cut away or moved. Clipping and "
    "corrections take that for drift, and tokens that could not be sampled are never learned"
)

LEAST_TEMPERATURE = 1e-2
"""Below it samplers take the likeliest token, or another temperature than they were asked for (vLLM
this one), and logits divided by it leave float32."""
GREATEST_TEMPERATURE = float(np.finfo(np.float32).max)

TAKEN_ON_TRUST = (
    "%s cannot be asked which logprobs it hands out; they are taken to be of temperature %g, as its tokens. If it is a vLLM "
    "without --logprobs-mode processed_logprobs they are not, and training goes in a wrong direction"
)


MUST_BE_SAID = (
    ". The logprobs of %s are those at the temperature that it sampled at: unless that is the same, every ratio is wrong. Give "
    "that temperature as --temperature, or let the environment send sampling_params"
)


@dataclass(frozen=True)
class SamplerLogprobs:
    """The kinds of logprobs that the vLLM servers return.

    Attributes:
        raw: addresses of those whose logprobs are before any temperature.
        unknown: addresses of servers that could not be asked.
        processed: of those whose logprobs are of the distribution that they sample from, at its
            temperature.
    """

    raw: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    processed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingRules:
    """Rules for the sampling parameters of training data.

    Attributes:
        allow_narrowed: sequences too that parameters of IDLE changed the distribution of.
        deterministic: the trainer computes at temperature 1 alone.
        servers: where sequences may be from.
    """

    allow_narrowed: bool = False
    deterministic: bool = False
    servers: SamplerLogprobs = field(default_factory=SamplerLogprobs)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a sequence.

    Attributes:
        temperatures: [sampled] float32; None if unknown.
        max_tokens: limit of the last request; None if unknown.
        narrowed: parameters that changed the distribution otherwise, as "top_p 0.9".
    """

    temperatures: npt.NDArray[np.float32] | None = None
    max_tokens: int | None = None
    narrowed: tuple[str, ...] = ()

    def last_temperatures(self, count: int) -> npt.NDArray[np.float32] | None:
        """Return the temperatures of the last sampled tokens; None if they are unknown."""
        if self.temperatures is None:
            return None
        return self.temperatures[len(self.temperatures) - count :]


def sampling_of(entry: Any, sequence: int, sampled: int, rules: SamplingRules) -> Sampling:
    """Read a sequence's entry of `sampling_params`.

    Args:
        entry: None if unknown.
        sequence: its number in the group, for messages.
        sampled: its sampled tokens.

    Raises:
        GroupError: it is not such an entry, or must not be trained on.
    """
    if entry is None:
        return Sampling()
    where = f"sampling_params[{sequence}]"
    spans = entry if isinstance(entry, list) else [entry]
    if not spans or not all(isinstance(span, Mapping) for span in spans):
        raise GroupError(
            f"{where} is not an object of numbers, nor a list of such: {str(entry)[:80]}"
        )
    numbers = [
        {
            name: _number(span, name, where)
            for name in (*IDLE, "temperature", "max_tokens", "tokens")
        }
        for span in spans
    ]
    temperatures = [span["temperature"] for span in numbers]
    counts = (
        [sampled] if not isinstance(entry, list) else [int(span["tokens"] or 0) for span in numbers]
    )
    if min(counts) < 0:
        raise GroupError(f"{where} has parts of {counts} tokens, but none can have fewer than 0")
    if sum(counts) != sampled:
        # An environment may train on fewer tokens than were sampled; which ones, only their
        # temperatures ask.
        if len(set(temperatures)) > 1:
            raise GroupError(
                f"{where} has parts of {counts} tokens, at different temperatures, and the mask "
                f"leaves {sampled} that are not -100. Parts must add up to these, so leave out "
                "the parts of masked turns"
            )
        temperatures, counts = temperatures[:1], [sampled]
    for temperature in temperatures:
        _require_usable(temperature, sequence, rules)
    narrowed = {
        f"{name} {span[name]:g}"
        for span in numbers
        for name, idle in IDLE.items()
        if span[name] not in (None, *idle)
    }
    if narrowed and not rules.allow_narrowed:
        raise GroupError(
            f"sequence {sequence} was sampled with {', '.join(sorted(narrowed))}, which training knows nothing of: sample "
            "without, or give --allow-truncated-sampling"
        )
    said = [temperature for temperature in temperatures if temperature is not None]
    return Sampling(
        np.repeat(np.array(said, dtype=np.float32), counts) if len(said) == len(counts) else None,
        None if numbers[-1]["max_tokens"] is None else int(numbers[-1]["max_tokens"]),
        tuple(sorted(narrowed)),
    )


def _number(span: Mapping[str, Any], name: str, where: str) -> float | None:
    value = span.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (name != "temperature" and not math.isfinite(value))
    ):
        raise GroupError(f"{where} has {name} {value!r:.40}, which is not a finite number")
    return float(value)


def _require_usable(temperature: float | None, sequence: int, rules: SamplingRules) -> None:
    if temperature is None or temperature == 1.0:
        return
    what = f"sequence {sequence} was sampled at temperature {temperature:g}"
    if not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
        how = ", greedily" if 0 <= temperature < LEAST_TEMPERATURE else ""
        raise GroupError(
            f"{what}{how}, which is not a distribution to learn from. Let the environment sample "
            f"training data at a temperature of at least {LEAST_TEMPERATURE:g}, and send no "
            "evaluations"
        )
    if rules.deterministic:
        raise GroupError(
            f"{what}, and --deterministic computes at 1 alone: let the environment sample at temperature 1"
        )
    if rules.servers.raw:
        raise GroupError(
            f"{what}, but the logprobs of {rules.servers.raw[0]} are those before any temperature "
            "(raw_logprobs), so that training would go in a wrong direction. Start the server "
            "with --logprobs-mode processed_logprobs, or let the environment sample at "
            "temperature 1"
        )


def number_rows(
    group: Mapping[str, Any],
    name: str,
    kind: type[np.int64] | type[np.float32],
    count: int | None = None,
) -> list[npt.NDArray[Any]]:
    """Read numbers for each token of each sequence.

    Args:
        count: sequences of the group; None if this field decides it.

    Raises:
        GroupError: there are none, or something else.
    """
    value = group.get(name)
    if not isinstance(value, list) or not value:
        raise GroupError(f"{name} is missing or empty")
    try:
        # Callers refuse infinities where they matter, with the place.
        with np.errstate(over="ignore", invalid="ignore"):
            read = _whole_numbers if kind is np.int64 else partial(np.asarray, dtype=kind)
            numbers = [read(row) for row in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} is not a list of lists of numbers ({error})") from error
    if any(row.ndim != 1 for row in numbers):
        raise GroupError(f"{name} is not a list of lists of numbers")
    if count is not None and len(numbers) != count:
        raise GroupError(f"{name} has {len(numbers)} sequences, tokens has {count}")
    return numbers


def _whole_numbers(row: Any) -> npt.NDArray[np.int64]:
    """Read a row of int64. numpy itself would cut 1.5 down to 1, and take "12" for 12."""
    given = np.asarray(row)
    numbers = given.astype(np.int64) if given.dtype.kind in "iuf" else given
    if not np.array_equal(numbers, given) or numbers.dtype != np.int64:
        raise ValueError("one of them is not a whole number")
    return numbers


def token_rows(
    group: Mapping[str, Any], count: int, unread: Container[str] = ()
) -> dict[str, list[npt.NDArray[Any]]]:
    """Read the fields of TOKEN_FIELDS that a group brings along as one number for each token.

    Args:
        count: sequences of the group.
        unread: names of fields to pass over.

    Returns:
        By the field's name: for each sequence, a number for each of its tokens.

    Raises:
        GroupError: one of them is not numbers for each sequence.
    """
    return {
        name: number_rows(group, field.wire, field.dtype, count)
        for name, field in TOKEN_FIELDS.items()
        if field.wire and name not in unread and group.get(field.wire)
    }


def at_positions(
    rows_of: Mapping[str, Sequence[npt.NDArray[Any]]],
    i: int,
    length: int,
    positions: npt.NDArray[np.int64],
) -> dict[str, npt.NDArray[Any] | None]:
    """Return the numbers of sequence `i` that `token_rows` read, at its trained tokens.

    Args:
        length: tokens of the sequence.
        positions: [n] which of them are trained.

    Raises:
        GroupError: see at_trained.
    """
    return {name: at_trained(name, rows[i], i, length, positions) for name, rows in rows_of.items()}


def at_trained(
    name: str, row: npt.NDArray[Any], i: int, length: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Return the numbers of a sequence's trained tokens, placeholders replaced by the fill value.

    Args:
        name: of the field in TOKEN_FIELDS.
        row: its numbers for sequence `i`.
        length: tokens of the sequence.
        positions: [n] which of them are trained.

    Raises:
        GroupError: the row is not as long as the sequence, or holds what is not a number.
    """
    field = TOKEN_FIELDS[name]
    if len(row) != length:
        raise GroupError(f"{field.wire}[{i}] has {len(row)} entries, tokens[{i}] has {length}")
    trained = row[positions]
    if not np.isfinite(trained).all():
        raise GroupError(f"{field.wire}[{i}] holds NaN or infinity at a trained position")
    if field.largest is None:
        return trained
    return np.where(trained > field.largest, field.dtype(field.fill), trained)


def wire_row(
    length: int, positions: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
) -> list[float]:
    """Return a sequence's row of logprobs for the wire: floats that are these float32 numbers
    exactly, as JSON then writes them.

    Args:
        length: tokens of the sequence.
        positions: [n] which of them have a logprob.
        logprobs: [n] float32.
    """
    row = np.full(length, PROMPT_LOGPROB, dtype=np.float64)
    row[positions] = logprobs
    values: list[float] = row.tolist()
    return values


def per_sequence(group: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return one entry for each sequence, None where it is unknown.

    Raises:
        GroupError: there are more or fewer.
    """
    values = group.get(name) or [None] * count
    if not isinstance(values, list):
        if isinstance(GROUP_FIELDS[name], NullWhereUnknown):
            return [None] * count
        raise GroupError(f"{name} has no entries, tokens has {count} sequences")
    if len(values) != count:
        raise GroupError(f"{name} has {len(values)} entries, tokens has {count} sequences")
    return values


def optional_ints(group: Mapping[str, Any], name: str, count: int) -> list[int | None]:
    """One number for each sequence, None where there is none.

    Raises:
        GroupError: there are more or fewer, or something else.
    """
    values = per_sequence(group, name, count)
    try:
        return [None if value is None else int(np.int64(int(value))) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise GroupError(f"{name} holds something that is not a number ({error!s:.80})") from error


def read_words(group: Mapping[str, Any], name: str, count: int) -> list[str | None]:
    """Return one word for each sequence, None where there is none.

    Raises:
        GroupError: there are more or fewer.
    """
    values = per_sequence(group, name, count)
    return [None if value is None else str(value) for value in values]


def read_truths(group: Mapping[str, Any], name: str, count: int) -> list[bool | None]:
    """Return true or false for each sequence, None where there is neither.

    Raises:
        GroupError: there are more or fewer.
    """
    values = per_sequence(group, name, count)
    return [value if isinstance(value, bool) else None for value in values]


def read_scores(group: Mapping[str, Any], count: int) -> list[float]:
    """The environment's reward of each sequence.

    Raises:
        GroupError: there is not one finite number for each, or one is too large to compute with.
    """
    values = group.get("scores")
    if not isinstance(values, list):
        raise GroupError(f"scores has no entries, tokens has {count} sequences")
    if len(values) != count:
        raise GroupError(f"scores has {len(values)} entries, tokens has {count} sequences")
    if any(
        isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)
        for score in values
    ):
        raise GroupError(f"scores holds something that is not a finite number: {values!s:.200}")
    if (beyond := first_beyond(values, LARGEST_SCORE)) is not None:
        raise GroupError(
            f"scores[{beyond}] is {values[beyond]:g}: its magnitude must be at most {LARGEST_SCORE:g}"
        )
    return [float(score) for score in values]


def own_advantages(
    group: Mapping[str, Any], lengths: Sequence[int]
) -> list[npt.NDArray[np.float32]] | None:
    """The advantages that a group brings along, one for each token of each sequence; None if it
    brings none.

    Raises:
        GroupError: they are neither a number for each sequence nor one for each of its tokens, or
            too large to compute with.
    """
    values = group.get("advantages")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(lengths):
        raise GroupError(f"advantages does not have one entry for each of {len(lengths)} sequences")
    advantages = []
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        try:
            with np.errstate(over="ignore"):  # an infinity is refused below
                row = np.asarray(value, dtype=np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise GroupError(
                f"advantages[{i}] is neither a number nor a list of numbers"
            ) from error
        if row.shape in ((), (1,)):
            row = np.full(length, row.item(), dtype=np.float32)
        if row.shape != (length,) or not np.isfinite(row).all():
            raise GroupError(
                f"advantages[{i}] is neither a finite number nor {length} of them, one per token"
            )
        if len(row) and (largest := float(np.abs(row).max())) > LARGEST_SCORE:
            raise GroupError(
                f"advantages[{i}] holds {largest:g}: its magnitude must be at most {LARGEST_SCORE:g}"
            )
        advantages.append(row)
    return advantages


def read_zeroed(group: Mapping[str, Any], count: int, ignored: set[str]) -> list[bool]:
    """Which sequences an override sets to advantage 0. Names of overrides that mean nothing here
    are added to `ignored`.

    Raises:
        GroupError: there is not one object for each sequence, or none for the group.
    """
    overrides = [one or {} for one in per_sequence(group, "overrides", count)]
    whole = group.get("group_overrides") or {}
    for name, one in [
        ("group_overrides", whole),
        *((f"overrides[{i}]", one) for i, one in enumerate(overrides)),
    ]:
        if not isinstance(one, Mapping):
            raise GroupError(f"{name} is not an object: {one!r:.80}")
        ignored.update(set(one) - {"set_advantage_to_zero"})
    return [
        bool(whole.get("set_advantage_to_zero") or one.get("set_advantage_to_zero"))
        for one in overrides
    ]


# Treatment of answers that ran into their limit, and of sequences that are too long for the
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
            on, and in the baseline of the others. Or every answer is penalised for coming near its
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
        """Return whether scores fall with the length of answers."""
        return self.truncated_answers == "penalise"

    def penalty(self, tokens: int, limit: int) -> float:
        """Return the number that is added to the score of an answer, 0 or less.

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
        fields: [trained] each, by their names in TOKEN_FIELDS; unknown fields are left out.
            `sequence[name]` is one of them, or its fill values.
        score: the reward, as the environment gave it.
        weight_version: of the oldest weights that any of its tokens was sampled under; None if
            unknown.
        order: place in the batch (group, sequence within the group), which settles ties.
        weight_epoch: of the trainer that made the weights; None if unknown. See ages.
        finish_reason: why the sampler ended it, "length" where it ran into its limit; None if
            unknown.
        success: whether it solved its item, independent of its score; None if unknown.
        env_id: the rollout service's number for the environment that it is from; None if unknown.
        sampled: how many tokens of it were sampled, trained or not; not given: as many as are
            trained.
        routed: [length, choices] int16, see ReplayedRouters; None without them.
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
    routed: npt.NDArray[np.int16] | None = None

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
class ReplayedRouters:
    """The routers of a mixture whose choices a group brings along.

    Attributes:
        layers: of the model, those without experts included.
        sparse: numbers of the layers that have experts.
        experts: of such a layer.
        count: experts of a token.
    """

    layers: int
    sparse: tuple[int, ...]
    experts: int
    count: int

    def read(self, word: Any, sequence: int, length: int) -> npt.NDArray[np.int16]:
        """Return the experts [length, layers that have some · count] of a sequence's tokens; the
        last token has none, and -1 in their place.

        Args:
            word: the sequence's entry of `routed_experts`.
            sequence: its number in the group.
            length: its tokens.

        Raises:
            GroupError: they are missing, of other tokens, or of another model.
        """
        where = f"routed_experts[{sequence}]"
        if word is None:
            raise GroupError(
                f"{where} is missing, and --router-replay needs it: start vLLM with "
                "--enable-return-routed-experts, and post what /generate answers"
            )
        try:
            experts = from_wire(word)
        except ExpertsError as error:
            raise GroupError(f"{where}: {error}") from error
        expected = (length - 1, self.layers, self.count)
        if experts.shape != expected:
            raise GroupError(
                f"{where} has [tokens, layers, experts] {list(experts.shape)}, and {list(expected)} "
                f"fit a sequence of {length} tokens"
            )
        chosen = experts[:, list(self.sparse)]
        if chosen.size and int(chosen.max()) >= self.experts:
            raise GroupError(
                f"{where} has expert {chosen.max()}, and a layer has {self.experts} experts"
            )
        if (np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any():
            raise GroupError(f"{where} has an expert twice for one token of a layer")
        rows = np.full((length, len(self.sparse) * self.count), -1, dtype=np.int16)
        rows[:-1] = chosen.reshape(length - 1, -1)
        return rows


@dataclass(frozen=True)
class Rules:
    """Rules for reading groups.

    Attributes:
        advantages: see algorithm.advantages; a group's scores may make other advantages by
            themselves than as part of a batch.
        lengths, sampling: see there.
        teacher: whether a teacher's logprobs are read.
        reference: whether a reference's logprobs are read; if they are required, a group without
            them is left out.
        media_tokens: ids that stand for images, sounds or films, which no model sees here.
        routers: whose choices are read; None: none are.
    """

    advantages: Advantages = field(default_factory=lambda: find_advantages("group"))
    lengths: LengthRules = field(default_factory=LengthRules)
    sampling: SamplingRules = field(default_factory=SamplingRules)
    teacher: bool = False
    reference: Literal["unused", "optional", "required"] = "unused"
    media_tokens: frozenset[int] = frozenset()
    routers: ReplayedRouters | None = None


@dataclass
class Batch:
    """The rollouts of one optimizer step.

    Attributes:
        sequences: all rollouts of all valid groups, in the order in which they came, but for
            dropped
            ones.
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
        """Return each sequence's age in weight versions, in a run of these sessions. Sequences
        without a version are left out.
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
        scores: what advantages are made of: the environment's scores, less penalties.
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
    replace the computed ones. The override `set_advantage_to_zero`, for a sequence or
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
        batch: collects what is passed over.
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
        tokens = number_rows(group, "tokens", np.int64)
        count = len(tokens)
        scores = read_scores(group, count)
        masks = number_rows(group, "masks", np.int64, count)
        rows = token_rows(group, count, self._unread)
        versions, epochs = (
            optional_ints(group, f"weight_{name}", count) for name in ("versions", "epochs")
        )
        own = own_advantages(group, [len(row) for row in tokens])
        zeroed = read_zeroed(group, count, self.batch.ignored_overrides)
        params = per_sequence(group, "sampling_params", count)
        reasons = read_words(group, "finish_reasons", count)
        successes = read_truths(group, "successes", count)
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
            trained = at_positions(rows, i, len(row), positions)
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
                routed=self._routed(group, i, len(row)),
            )
            self._require_reference(sequence)
            sequences.append(sequence)
            shaped.append(scores[i] + self._penalty(sequence, sampling, own is not None))
        # Only now: a group that is not valid counts in no figure.
        self.batch.unusable_spans += unusable
        self.batch.narrowed |= narrowed
        if "rollout_logprobs" in rows:
            missing = (np.isnan(sequence["rollout_logprobs"]).sum() for sequence in sequences)
            self.batch.no_logprobs += int(sum(missing))
        self.batch.unpenalised += self.rules.lengths.penalises and own is not None
        masked = list(map(self._is_masked, sequences))
        return self._without_long(_Group(sequences, shaped, own, zeroed, masked))

    def _routed(
        self, group: Mapping[str, Any], i: int, length: int
    ) -> npt.NDArray[np.int16] | None:
        if self.rules.routers is None:
            return None
        words = per_sequence(group, "routed_experts", len(group["tokens"]))
        return self.rules.routers.read(words[i], i, length)

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
        media = self.rules.media_tokens.intersection(row.tolist())
        if media:
            raise GroupError(
                f"tokens[{i}] holds {min(media)}, which stands for an image, a sound or a film, and the trainer sees text "
                "alone; leave them out of prompts"
            )

    def _penalty(self, sequence: TrainedSequence, sampling: Sampling, has_own: bool) -> float:
        """Return the penalty of the last answer: the sampled tokens after the last masked one."""
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
