"""From which distribution tokens were sampled: what a request asked for, and how groups tell it to the trainer.

What is neutral (`NEUTRAL`) is left out, so that parameters that hold only a temperature say that nothing else changed the
distribution.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atroposlib.envs.groups import PROMPT_MASK

Sampling = dict[str, float | int]
"""Parameters of one request by name: `temperature`, what of `NEUTRAL` was not neutral, and `max_tokens` where it was sent."""

NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""Parameter -> the values at which it changes nothing. `min_tokens` forbids the end of the answer for so many tokens."""

END = 16
"""Tokens."""
WHOLE = ("top_k", "min_tokens", "max_tokens")


class SamplingSpan(NamedTuple):
    """Consecutive sampled tokens of one sequence that were sampled with the same parameters, whatever their `max_tokens`."""

    parameters: Sampling
    tokens: int


def sampling_of(request: Mapping[str, Any], completions: int, temperature: float | None = None) -> list[Sampling] | None:
    """The parameters that each completion of a request was sampled with.

    Args:
        request: its fields by the names of `Sampling`; others are ignored, and None counts as not given.
        completions: how many there are.
        temperature: what the server takes for a request that names none; None where that is not known.

    Returns:
        None where the temperature is not known.
    """
    asked = {name: value for name, value in request.items() if value is not None}
    warmth = asked.get("temperature", temperature)
    if warmth is None:
        return None
    told: Sampling = {"temperature": float(warmth)}
    for name in (*NEUTRAL, "max_tokens"):
        if name in asked and float(asked[name]) not in NEUTRAL.get(name, ()):
            told[name] = int(asked[name]) if name in WHOLE else float(asked[name])
    return [told] * completions


def same_distribution(one: Sampling, other: Sampling) -> bool:
    """Whether the two say the same but for `max_tokens`, which only ends an answer."""
    return {**one, "max_tokens": 0} == {**other, "max_tokens": 0}


def continued(before: Iterable[SamplingSpan] | None, parameters: Sampling | None, tokens: int) -> list[SamplingSpan] | None:
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
    """A sequence's entry of a group's `sampling_params`: one object where all of its tokens were sampled alike, else one for
    each span, with the span's `tokens`."""
    if len(spans) == 1:
        return dict(spans[0].parameters)
    return [{**span.parameters, "tokens": span.tokens} for span in spans]


class Sampled(NamedTuple):
    """A sequence that was sampled, as far as one request knows it.

    Attributes:
        prompt: token ids that were given. Some may have been sampled by an earlier request.
        output: token ids after those.
        sampling: with which parameters the sampled tokens of `output` were; None where that is not known.
        finish_reason: why its sampling ended; None where that is not known.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    sampling: list[SamplingSpan] | None
    finish_reason: str | None

    @property
    def end(self) -> tuple[int, ...]:
        """What tells most sequences apart; see `end_of`."""
        return end_of([*self.prompt[-END:], *self.output[-END:]], len(self.prompt) + len(self.output))

    def is_of(self, tokens: list[int]) -> bool:
        """Whether these are its tokens."""
        return tokens[len(self.prompt) :] == [*self.output] and tokens[: len(self.prompt)] == [*self.prompt]


def end_of(tokens: Sequence[int], length: int) -> tuple[int, ...]:
    """A sequence's length and last tokens."""
    return (length, *tokens[-END:])


class SampledRecord:
    """What the requests of one rollout sampled. An environment that builds its groups by hand need not carry along how: its
    sequences are known again by their tokens."""

    def __init__(self) -> None:
        self.sequences: list[Sampled] = []

    def fields_of(self, tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """`sampling_params` and `finish_reasons` of a group, each only where it is known of every sequence.

        Args:
            tokens, masks: of the group, [n][length].
        """
        fields: dict[str, list[Any]] = {}
        by_end: dict[tuple[int, ...], list[Sampled]] = {}
        for known in self.sequences:
            by_end.setdefault(known.end, []).append(known)
        rows = [[*row] for row in tokens]
        met = [[known for known in by_end.get(end_of(row, len(row)), []) if known.is_of(row)] for row in rows]
        reasons = [only([known.finish_reason for known in found]) for found in met]
        if all(reason is not None for reason in reasons):
            fields["finish_reasons"] = reasons
        common = self._common()
        sampling = [self._sampling(found, mask) or common for found, mask in zip(met, masks, strict=True)]
        if all(entry is not None for entry in sampling):
            fields["sampling_params"] = sampling
        return fields

    @staticmethod
    def _sampling(found: Sequence[Sampled], mask: Sequence[int]) -> Sampling | list[Sampling] | None:
        """How the sequence was sampled that these are; None if it is trained on tokens that an earlier request sampled."""
        whole = [known for known in found if all(token == PROMPT_MASK for token in mask[: len(known.prompt)])]
        spans = only([known.sampling for known in whole])
        return on_the_wire(spans) if spans else None

    @property
    def _parameters(self) -> list[Sampling]:
        """Of all requests that told them."""
        return [span.parameters for known in self.sequences for span in known.sampling or []]

    @property
    def differ(self) -> bool:
        """Whether the requests sampled from different distributions."""
        parameters = self._parameters
        return not all(same_distribution(parameters[0], other) for other in parameters)

    def _common(self) -> Sampling | None:
        """The parameters of all requests, where they differ in `max_tokens` at most."""
        parameters = self._parameters
        if self.differ or not parameters or any(known.sampling is None for known in self.sequences):
            return None
        limit = only([entry.get("max_tokens") for entry in parameters])
        return {name: value for name, value in parameters[0].items() if name != "max_tokens" or limit is not None}


def only(values: Sequence[Any]) -> Any:
    """The value that all of them are; None where they differ, or where there is none."""
    return values[0] if values and all(value == values[0] for value in values) else None
