"""Requests made up from the service's own OpenAPI description: none may end in a 5xx, none may hang."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from .conftest import Service, group


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/register-env", "/batch", "the rest"])
def test_no_request_breaks_the_service(shared_service: Service, path: str) -> None:
    import schemathesis  # takes as long as the tests of many a file

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{shared_service.port}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    named = {"/scored_data", "/scored_data_list", "/register", "/register-env", "/batch"}
    chosen = [o for o in operations if o.path == path or (path == "the rest" and o.path not in named)]
    assert chosen, "the description names the route"
    for operation in chosen:

        @settings(
            max_examples=60 if path in named else 10,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            assert response.status_code < 500, response.text

        check()


def test_after_all_that_it_still_works(service: Service) -> None:
    service.begin(batch_size=4)
    service.post("/scored_data", group())
    assert service.get("/batch")["batch"] is not None
