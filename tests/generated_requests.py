"""Requests that schemathesis makes up from the OpenAPI description of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.raw_fuzz import REFUSALS

SECONDS = 60.0
"""Within which a request is answered, on a machine that may be busy."""


def operations_of(url: str, chosen: Callable[[str], bool]) -> list[Any]:
    """Return the operations of a description whose paths are chosen."""
    import schemathesis  # its import takes longer than many a test

    schema = schemathesis.openapi.from_url(url).include(
        lambda context: chosen(context.operation.path)
    )
    operations = [result.ok() for result in schema.get_all_operations()]
    assert operations, "the description names the route"
    return operations


def send_generated(
    operations: Sequence[Any], inputs: int, number: int, change: Callable[[Any], None] | None = None
) -> Counter[int]:
    """Send requests, half of them wrong, and check that no answer is above 499 but the documented
    ones.

    Args:
        operations: which share the inputs.
        inputs: requests at most; a route that takes few different requests gets those.
        number: seed.
        change: of each request before it is sent.

    Returns:
        The number of answers with each status.
    """
    from schemathesis import GenerationMode

    statuses: Counter[int] = Counter()
    varied = [operation for operation in operations if len(operation.body) or len(operation.query)]
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in varied
        for mode in GenerationMode
    ]
    examples = max(2, inputs // max(1, len(strategies)))
    strategies += [operation.as_strategy() for operation in operations if operation not in varied]
    for strategy in strategies:

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: Any) -> None:
            if change is not None:
                change(case)
            response = case.call(timeout=SECONDS)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code in REFUSALS, response.text

        check()
    return statuses
