"""Requests made up from the service's own OpenAPI description: none may end in a 5xx but 503 and
507, none may hang.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.atroposlib.service.conftest import Service, group
from tests.fuzz_size import LONG_SECONDS, fuzz_inputs, fuzz_seed
from tests.generated_requests import operations_of, send_generated
from tests.raw_fuzz import faults_in

pytestmark = pytest.mark.nightly

TENTHS = {
    "/scored_data": 3,
    "/scored_data_list": 1,
    "/register": 2,
    "/register-env": 1,
    "the rest": 3,
}
"""Shares of the inputs, by route."""


def with_right_lengths(case: Any) -> None:
    """Give half of the groups sequences that fit together: generated ones never do.

    Their other content stays.
    """
    for entry in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(entry, dict) and "tokens" in entry and len(str(entry)) % 2:
            entry.update(group(2))
            for name in [
                name
                for name, value in entry.items()
                if isinstance(value, list) and name not in group()
            ]:
                entry[name] = [*entry[name], None, None][:2]


@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.parametrize("path", TENTHS)
def test_no_request_breaks_the_service(shared_service: Service, path: str) -> None:
    url = f"http://127.0.0.1:{shared_service.port}/openapi.json"
    operations = operations_of(
        url, lambda found: (found if found in TENTHS else "the rest") == path
    )
    statuses = send_generated(
        operations, fuzz_inputs(500) * TENTHS[path] // 10, fuzz_seed(), with_right_lengths
    )
    print(f"{path}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert faults_in(shared_service.log) == []


def test_after_all_that_it_still_works(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    assert service.get("/batch")["batch"] is not None
