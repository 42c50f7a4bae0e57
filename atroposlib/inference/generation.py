"""The answer to a request for tokens, and a record of the weights and parameters of a rollout."""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.inference.sampling_record import SampledRecord, Sampling, SamplingSpan


class Weights(NamedTuple):
    """The weights that a token was sampled under.

    Tuples compare in the order in which weights were served.

    Attributes:
        epoch: unix time of the start of the trainer that made them, in milliseconds; 0 for the
            weights of the checkpoint that the server loaded, and if the server reports none.
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

    An environment that builds its groups by hand need not carry versions along: the oldest weights
    met during the rollout are a true bound for every sequence in it.

    Attributes:
        sampled: None where nothing is trained on, as in an evaluation.
    """

    oldest_weights: Weights | None = None
    sampled: SampledRecord | None = field(default_factory=SampledRecord)

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
        outputs = generation.output_tokens
        spans: list[list[SamplingSpan] | None] = [None] * len(outputs)
        if generation.sampling is not None:
            parameters = zip(generation.sampling, outputs, strict=True)
            spans = [[SamplingSpan(sampling, len(output))] for sampling, output in parameters]
        self.sampled.note(generation.prompt_tokens, outputs, spans, generation.finish_reasons)


# Set around each rollout; tasks that the rollout starts inherit it.
current_versions: ContextVar[VersionRecord | None] = ContextVar("current_versions", default=None)
