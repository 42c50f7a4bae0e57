"""Requests made up from the service's own OpenAPI description: none may end in a 5xx but 503 and 507, none may hang."""

from __future__ import annotations

import pytest

from tests.atroposlib.api.conftest import Service, group
from tests.fuzz_size import LONG_SECONDS, fuzz_inputs, fuzz_seed
from tests.generated_requests import operations_of, send_generated
from tests.raw_fuzz import faults_in

NAMED = {"/scored_data": 4, "/scored_data_list": 2, "/register": 2, "/register-env": 1, "/batch": 1}
"""Tenths of the inputs that a route has."""


@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.parametrize("path", [*NAMED, "the rest"])
def test_no_request_breaks_the_service(shared_service: Service, path: str) -> None:
    base = f"http://127.0.0.1:{shared_service.port}"
    operations = operations_of(
        f"{base}/openapi.json", lambda found: found == path or (path == "the rest" and found not in NAMED)
    )
    inputs = fuzz_inputs(320) if path == "the rest" else fuzz_inputs(300) * NAMED[path] // 10
    statuses = send_generated(operations, inputs, fuzz_seed())
    print(f"{path}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert faults_in(shared_service.log) == []


def test_after_all_that_it_still_works(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    assert service.get("/batch")["batch"] is not None
