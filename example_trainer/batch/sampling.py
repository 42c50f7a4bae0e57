"""The distribution that a sequence was sampled from, out of `sampling_params`, and whether it can
be trained on. Pure.

`sampling_params[i]` is an object of numbers: `temperature`, and what is not neutral of `top_p`,
`top_k`, `min_p`, penalties and `min_tokens`; and `max_tokens`, which only ends an answer. Where
turns were sampled in different ways it is a list of such objects, each with `tokens`, the number of
sampled tokens that it is of.

The trainer recomputes the logprob of each token under softmax(logits / temperature) over the whole
vocabulary. What else shaped the distribution is unknown to it: see BIAS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.wire import CONSTRAINED, NEUTRAL
from example_trainer.batch.group_error import GroupError

IDLE = {**NEUTRAL, CONSTRAINED: (0.0,)}
"""Parameter that changes the distribution -> the values at which it does not."""
BIAS = (
    "the server's logprobs are of the distribution that was left or shifted, the trainer's of the whole one: ratios are off by "
    "the probability that was cut away or moved, clipping and corrections take that for drift, and tokens that could not be "
    "sampled are never learned"
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
    """What the vLLM servers say of the logprobs that they hand out.

    Attributes:
        raw: addresses of those whose logprobs are before any temperature.
        unknown: of those that could not be asked.
        processed: of those whose logprobs are of the distribution that they sample from, at its
            temperature.
    """

    raw: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    processed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingRules:
    """What may be trained on.

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
    """How a sequence was sampled.

    Attributes:
        temperatures: [sampled] float32; None where nobody said.
        max_tokens: limit of the last request; None where nobody said.
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
        entry: None where nothing is said.
        sequence: its number in the group, for messages.
        sampled: its sampled tokens.

    Raises:
        GroupError: it is no such entry, or says what must not be trained on.
    """
    if entry is None:
        return Sampling()
    where = f"sampling_params[{sequence}]"
    spans = entry if isinstance(entry, list) else [entry]
    if not spans or not all(isinstance(span, Mapping) for span in spans):
        raise GroupError(f"{where} is no object of numbers, nor a list of such: {str(entry)[:80]}")
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
        raise GroupError(
            f"{where} says how {counts} tokens were sampled, of which none can be fewer than 0"
        )
    if sum(counts) != sampled:
        # An environment may train on fewer tokens than were sampled; which ones, only their
        # temperatures ask.
        if len(set(temperatures)) > 1:
            raise GroupError(
                f"{where} says how {counts} tokens were sampled, at different temperatures, and the mask leaves {sampled} that "
                "are not -100: parts must add up to these, so leave out those of turns that are masked"
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
        raise GroupError(f"{where} has {name} {value!r:.40}, which is no finite number")
    return float(value)


def _require_usable(temperature: float | None, sequence: int, rules: SamplingRules) -> None:
    if temperature is None or temperature == 1.0:
        return
    told = f"sequence {sequence} was sampled at temperature {temperature:g}"
    if not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
        how = ", greedily" if 0 <= temperature < LEAST_TEMPERATURE else ""
        raise GroupError(
            f"{told}{how}, which is no distribution to learn from: let the environment sample training data at a temperature "
            f"of at least {LEAST_TEMPERATURE:g}, and send no evaluations"
        )
    if rules.deterministic:
        raise GroupError(
            f"{told}, and --deterministic computes at 1 alone: let the environment sample at temperature 1"
        )
    if rules.servers.raw:
        raise GroupError(
            f"{told}, but the logprobs of {rules.servers.raw[0]} are those before any temperature (raw_logprobs), so that "
            "training would go in a wrong direction: start the server with --logprobs-mode processed_logprobs, or let the "
            "environment sample at temperature 1"
        )
