"""Checks of entries that a posted group holds for one sequence each: how it was sampled, why it ended, whether it is solved."""

from __future__ import annotations

import math
from typing import Any

from atroposlib.service.schemas import invalid, path, short
from atroposlib.wire.number_bounds import LARGEST_FLOAT32, LEAST_FLOAT32
from atroposlib.wire.sampling_parameters import CONSTRAINED, NEUTRAL

LONGEST_REASON = 64
"""Characters of a finish reason."""
PARAMETERS = ("temperature", *NEUTRAL, CONSTRAINED, "max_tokens", "tokens")
"""What is read of an entry of sampling_params."""


def check_finish_reason(reason: Any, where: list[str | int]) -> None:
    """Check why the sampling of a sequence ended: a word of the inference server, or None if unknown."""
    if reason is not None and not (isinstance(reason, str) and len(reason) <= LONGEST_REASON):
        rule = f"it must be a string of at most {LONGEST_REASON} characters, or null"
        raise invalid(where, short(reason), f"{path(where)} is {short(reason)!r}: {rule}")


def check_success(success: Any, where: list[str | int]) -> None:
    """Check whether a sequence solved its item: a boolean, or None if unknown."""
    if success is not None and not isinstance(success, bool):
        raise invalid(where, short(success), f"{path(where)} is {short(success)!r}: it must be true, false or null")


def check_sampling(entry: Any, length: int, where: list[str | int]) -> None:
    """Check how one sequence was sampled.

    It is one object of numbers for the whole sequence, or one for each part with the part's `tokens`, or None if unknown.
    """
    if entry is None:
        return
    if not isinstance(entry, list):
        _check_parameters(entry, where)
        return
    if not entry:
        raise invalid(where, [], f"{path(where)} is []: leave sampling_params out where it is not known")
    covered = 0
    for place, part in enumerate(entry):
        _check_parameters(part, [*where, place])
        tokens = part.get("tokens")
        if not isinstance(tokens, int) or tokens < 0:
            said = [*where, place, "tokens"]
            raise invalid(said, short(tokens), f"{path(said)} is {short(tokens)!r}: each part says how many tokens it is of")
        covered += tokens
    if covered > length:
        message = f"{path(where)} has {len(entry)} parts of {short(covered)} tokens, the sequence has {length}"
        raise invalid(where, len(entry), message)


def _check_parameters(parameters: Any, where: list[str | int]) -> None:
    """Check that the parameters are finite numbers by name, or null. Names that are not in PARAMETERS are the client's own."""
    if not isinstance(parameters, dict):
        message = f'{path(where)} is {short(parameters)!r}: it must be an object of numbers, such as {{"temperature": 1.0}}'
        raise invalid(where, short(parameters), message)
    for name in (name for name in PARAMETERS if parameters.get(name) is not None):
        value = parameters[name]
        exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
        if not exact and not (isinstance(value, float) and math.isfinite(value)):
            said = [*where, name]
            raise invalid(said, short(value), f"{path(said)} is {short(value)!r}: it must be a finite number")
    temperature = parameters.get("temperature")
    said = [*where, "temperature"]
    if temperature is not None and temperature < 0:
        raise invalid(said, temperature, f"{path(said)} is {temperature}: it must be at least 0")
    if temperature and not LEAST_FLOAT32 <= temperature <= LARGEST_FLOAT32:
        raise invalid(said, temperature, f"{path(said)} is {temperature}: it must be 0, or a number that float32 holds")
