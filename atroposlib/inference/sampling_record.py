"""From which distribution tokens were sampled: what a request asked for, and how groups tell it to
the trainer.

What is neutral (`NEUTRAL`) is left out, so that parameters that hold only a temperature say that
nothing else changed the distribution.
"""

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

from atroposlib.wire.groups import PROMPT_MASK
from atroposlib.wire.sampling_parameters import CONSTRAINED, NEUTRAL

logger = logging.getLogger(__name__)

Sampling = dict[str, float | int]
"""Parameters of one request by name: `temperature`, what of `NEUTRAL` was not neutral,
`CONSTRAINED`, and `max_tokens` where it was sent."""

WHOLE = ("top_k", "min_tokens", "max_tokens")
ALIASES = {
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Other interfaces' names for parameters of `Sampling`."""

HARMLESS = frozenset(
    {
        *(
            "model",
            "prompt",
            "input_ids",
            "n",
            "split",
            "seed",
            "sampling_seed",
            "user",
            "request_id",
            "priority",
            "rid",
        ),
        *(
            "stop",
            "stop_token_ids",
            "stop_regex",
            "include_stop_str_in_output",
            "no_stop_trim",
            "ignore_eos",
        ),
        *(
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
            "return_text",
            "echo",
        ),
        *(
            "logprobs",
            "top_logprobs",
            "token_logprobs",
            "prompt_logprobs",
            "prompt_token_logprobs",
            "flat_logprobs",
        ),
        *(
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "return_token_ids",
            "return_tokens_as_token_ids",
        ),
        *(
            "stream",
            "stream_options",
            "stream_interval",
            "output_kind",
            "cache_salt",
            "add_special_tokens",
            "timeout",
        ),
    }
)
"""Fields of requests that leave the distribution of each token as it is. What else a request has (a
grammar, biases, allowed or forbidden words, the best of several answers) may change it:
`CONSTRAINED` counts such fields."""


class SamplingSpan(NamedTuple):
    """Consecutive sampled tokens of one sequence that were sampled with the same parameters,
    whatever their `max_tokens`.
    """

    parameters: Sampling
    tokens: int


def sampling_of(
    request: Mapping[str, Any], completions: int, temperature: float | None = None
) -> list[Sampling] | None:
    """The parameters that each completion of a request was sampled with.

    Args:
        request: its fields by the names of `Sampling` or of `ALIASES`; None counts as not given. Of
            the others, those that are not `HARMLESS` and hold something are counted as
            `CONSTRAINED`, and named in the log once.
        completions: how many there are.
        temperature: what the server takes for a request that names none; None where that is not
            known.

    Returns:
        None where the temperature is not known.
    """
    parameters = {
        ALIASES.get(name, name): value for name, value in request.items() if value is not None
    }
    warmth = parameters.get("temperature", temperature)
    if warmth is None:
        return None
    sampling: Sampling = {"temperature": float(warmth)}
    for name in (*NEUTRAL, "max_tokens"):
        if name in parameters and float(parameters[name]) not in NEUTRAL.get(name, ()):
            sampling[name] = int(parameters[name]) if name in WHOLE else float(parameters[name])
    own = {"temperature", "max_tokens", *NEUTRAL}
    # Empty as {} and False: asked for, and nothing is.
    strange = sorted(
        name
        for name, value in parameters.items()
        if name not in HARMLESS | own and has_something(value)
    )
    if strange:
        say_that_it_may_be_constrained(tuple(strange))
        sampling[CONSTRAINED] = len(strange)
    return [sampling] * completions


def has_something(value: Any) -> bool:
    """Return whether a field asks for anything: not {}, [], "" or False."""
    return bool(value) or (isinstance(value, int | float) and not isinstance(value, bool))


@cache
def say_that_it_may_be_constrained(names: tuple[str, ...]) -> None:
    """Once for each of them."""
    logger.warning(
        "requests for tokens to train on have %s, which is not known to leave the distribution as it is: their groups say "
        "%s, and the trainer leaves them out without --allow-truncated-sampling. This is said once",
        ", ".join(names),
        CONSTRAINED,
    )


def same_distribution(one: Sampling, other: Sampling) -> bool:
    """Return whether the two say the same but for `max_tokens`, which only ends an answer."""
    return {**one, "max_tokens": 0} == {**other, "max_tokens": 0}


def continued(
    before: Iterable[SamplingSpan] | None, parameters: Sampling | None, tokens: int
) -> list[SamplingSpan] | None:
    """The spans of a sequence after another turn; None where a turn's parameters are not known.

    Turns of the same distribution are one span, with the `max_tokens` of the last of them.
    """
    if before is None or parameters is None:
        return None
    spans = list(before)
    if spans and same_distribution(spans[-1].parameters, parameters):
        tokens += spans.pop().tokens
    return [*spans, SamplingSpan(parameters, tokens)]


def on_the_wire(spans: Sequence[SamplingSpan]) -> Sampling | list[Sampling]:
    """A sequence's entry of a group's `sampling_params`: one object where all of its tokens were
    sampled alike, else one for each span, with the span's `tokens`."""
    if len(spans) == 1:
        return dict(spans[0].parameters)
    return [{**span.parameters, "tokens": span.tokens} for span in spans]


class Place(NamedTuple):
    """How far a sequence goes, and which tokens it has up to there, without the tokens themselves."""

    tokens: int
    digest: bytes


class Prefix:
    """The places along one sequence of token ids, read once from its beginning to its end."""

    def __init__(self) -> None:
        self._tokens, self._hash = 0, blake2b(digest_size=16)

    def goes_on(self, tokens: Sequence[int]) -> Place:
        """The place after these tokens too.

        Raises:
            TypeError, OverflowError: they are no token ids.
        """
        self._hash.update(array("q", tokens).tobytes())
        self._tokens += len(tokens)
        return Place(self._tokens, self._hash.digest())

    def branch(self) -> "Prefix":
        """One that goes on from here by itself."""
        other = Prefix()
        other._tokens, other._hash = self._tokens, self._hash.copy()
        return other


class Sampled(NamedTuple):
    """A sequence that was sampled, as far as one request knows it. A rollout makes many requests,
    each with the whole conversation before it, so that tokens are not kept.

    Attributes:
        prompt: where what was given ended. Some of it may have been sampled by an earlier request.
        whole: where the sequence ended.
        sampling: with which parameters the sampled tokens between the two were; None where that is
            not known.
        finish_reason: why its sampling ended; None where that is not known.
    """

    prompt: Place
    whole: Place
    sampling: list[SamplingSpan] | None
    finish_reason: str | None


class SampledRecord:
    """What the requests of one rollout sampled. An environment that builds its groups by hand need
    not carry along how: its sequences are known again by their tokens."""

    def __init__(self) -> None:
        self._known: dict[Place, list[Sampled]] = {}
        """By `whole`. Equal ones are one."""

    def note(
        self,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        sampling: Sequence[list[SamplingSpan] | None],
        reasons: Sequence[str | None],
    ) -> None:
        """Record one request's completions of a prompt."""
        prefix = Prefix()
        begin = prefix.goes_on(prompt)
        for output, how, reason in zip(outputs, sampling, reasons, strict=True):
            sampled = Sampled(begin, prefix.branch().goes_on(output), how, reason)
            known = self._known.setdefault(sampled.whole, [])
            if sampled not in known:
                known.append(sampled)

    @property
    def sequences(self) -> list[Sampled]:
        """All that differ, in the order in which they were noted first."""
        return [sampled for known in self._known.values() for sampled in known]

    def fields_of(
        self, tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> dict[str, list[Any]]:
        """`sampling_params` and `finish_reasons` of a group, None for a sequence of which it is not
        known; each only where it is known of one.

        Args:
            tokens, masks: of the group, [n][length].
        """
        sequences = self.sequences
        lengths = {
            place.tokens for sampled in sequences for place in (sampled.prompt, sampled.whole)
        }
        told = [
            self._told(sequences, places_of(row, lengths), mask)
            for row, mask in zip(tokens, masks, strict=True)
        ]
        fields: dict[str, list[Any]] = {
            "sampling_params": [how for how, _ in told],
            "finish_reasons": [reason for _, reason in told],
        }
        return {
            name: values
            for name, values in fields.items()
            if any(value is not None for value in values)
        }

    @staticmethod
    def _told(
        sequences: Iterable[Sampled], places: Mapping[int, Place], mask: Sequence[int]
    ) -> tuple[Sampling | list[Sampling] | None, str | None]:
        """How a sequence with these places was sampled, and why its sampling ended; None for what
        is not known.

        Of one that is not token for token what a request gave back, or is trained on what earlier
        requests sampled: what the requests say whose prompt it begins with, if they say the same.
        Requests of another conversation, as of a judge, say nothing of it.
        """
        near = [
            sampled for sampled in sequences if places.get(sampled.prompt.tokens) == sampled.prompt
        ]
        met = [
            sampled
            for sampled in near
            if sampled.whole.tokens == len(mask) and places.get(len(mask)) == sampled.whole
        ]
        reason = only([sampled.finish_reason for sampled in met])
        whole = [
            sampled
            for sampled in met
            if all(token == PROMPT_MASK for token in mask[: sampled.prompt.tokens])
        ]
        spans = only([sampled.sampling for sampled in whole])
        if spans:
            return on_the_wire(spans), reason
        return common_of(
            [sampled for sampled in near if sampled.prompt.tokens or sampled in met]
        ), reason

    @property
    def differ(self) -> bool:
        """Return whether the requests sampled from different distributions."""
        parameters = [
            span.parameters for sampled in self.sequences for span in sampled.sampling or []
        ]
        return not all(same_distribution(parameters[0], other) for other in parameters)


def places_of(tokens: Sequence[int], lengths: Iterable[int]) -> dict[int, Place]:
    """A sequence's places at these lengths, by length; none beyond its end, and none of what are no
    token ids.
    """
    prefix, begin, places = Prefix(), 0, {}
    try:
        for end in sorted(length for length in lengths if length <= len(tokens)):
            places[end] = prefix.goes_on([*tokens[begin:end]])
            begin = end
    except (TypeError, OverflowError):  # the checks of the group's shape say what is wrong with it
        return {}
    return places


def common_of(sequences: Sequence[Sampled]) -> Sampling | None:
    """The parameters of all of them, where they differ in `max_tokens` at most; None where one is
    not known.
    """
    if not sequences or any(sampled.sampling is None for sampled in sequences):
        return None
    parameters = [span.parameters for sampled in sequences for span in sampled.sampling or []]
    if not parameters or not all(same_distribution(parameters[0], other) for other in parameters):
        return None
    limit = only([entry.get("max_tokens") for entry in parameters])
    return {
        name: value
        for name, value in parameters[0].items()
        if name != "max_tokens" or limit is not None
    }


def only(values: Sequence[Any]) -> Any:
    """The value that all of them are; None where they differ, or where there is none."""
    return values[0] if values and all(value == values[0] for value in values) else None
