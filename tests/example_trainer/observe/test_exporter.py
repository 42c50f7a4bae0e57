"""The trainer's figures for Prometheus, over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from example_trainer.algorithm.objective import StepFigures
from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.reader import BatchFigures
from example_trainer.errors import ConfigError
from example_trainer.models.router import ROUTER_FIGURES
from example_trainer.observe.exporter import (
    COUNTERS,
    GAUGES,
    LABELLED,
    MOST_CONNECTIONS,
    MetricsServer,
    serve_metrics,
)
from example_trainer.observe.metrics import MetricsLog

UNSHOWN = {
    "tokens",
    "targets_with_logprobs",
    "targets_with_reference",
    "sequence_tokens",
    "attended_pairs",
    "bins",
}
"""Inputs of other figures."""


@pytest.fixture
def server(free_port: Callable[[], int]) -> Iterator[MetricsServer]:
    made = MetricsServer(free_port())
    yield made
    made.close()


def scrape(server: MetricsServer) -> dict[str, str]:
    text = httpx.get(f"http://localhost:{server.port}/metrics", timeout=60, trust_env=False).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in rows}


def test_a_scrape_shows_the_last_row(server: MetricsServer) -> None:
    row = {
        "loss": 0.5,
        "tokens": 150,
        "forwarded_targets": 100,
        "sequences": 4,
        "bytes_moved": 1000,
        "weight_version": 1,
        "compared_tokens": 90,
        "mismatched_tokens": 0,
        "older_tokens": 10,
        "age_mean": 2.0,
        "age_max": 3,
    }
    server.update(1, {**row, "sync/pause": 0.25, "sync/write": 0.5})
    server.update(
        2,
        {
            **row,
            "loss": -0.5,
            "weight_version": 2,
            "age_mean": None,
            "sync/pause": 0.125,
            "checksum": "ab",
        },
    )
    found = scrape(server)
    assert found["lockstep_trainer_step"] == "2.0"
    assert found["lockstep_trainer_loss"] == "-0.5"
    assert found["lockstep_trainer_served_weight_version"] == "2.0"
    assert (
        found["lockstep_trainer_staleness_mean_versions"] == "NaN"
    )  # not known, which is not what the step before had
    assert found["lockstep_trainer_staleness_max_versions"] == "3.0"
    assert found["lockstep_trainer_tokens_total"] == "200.0"
    assert found["lockstep_trainer_compared_tokens_total"] == "180.0"
    assert found["lockstep_trainer_mismatched_tokens_total"] == "0.0"
    assert found["lockstep_trainer_older_tokens_total"] == "20.0"
    assert found["lockstep_trainer_weight_bytes_sent_total"] == "2000.0"
    phases = {
        name: value
        for name, value in found.items()
        if name.startswith("lockstep_trainer_sync_phase_seconds")
    }
    assert phases == {'lockstep_trainer_sync_phase_seconds{phase="pause"}': "0.125"}


def test_what_metrics_jsonl_gets_is_what_is_shown(server: MetricsServer, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {}, exporter=server)
    log.write(7, {"loss": 1.5, "age_mean": None})
    assert scrape(server)["lockstep_trainer_loss"] == "1.5"
    assert scrape(server)["lockstep_trainer_step"] == "7.0"
    log.close()
    with pytest.raises(httpx.ConnectError):
        scrape(server)


def test_every_figure_of_a_step_is_shown(server: MetricsServer) -> None:
    """Names of the batch's and the passes' times; a new one needs a gauge."""
    passes = StepFigures(torch.device("cpu"), 0).row(lambda vector: vector)
    own = set(BatchFigures.__annotations__) - UNSHOWN - {"rewards", "success_rates"}
    assert [
        key
        for key in (*passes, *ROUTER_FIGURES, "rerouted_share", *own)
        if key not in GAUGES | COUNTERS and not key.startswith(tuple(LABELLED))
    ] == []
    server.update(
        1, {"kl_age_0": 0.25, "kl_age_16_up": None, "reward/sums_0": 0.5, "reward/maths_1": 0.25}
    )
    server.update(2, {"kl_age_0": 0.5, "kl_age_unknown": 1.5, "reward/sums_0": 0.75})
    metrics = {"eval/percent_correct": 0.5, "length": 8}
    server.update_evaluation(Evaluation(1, 0.0, 3, "sums 0", 2, metrics))
    server.update_evaluation(Evaluation(2, 1.0, 3, "sums 0", None, {"length": 9}))
    found = {
        name.removeprefix("lockstep_trainer_"): value
        for name, value in scrape(server).items()
        if "{" in name
    }
    assert found == {
        'kl_by_age_nats{age="0"}': "0.5",
        'kl_by_age_nats{age="unknown"}': "1.5",
        'environment_reward_mean{environment="sums_0"}': "0.75",
        'evaluation{environment="sums_0",metric="eval/percent_correct"}': "0.5",
        'evaluation{environment="sums_0",metric="length"}': "9.0",
        'evaluated_weight_version{environment="sums_0"}': "NaN",
    }


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"port {port} on --metrics-host 127.0.0.1: Address already in use; give",
        ):
            serve_metrics(port)


def test_it_listens_where_it_is_told() -> None:
    server = MetricsServer(0, "127.0.0.2")
    try:
        assert (
            httpx.get(
                f"http://127.0.0.2:{server.port}/metrics", timeout=60, trust_env=False
            ).status_code
            == 200
        )
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False)
    finally:
        server.close()
    with pytest.raises(
        ConfigError, match=r"--metrics-host 192\.0\.2\.1: Cannot assign requested address"
    ):
        serve_metrics(server.port, "192.0.2.1")


def test_port_0_serves_nothing() -> None:
    assert serve_metrics(0) is None


def test_silent_connections_neither_stop_scrapes_nor_add_up(server: MetricsServer) -> None:
    silent = [
        socket.create_connection(("localhost", server.port), timeout=60)
        for _ in range(MOST_CONNECTIONS + 4)
    ]
    server.update(1, {"loss": 0.5})
    assert scrape(server)["lockstep_trainer_loss"] == "0.5"
    assert [connection.recv(1) for connection in silent[:5]] == [b""] * 5, "the oldest end first"
    assert len(server.http.connections) <= MOST_CONNECTIONS
    silent[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert silent[-1].recv(15).startswith(b"HTTP/1"), "a newer one still works"
    for connection in silent:
        connection.close()
