"""The processes of one run: wait for them, notice when one of them dies, and stop them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from example_trainer.child_processes.processes import (
    ManagedProcess,
    ProcessDied,
    ProcessError,
    RunningProcess,
)
from example_trainer.child_processes.readiness import http_probe, wait_until

P = TypeVar("P", bound=RunningProcess)


class Supervisor:
    """The processes of one run. Leaving its `with` block stops them all, the last started first."""

    def __init__(self) -> None:
        self.processes: list[RunningProcess] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str | None] | None = None,
        directory: Path | None = None,
        grace: float = 10.0,
        may_finish: bool = False,
    ) -> ManagedProcess:
        """Start one more; see ManagedProcess."""
        return self.add(
            ManagedProcess(name, command, log_path, environment, directory, grace, may_finish)
        )

    def add(self, process: P) -> P:
        """Look after one that has been started."""
        self.processes.append(process)
        return process

    def check(self) -> None:
        """Raise ProcessDied if one of them is gone that should be running."""
        for process in self.processes:
            if process.is_missed():
                raise process.died()

    def wait_for_http(
        self, process: RunningProcess, url: str, seconds: float, interval: float = 0.2
    ) -> float:
        """Wait until a server answers GET `url` with a status below 400; returns the seconds it
        took.

        Raises:
            ProcessDied: it, or another process, died.
            ProcessError: the deadline passed; the message ends with the last lines of its log.
        """
        missing = http_probe(url, min(seconds, 60.0))
        try:
            return wait_until(process.name, missing, seconds, self.check, interval)
        except ProcessDied:
            raise
        except ProcessError as error:
            raise ProcessError(f"{error}; log: {process.log_path}{process.last_words()}") from None

    def stop(self, process: RunningProcess) -> int:
        """Stop one, which `check` then no longer misses; returns its exit status."""
        code = process.stop()
        self.processes.remove(process)
        return code

    def finish(
        self, process: ManagedProcess, seconds: float, idle: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for one to end well while the others go on running; see ManagedProcess.wait.

        Raises:
            ProcessDied: this or another one ended with an error.
        """
        others = [other for other in self.processes if other is not process]

        def look_round() -> None:
            for other in others:
                if other.is_missed():
                    raise other.died()
            idle()

        process.wait(seconds, look_round)
        self.processes.remove(process)

    def stop_all(self) -> None:
        """Stop what is still running, the last started first."""
        while self.processes:
            self.processes.pop().stop()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_all()
