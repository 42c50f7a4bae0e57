"""What one request for tokens gave back, and a record of what a rollout was sampled under and how."""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.inference.sampling_record import SampledRecord, Sampling, SamplingSpan


class Weights(NamedTuple):
    """The weights that a token was sampled under; tuples compare in the order in which weights were
    served.

    Attributes:
        epoch: the life of the trainer that made them: unix time of its start in milliseconds; 0 for
            those of the checkpoint that the server loaded, and where a server does not say.
        version: optimizer steps. Within one life it only grows; a trainer that resumes goes back to
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
            was sampled under; None where the server does not say.
        weight_epochs: per completion, the epoch of those weights; None where the server does not
            say.
        weight_spans: per completion, the weights of all its tokens in their order; None where the
            server does not say.
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
    """Pair versions with their epochs. None without versions; an epoch that nobody told is 0.

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
    """The spans of each completion, from what `/generate` answers: [[version, tokens], …] and
    [epoch, …] for each.

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
    """Spans that follow each other as one list: without empty ones, and those of the same weights
    side by side as one.
    """
    spans: list[Span] = []
    for span in (span for part in parts for span in part if span.tokens):
        if spans and spans[-1].weights == span.weights:
            span = Span(span.weights, spans.pop().tokens + span.tokens)
        spans.append(span)
    return spans


def weight_fields(
    weights: Iterable[Weights], spans: Iterable[Sequence[Span] | None] = ()
) -> dict[str, list[Any]]:
    """The fields of a group that tell the weights of each sequence.

    Args:
        weights: the oldest of each sequence.
        spans: of each sequence, over its sampled tokens. Where they are not known for all of them,
            the group says none.

    Returns:
        no epochs where no server told any.
    """
    weights = list(weights)
    fields: dict[str, list[Any]] = {"weight_versions": [version for _, version in weights]}
    with_epochs = any(epoch for epoch, _ in weights)
    if with_epochs:
        fields["weight_epochs"] = [epoch for epoch, _ in weights]
    known = [row for row in spans if row is not None]
    if weights and len(known) == len(weights):
        fields["weight_version_spans"] = [
            [[span.weights.version, span.tokens] for span in row] for row in known
        ]
        if with_epochs or any(span.weights.epoch for row in known for span in row):
            fields["weight_epoch_spans"] = [[span.weights.epoch for span in row] for row in known]
    return fields


@dataclass
class VersionRecord:
    """The weights that the requests of one rollout met, and what they sampled.

    An environment that builds its groups by hand need not carry versions along: the oldest weights
    met during the rollout are a true bound for every sequence in it.

    Attributes:
        sampled: None where nothing is trained on, as in an evaluation.
    """

    oldest_weights: Weights | None = None
    newest_weights: Weights | None = None
    sampled: SampledRecord | None = field(default_factory=SampledRecord)

    @property
    def oldest(self) -> int | None:
        """The version of the weights that were served first."""
        return None if self.oldest_weights is None else self.oldest_weights.version

    @property
    def newest(self) -> int | None:
        """The version of the weights that were served last."""
        return None if self.newest_weights is None else self.newest_weights.version

    def note(
        self, versions: Sequence[int] | None, epochs: Sequence[int | None] | None = None
    ) -> None:
        """What a request met: a version for each completion, and their epochs where the server
        tells them.
        """
        for weights in weights_of(versions, epochs) or ():
            self.oldest_weights = min(self.oldest_weights or weights, weights)
            self.newest_weights = max(self.newest_weights or weights, weights)

    def note_generation(self, generation: Generation, training: bool = True) -> None:
        """The answer to a request.

        `training`: it may be trained on, which what was asked for an evaluation is not.
        """
        self.note(generation.weight_versions, generation.weight_epochs)
        if self.sampled is None or not training:
            return
        outputs = generation.output_tokens
        spans: list[list[SamplingSpan] | None] = [None] * len(outputs)
        if generation.sampling is not None:
            parameters = zip(generation.sampling, outputs, strict=True)
            spans = [[SamplingSpan(how, len(output))] for how, output in parameters]
        self.sampled.note(generation.prompt_tokens, outputs, spans, generation.finish_reasons)


# Set around each rollout; tasks that the rollout starts inherit it.
current_versions: ContextVar[VersionRecord | None] = ContextVar("current_versions", default=None)
