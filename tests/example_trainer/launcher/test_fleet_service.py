"""The fleet's table through the real rollout service: what a trainer publishes is what status.sh
and restart.sh read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from example_trainer.child_processes.processes import post_json
from example_trainer.launcher import roles
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.fleet import FleetRow, join, look, published_fleet
from tests.conftest import Processes
from tests.http_server import HttpServer

KEY = "the-key-of-the-run"


def test_the_table_that_is_published_is_the_table_that_is_read(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    service = f"http://localhost:{port}"
    command = roles.service("127.0.0.1", port, store=tmp_path / "rollouts.db")
    processes.start("service", command, environment={"ROLLOUT_API_KEY": KEY})
    processes.wait_for_http(f"{service}/", 180)
    assert published_fleet(service, KEY) is None, "no trainer has said anything"
    (silent,) = look(service, KEY, [f"http://localhost:{free_port()}"]).rows
    assert (silent.standing, silent.weights) == ("silent", (-1, -1))

    rows = (
        FleetRow("http://localhost:9001", "good", 7, 1763910412345, 1763910412.5, ""),
        FleetRow(
            "http://10.0.0.2:9001", "quarantined", None, None, None, "rank 0 sent another checksum"
        ),
    )
    begun = time.time()
    post_json(f"{service}/fleet", {"servers": [vars(row) for row in rows]}, seconds=30, key=KEY)
    found = published_fleet(service, KEY)
    assert found is not None
    assert found.rows == rows
    assert begun - 1 <= (found.published or 0) <= time.time() + 1
    assert not found.good

    join(service, KEY, "http://localhost:9003")
    assert look(service, KEY, []).wanted == ("http://localhost:9003",)
    assert published_fleet(service, "another-key") is None
    with pytest.raises(LauncherError, match="lets http://localhost:9003 not join: 401"):
        join(service, "another-key", "http://localhost:9003")
    with pytest.raises(LauncherError, match="lets nowhere not join: 422"):
        join(service, KEY, "nowhere")


def test_a_service_that_is_silent_or_refuses_is_named(free_port: Callable[[], int]) -> None:
    server, silent = "http://localhost:9001", f"http://localhost:{free_port()}"
    with pytest.raises(LauncherError, match=f"{server} cannot join: POST {silent}/fleet/join"):
        join(silent, KEY, server)
    with HttpServer(lambda request: (409, {"detail": "no trainer"})) as service:
        with pytest.raises(LauncherError, match=f"lets {server} not join: 409 .*no trainer"):
            join(service.url, KEY, server)
        assert service.requests[0].json == {"url": server}
