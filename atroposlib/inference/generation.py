"""The answer to a request for tokens, and the weights and parameters that sampled it.

`Generation` holds token ids, logprobs and weights of the completions of one prompt. `Sampling`
holds the parameters of a request, and goes to the trainer with a group. Neutral values (`NEUTRAL`)
are left out: if the parameters hold only a temperature, nothing else changed the distribution.
`VersionRecord` collects both for one rollout.
"""

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

from atroposlib.wire import CONSTRAINED, NEUTRAL, PROMPT_MASK

logger = logging.getLogger(__name__)

Sampling = dict[str, float | int]
"""Parameters of one request by name: `temperature`, parameters of `NEUTRAL` that were not neutral,
`CONSTRAINED`, and `max_tokens` where it was sent."""

WHOLE = ("top_k", "min_tokens", "max_tokens")
ALIASES = {
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Other interfaces' names for parameters of `Sampling`."""

NEUTRAL_FIELDS = frozenset(
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
            "routed_experts",
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
"""Fields of requests that do not change the distribution of a token. Any other field (a grammar,
biases, allowed or forbidden words, the best of several answers) may change it: `CONSTRAINED` counts
such fields."""


class SamplingSpan(NamedTuple):
    """Consecutive sampled tokens of one sequence that were sampled with the same parameters,
    whatever their `max_tokens`.
    """

    parameters: Sampling
    tokens: int


def sampling_of(
    request: Mapping[str, Any], completions: int, temperature: float | None = None
) -> list[Sampling] | None:
    """Return the parameters that each completion of a request was sampled with.

    Args:
        request: its fields by the names of `Sampling` or of `ALIASES`; None counts as absent. Other
            fields that are not `NEUTRAL_FIELDS` and not empty are counted as `CONSTRAINED`, and named in
            the log once.
        completions: their number.
        temperature: the server's default; None where that is not known.

    Returns:
        None where the temperature is not known.
    """
    parameters = {
        ALIASES.get(name, name): value for name, value in request.items() if value is not None
    }
    temperature = parameters.get("temperature", temperature)
    if temperature is None:
        return None
    sampling: Sampling = {"temperature": float(temperature)}
    for name in (*NEUTRAL, "max_tokens"):
        if name in parameters and float(parameters[name]) not in NEUTRAL.get(name, ()):
            sampling[name] = (int if name in WHOLE else float)(parameters[name])
    own = {"temperature", "max_tokens", *NEUTRAL}
    # {} and False are values without an effect.
    unusual = sorted(
        name
        for name, value in parameters.items()
        if name not in NEUTRAL_FIELDS | own and has_something(value)
    )
    if unusual:
        say_that_it_may_be_constrained(tuple(unusual))
        sampling[CONSTRAINED] = len(unusual)
    return [sampling] * completions


def has_something(value: Any) -> bool:
    """Return whether a field asks for anything: not {}, [], "" or False."""
    return bool(value) or (isinstance(value, int | float) and not isinstance(value, bool))


@cache
def say_that_it_may_be_constrained(names: tuple[str, ...]) -> None:
    """Warn once for each set of names."""
    logger.warning(
        "requests for tokens to train on have %s, which is not known to leave the distribution "
        "as it is. Their groups carry %s, and the trainer leaves them out without "
        "--allow-truncated-sampling. This is logged once",
        ", ".join(names),
        CONSTRAINED,
    )


def same_distribution(one: Sampling, other: Sampling) -> bool:
    """Return whether two are equal but for `max_tokens`, which only ends an answer."""
    return {**one, "max_tokens": 0} == {**other, "max_tokens": 0}


def continued(
    before: Iterable[SamplingSpan] | None, parameters: Sampling | None, tokens: int
) -> list[SamplingSpan] | None:
    """Return the spans of a sequence after another turn; None if a turn's are not known.

    Turns of the same distribution are one span, with the `max_tokens` of the last of them.
    """
    if before is None or parameters is None:
        return None
    spans = list(before)
    if spans and same_distribution(spans[-1].parameters, parameters):
        tokens += spans.pop().tokens
    return [*spans, SamplingSpan(parameters, tokens)]


def to_wire(spans: Sequence[SamplingSpan]) -> Sampling | list[Sampling]:
    """Return a sequence's entry of a group's `sampling_params`.

    It is one object where all tokens have the same parameters, else one for each span, with the
    span's `tokens`.
    """
    if len(spans) == 1:
        return dict(spans[0].parameters)
    return [{**span.parameters, "tokens": span.tokens} for span in spans]


class PrefixHash(NamedTuple):
    """A position in a sequence and a digest of the tokens before it, in place of the tokens."""

    tokens: int
    digest: bytes


def prefix_hashes(tokens: Sequence[int], lengths: Iterable[int]) -> dict[int, PrefixHash]:
    """Return the places of a sequence at these lengths, by length; none beyond its end.

    Raises:
        TypeError, OverflowError: an entry is not a token id.
    """
    digest, begin, places = blake2b(digest_size=16), 0, {}
    for end in sorted(length for length in lengths if length <= len(tokens)):
        digest.update(array("q", [*tokens[begin:end]]).tobytes())
        places[end] = PrefixHash(end, digest.digest())
        begin = end
    return places


class RecordedSample(NamedTuple):
    """A sequence that one request sampled.

    A rollout makes many requests, each with the whole conversation before it, so the tokens are not
    kept.

    Attributes:
        prompt: end of the prompt. An earlier request may have sampled a part of it.
        whole: end of the sequence.
        sampling: parameters of the sampled tokens between the two; None where they are not known.
        finish_reason: why the sampling ended; None where that is not known.
    """

    prompt: PrefixHash
    whole: PrefixHash
    sampling: list[SamplingSpan] | None
    finish_reason: str | None


class SampledRecord:
    """The sequences that the requests of one rollout sampled.

    An environment that builds its groups by hand need not carry the sampling parameters along: the
    record finds them by the tokens of a sequence.
    """

    def __init__(self) -> None:
        self._by_end: dict[PrefixHash, list[RecordedSample]] = {}
        """By `whole`, without duplicates."""

    def note(
        self,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        sampling: Sequence[list[SamplingSpan] | None],
        reasons: Sequence[str | None],
    ) -> None:
        """Record one request's completions of a prompt."""
        begin = len(prompt)
        for output, spans, reason in zip(outputs, sampling, reasons, strict=True):
            end = begin + len(output)
            places = prefix_hashes([*prompt, *output], (begin, end))
            sampled = RecordedSample(places[begin], places[end], spans, reason)
            same_end = self._by_end.setdefault(sampled.whole, [])
            if sampled not in same_end:
                same_end.append(sampled)

    @property
    def sequences(self) -> list[RecordedSample]:
        """All that differ, in the order in which they were noted first."""
        return [sampled for same_end in self._by_end.values() for sampled in same_end]

    def fields_of(
        self, tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> dict[str, list[Any]]:
        """Return `sampling_params` and `finish_reasons` of a group.

        A field has None for each sequence without a value in the record. It is left out if no
        sequence has a value.

        Args:
            tokens, masks: of the group, [n][length].
        """
        sequences = self.sequences
        lengths = {
            place.tokens for sampled in sequences for place in (sampled.prompt, sampled.whole)
        }
        parameters, reasons = [], []
        for row, mask in zip(tokens, masks, strict=True):
            try:
                places = prefix_hashes(row, lengths)
            except (TypeError, OverflowError):  # the check of the group's shape reports it
                places = {}
            prompts = [
                sampled
                for sampled in sequences
                if places.get(sampled.prompt.tokens) == sampled.prompt
            ]
            whole = places.get(len(mask))
            equal = [sampled for sampled in prompts if sampled.whole == whole]
            parameters.append(parameters_of(prompts, equal, mask))
            reasons.append(single_value([sampled.finish_reason for sampled in equal]))
        fields: dict[str, list[Any]] = {"sampling_params": parameters, "finish_reasons": reasons}
        return {
            name: values
            for name, values in fields.items()
            if any(value is not None for value in values)
        }

    @property
    def differ(self) -> bool:
        """Return whether the requests sampled from different distributions."""
        parameters = [
            span.parameters for sampled in self.sequences for span in sampled.sampling or []
        ]
        return not all(same_distribution(parameters[0], other) for other in parameters)


def parameters_of(
    prompts: Sequence[RecordedSample], equal: Sequence[RecordedSample], mask: Sequence[int]
) -> Sampling | list[Sampling] | None:
    """Return the parameters that a sequence was sampled with; None where they are not known.

    Requests whose whole sequence it is have them, if it trains on nothing that an earlier request
    sampled. Otherwise all requests whose prompt it begins with have them, if their parameters are
    the same. A request of another conversation, such as a judge's, has another prompt.

    Args:
        prompts: sampled sequences whose prompt is a beginning of the sequence.
        equal: samples of `prompts` that are equal to the sequence.
        mask: of the sequence.
    """
    spans = single_value(
        [
            sampled.sampling
            for sampled in equal
            if all(token == PROMPT_MASK for token in mask[: sampled.prompt.tokens])
        ]
    )
    if spans:
        return to_wire(spans)
    return common_of([sampled for sampled in prompts if sampled.prompt.tokens or sampled in equal])


def common_of(sequences: Sequence[RecordedSample]) -> Sampling | None:
    """Return the parameters of all sequences, without `max_tokens` where they differ in it.

    None if they differ in anything else, or if one is not known.
    """
    if not sequences or any(sampled.sampling is None for sampled in sequences):
        return None
    parameters = [span.parameters for sampled in sequences for span in sampled.sampling or []]
    if not parameters or not all(same_distribution(parameters[0], other) for other in parameters):
        return None
    limit = single_value([entry.get("max_tokens") for entry in parameters])
    return {
        name: value
        for name, value in parameters[0].items()
        if name != "max_tokens" or limit is not None
    }


def single_value(values: Sequence[Any]) -> Any:
    """Return the value that all entries have; None if they differ, or if there are none."""
    if values and all(value == values[0] for value in values):
        return values[0]
    return None


class Weights(NamedTuple):
    """The weights that a token was sampled under.

    Tuples compare in the order in which weights were served.

    Attributes:
        epoch: unix time of the start of the trainer that made them, in milliseconds. It is 0 for
            the weights of the checkpoint that the server loaded, and if the server reports none.
        version: optimizer steps. Within an epoch it only grows. A trainer that resumes goes back to
            its checkpoint's.
    """

    epoch: int
    version: int


class Span(NamedTuple):
    """Consecutive sampled tokens of one sequence that were sampled under the same weights."""

    weights: Weights
    tokens: int


@dataclass
class Generation:
    """Completions of one prompt, token for token as the server sampled them.

    Attributes:
        prompt_tokens: token ids that the completions continue.
        output_tokens: [completion][position] sampled token ids, the end token included where one
            was sampled.
        output_logprobs: [completion][position] logprobs of exactly those tokens.
        finish_reasons: "stop" or "length" per completion.
        texts: per completion, as the server decoded it; None where it gave none.
        weight_versions: per completion, the version of the oldest weights that any of its tokens
            was sampled under; None where the server does not report it.
        weight_epochs: per completion, the epoch of these weights; None where the server does not
            report it.
        weight_spans: per completion, the weights of all its tokens in their order; None where the
            server does not report them.
        sampling: per completion, the parameters that it was sampled with; None where they are not
            known.
        routed_experts: per completion, the experts of each token of prompt and completion but the
            last, as one word; None where the server does not answer them. See
            `atroposlib.inference.routed_experts`.
    """

    prompt_tokens: list[int]
    output_tokens: list[list[int]]
    output_logprobs: list[list[float]]
    finish_reasons: list[str]
    texts: list[str] | None = None
    weight_versions: list[int] | None = None
    weight_epochs: list[int] | None = None
    weight_spans: list[list[Span]] | None = None
    sampling: list[Sampling] | None = None
    routed_experts: list[str] | None = None


def weights_of(
    versions: Sequence[int] | None, epochs: Sequence[int | None] | None
) -> list[Weights] | None:
    """Pair versions with their epochs. None without versions; a missing epoch becomes 0.

    Raises:
        ValueError: there is not one epoch for each version.
    """
    if versions is None:
        return None
    if epochs is None:
        epochs = [0] * len(versions)
    return [Weights(epoch or 0, version) for version, epoch in zip(versions, epochs, strict=True)]


def spans_of(
    versions: Sequence[Sequence[Sequence[int]]] | None, epochs: Sequence[Sequence[int]] | None
) -> list[list[Span]] | None:
    """Return the spans of each completion, from the fields of `/generate`.

    Args:
        versions: [[version, tokens], …] of each completion.
        epochs: [epoch, …] of each completion.

    Raises:
        ValueError: there is not one epoch for each span.
    """
    if versions is None:
        return None
    rows = []
    for index, row in enumerate(versions):
        row_epochs = [0] * len(row) if epochs is None else epochs[index]
        rows.append(
            [
                Span(Weights(epoch, version), tokens)
                for (version, tokens), epoch in zip(row, row_epochs, strict=True)
            ]
        )
    return rows


def joined(*parts: Iterable[Span]) -> list[Span]:
    """Concatenate spans. Empty ones are dropped, and neighbours of the same weights become one."""
    spans: list[Span] = []
    for span in (span for part in parts for span in part if span.tokens):
        if spans and spans[-1].weights == span.weights:
            span = Span(span.weights, spans.pop().tokens + span.tokens)
        spans.append(span)
    return spans


def weight_fields(
    weights: Iterable[Weights], spans: Iterable[Sequence[Span] | None] = ()
) -> dict[str, list[Any]]:
    """Return the fields of a group with the weights of each sequence.

    Args:
        weights: the oldest of each sequence.
        spans: of each sequence, over its sampled tokens. They are left out unless every sequence
            has them.

    Returns:
        no epochs if no server reported one.
    """
    weights = list(weights)
    fields: dict[str, list[Any]] = {"weight_versions": [version for _, version in weights]}
    with_epochs = any(epoch for epoch, _ in weights)
    if with_epochs:
        fields["weight_epochs"] = [epoch for epoch, _ in weights]
    rows = [row for row in spans if row is not None]
    if weights and len(rows) == len(weights):
        fields["weight_version_spans"] = [
            [[span.weights.version, span.tokens] for span in row] for row in rows
        ]
        if with_epochs or any(span.weights.epoch for row in rows for span in row):
            fields["weight_epoch_spans"] = [[span.weights.epoch for span in row] for row in rows]
    return fields


@dataclass
class VersionRecord:
    """The weights that the requests of one rollout met, and the sequences that they sampled.

    An environment that builds its groups by hand need not carry versions along. The oldest weights
    met during the rollout are a true bound for every sequence in it.

    Attributes:
        sampled: None where nothing is trained on, as in an evaluation.
        routed: a server answered with the experts of tokens.
    """

    oldest_weights: Weights | None = None
    sampled: SampledRecord | None = field(default_factory=SampledRecord)
    routed: bool = False

    def note(
        self, versions: Sequence[int] | None, epochs: Sequence[int | None] | None = None
    ) -> None:
        """Record the weights of an answer: a version for each completion, and an epoch where the
        server reports it.
        """
        for weights in weights_of(versions, epochs) or ():
            self.oldest_weights = min(self.oldest_weights or weights, weights)

    def note_generation(self, generation: Generation, training: bool = True) -> None:
        """Record the answer to a request.

        `training`: the answer may be trained on. Answers of an evaluation may not.
        """
        self.note(generation.weight_versions, generation.weight_epochs)
        if self.sampled is None or not training:
            return
        self.routed = self.routed or generation.routed_experts is not None
        outputs = generation.output_tokens
        spans: list[list[SamplingSpan] | None] = [None] * len(outputs)
        if generation.sampling is not None:
            parameters = zip(generation.sampling, outputs, strict=True)
            spans = [[SamplingSpan(sampling, len(output))] for sampling, output in parameters]
        self.sampled.note(generation.prompt_tokens, outputs, spans, generation.finish_reasons)


# Set around each rollout; tasks that the rollout starts inherit it.
current_versions: ContextVar[VersionRecord | None] = ContextVar("current_versions", default=None)
