"""The processes of one training run beside its vLLM server: rollout service, environment, trainer,
on ports of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.processes import BenchError, Child, device_variables, free_port, tail, wait_all
from example_trainer.launcher import roles

Row = dict[str, Any]


class TrainingStack:
    """One run's processes; all end with the stack that it is given.

    Attributes:
        name: begins the names of the logs.
        folder: of the run's own files, the trainer's log folder among them.
        metrics: where the trainer writes its rows.
    """

    def __init__(self, name: str, output: Path, work: Path, stack: ExitStack, on_cpu: bool) -> None:
        """
        Args:
            name: begins the names of the logs, which are in `output`.
            work: gets the run's folder.
        """
        self.name, self.output, self.stack, self.on_cpu = name, output, stack, on_cpu
        self.folder = work / name.replace(" ", "_")
        self.folder.mkdir(parents=True)
        self.metrics = self.folder / "logs" / "metrics.jsonl"
        self.service_url = f"http://127.0.0.1:{free_port()}"
        self._rendezvous = free_port()

    def start(self, what: str, command: Sequence[str], gpus: str = "", **environment: str) -> Child:
        """Start a program."""
        variables = {
            "LOGDIR": str(self.folder),
            "MASTER_PORT": str(self._rendezvous),
            **environment,
        }
        variables |= device_variables(self.on_cpu, gpus)
        log = self.output / f"{self.name.replace(' ', '_')}-{what}.log"
        child = Child(what, command, log, variables)
        self.stack.callback(child.stop)
        return child

    def start_service(self, store: Path | None = None) -> Child:
        """The rollout service, once it answers; without a file for its rollouts it has them in
        memory.
        """
        port = int(self.service_url.rpartition(":")[2])
        child = self.start("service", roles.service("127.0.0.1", port, store=store or "memory"))
        wait_all({"service": lambda: answers(self.service_url)}, 60)
        return child

    def start_environment(
        self, script: str, server_url: str, flags: Sequence[str] = (), **settings: roles.Value
    ) -> Child:
        """An environment that samples from a server; `settings` are fields of its configuration."""
        settings = {"steps_per_eval": 0, **settings}
        words = roles.environment(script, self.service_url, [server_url], settings=settings)
        return self.start("environment", [*words, *flags])

    def start_trainer(
        self,
        model: Path,
        gpus: str,
        bridge: str | None,
        flags: Sequence[str] = (),
        **options: roles.Value,
    ) -> Child:
        """grpo.py as a person types it; it starts a process for each of its GPUs by itself.

        Args:
            bridge, options: see roles.trainer.
            flags: further flags.
        """
        options = {
            "log_dir": self.metrics.parent,
            "checkpoint_interval": 0,
            "save_path": self.folder / "checkpoints",
            **options,
        }
        words = roles.trainer(model, bridge, self.service_url, options)
        return self.start("trainer", [*words, *flags], gpus)

    def dropped_groups(self) -> dict[str, int]:
        """Groups that the service has thrown away, by reason."""
        dropped: dict[str, int] = {}
        for row in (
            httpx.get(f"{self.service_url}/stats", timeout=30).raise_for_status().json()["dropped"]
        ):
            dropped[row["reason"]] = dropped.get(row["reason"], 0) + row["groups"]
        return dropped


def answers(url: str) -> bool:
    """Report if a GET is answered with 200."""
    try:
        return httpx.get(url, timeout=40).status_code == 200
    except httpx.TransportError:
        return False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file; none if it is not there."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_end(
    child: Child, seconds: float, meanwhile: Callable[[], bool | None] = lambda: None
) -> None:
    """Wait until a process has ended well, or until `meanwhile`, which is called many times a
    second, returns true.

    Raises:
        BenchError: it failed, or has not ended after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise BenchError(
                f"{child.name}: not finished after {seconds:g} s:\n{tail(child.log_path)}"
            )
        if meanwhile():
            return
        time.sleep(0.02)
    meanwhile()
    if child.poll():
        raise BenchError(f"{child.name} ended with status {child.poll()}:\n{tail(child.log_path)}")


class RowsAsTheyCome:
    """A file of JSON lines that another process writes, read as it grows.

    Attributes:
        rows: so far, each with the monotonic time at which it was seen.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.rows: list[tuple[float, Row]] = []

    def look(self) -> None:
        """Take what has come since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        now = time.monotonic()
        self.rows += [(now, json.loads(line)) for line in whole.splitlines()]

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.rows)
