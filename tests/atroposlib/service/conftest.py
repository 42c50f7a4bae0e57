"""A real rollout service in its own process, and a client that speaks to it over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.ports import PortReservations
from tests.forked_commands import Forked, execute, start_unguarded

ROOT = Path(__file__).resolve().parents[3]


_PORTS = PortReservations()


def free_port() -> int:
    """Reserve a port without a listener for this process: a service starts on it seconds later, or
    again.
    """
    return _PORTS.pick()


def group(size: int = 4, length: int = 3, mark: int = 7, **fields: Any) -> dict[str, Any]:
    """A valid group whose every token is `mark`, by which it is known again."""
    return {
        "tokens": [[mark] * length for _ in range(size)],
        "masks": [[-100] + [mark] * (length - 1) for _ in range(size)],
        "scores": [float(i) for i in range(size)],
        "inference_logprobs": [[1.0] + [-0.5] * (length - 1) for _ in range(size)],
        **fields,
    }


def marks(batch: list[dict[str, Any]]) -> list[int]:
    """The marks of the groups of a batch."""
    return [entry["tokens"][0][0] for entry in batch]


def trainer(**fields: Any) -> dict[str, Any]:
    """A trainer's registration."""
    return {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 8,
        "max_token_len": 128,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 5,
        "starting_step": 0,
        "num_steps": 100,
        **fields,
    }


def environment(**fields: Any) -> dict[str, Any]:
    """An environment's registration."""
    return {
        "max_token_length": 128,
        "desired_name": "task",
        "weight": 1.0,
        "group_size": 4,
        **fields,
    }


class Service:
    """One rollout service process. It can be killed and started again on the same port.

    Attributes:
        forked: else it is executed, and its command line is seen in `ps`.
    """

    forked = True

    def __init__(
        self,
        folder: Path,
        *flags: str,
        port: int | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.flags = flags
        self.cwd = ROOT
        self.environ = environ or {}
        self.log = folder / f"service-{self.port}.log"
        self.process: Forked | Any = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def command(self) -> list[str]:
        """The command line that starts it."""
        return [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--port",
            str(self.port),
            *self.flags,
        ]

    def start(self, seconds: float = 120) -> Service:
        """Start it and wait until it answers."""
        with self.log.open("ab") as log:
            start = start_unguarded if self.forked else execute
            self.process = start(
                self.command(), log.fileno(), {**os.environ, **self.environ}, self.cwd
            )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the service ended with {self.process.returncode}: {self.log.read_text()[-2000:]}"
                )
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.02)
        raise TimeoutError(
            f"the service did not answer within {seconds} s: {self.log.read_text()[-2000:]}"
        )

    def signal(self, number: signal.Signals, seconds: float = 60) -> int:
        """Send it a signal and wait for its end. Returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(seconds)
        self.http.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        return status

    def get(self, path: str, **params: Any) -> Any:
        """GET; the answer must be a success."""
        response = self.http.get(path, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any = None) -> Any:
        """POST; the answer must be a success."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def status_env(self, env_id: int) -> httpx.Response:
        """GET /status-env with its JSON body, as clients of the wire send it."""
        return self.http.request("GET", "/status-env", json={"env_id": env_id})

    def begin(self, env: dict[str, Any] | None = None, **fields: Any) -> int:
        """Register a trainer and one environment. Returns the environment's id."""
        self.post("/register", trainer(**fields))
        self.get("/batch")
        return int(self.post("/register-env", env or environment())["env_id"])


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests of a module."""
    service = Service(tmp_path_factory.mktemp("service"), "--store", "memory").start()
    yield service
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


@pytest.fixture
def service(shared_service: Service) -> Service:
    """A running service that has forgotten everything."""
    shared_service.http.get("/reset_data")
    return shared_service
