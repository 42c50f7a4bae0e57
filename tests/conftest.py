"""Shared parts of tests of several processes: free ports, processes that cannot outlive the test,
and waits that fail early.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from example_trainer.child_processes.ports import PortReservations  # noqa: E402
from example_trainer.child_processes.processes import (  # noqa: E402
    ManagedProcess,
    Probe,
    Supervisor,
    http_probe,
    wait_until,
)
from example_trainer.launcher import roles  # noqa: E402
from tests.forked_commands import ForkedProcess, shared_fork_servers  # noqa: E402
from tests.full_disks import KINDS, FullDisk, disk_of_kind  # noqa: E402

# One thread each: the models are tiny, several processes share two cores, and threads that wait for
# one another burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests' own requests to their servers go through no proxy.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1"
# A client of httpx reads all authorities of its machine when it is made, which takes longer than
# most of what it then does. From a folder they are read only when they are needed.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.environ.get("SSL_CERT_DIR") or "/etc/ssl/certs"
# PyTorch looks up the name of its peer, once in each process. A name server that is there and does
# not answer would cost it 10 seconds (resolv.conf(5)). Many a test gives a peer less to come.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# No hub and no telemetry server is contacted. Without a network each such request takes a minute of
# retries, and with one the outcome would depend on it.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# The time of an example depends on the load of the machine, so it has no limit. Each run draws the
# same examples, so that a change that passed once passes everywhere.
settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# New examples in each run, to look for faults: pytest --hypothesis-profile thorough
settings.register_profile(
    "thorough", settings.get_profile("any machine"), max_examples=1000, derandomize=False
)
settings.load_profile("any machine")


WAITING = {
    "tests/atroposlib/service/test_faults.py",
    "tests/atroposlib/cli/test_run_api.py",
    "tests/atroposlib/envs/test_env_serving.py",
    "tests/atroposlib/sandbox/test_stopped_processes.py",
    "tests/atroposlib/dashboard/test_killed_processes_in_browser.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_parallel_trainer.py",
    "tests/example_trainer/parallel/test_launch.py",
    "tests/example_trainer/parallel/test_launched_trainer.py",
    "tests/example_trainer/parallel/test_ranks.py",
    "tests/example_trainer/parallel/test_torchrun_trainer.py",
    "tests/example_trainer/parameter_server/test_parameter_server.py",
    "tests/example_trainer/parameter_server/test_stopped_parameter_server.py",
    "tests/example_trainer/training/test_background_save.py",
    "tests/example_trainer/training/test_run_exactly.py",
    "tests/example_trainer/weight_bridge/test_fleet_broadcast.py",
    "tests/example_trainer/weight_bridge/test_fleet_faults.py",
    "tests/example_trainer/weight_bridge/test_fleet_senders.py",
    "tests/example_trainer/weight_bridge/test_restart.py",
    "tests/example_trainer/weight_bridge/test_stream.py",
    "tests/example_trainer/launcher/test_control.py",
    "tests/example_trainer/launcher/test_rolling.py",
    "tests/example_trainer/launcher/quickstart/test_run.py",
}
"""Files that take long, most of it in waiting: for a deadline to pass, for processes to come and
go."""


def pytest_configure(config: pytest.Config) -> None:
    """Where several workers share the tests, they share the processes that fork commands too, and
    are forked themselves.
    """
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        servers = shared_fork_servers()
        servers.__enter__()
        config.add_cleanup(lambda: servers.__exit__(None, None, None))
        worker = shlex.join([sys.executable, str(ROOT / "tests" / "forked_python.py")])
        config.option.tx = [f"popen//python={worker}"] * len(config.option.tx)
    else:
        # what imports make stays; looking through it for garbage took a twelfth of the time of
        # tests that compute
        gc.disable()


def pytest_collection_finish() -> None:
    """From here on there is garbage, and it is looked for among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers share the tests, what takes longest in one piece comes first, so that
    none is alone with it at the end. Files are ordered by the longest time that a test of theirs is
    marked with, and before the rest those with end-to-end tests.
    """
    if not hasattr(config, "workerinput"):
        return
    limits: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = float(limit.args[0]) if limit else 1.0 if item.get_closest_marker("e2e") else 0.0
        limits[item.path] = max(limits.get(item.path, 0.0), seconds)
    items.sort(key=lambda item: -limits.get(item.path, 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several workers share the tests, the tests of a file stay together, for the servers
    that they share. So do all that need the GPU to themselves. The last worker has the waiting
    tests, and ends when there are no more. Beside the other workers' tests, which compute, they
    cost next to nothing. The one before it begins at the other end, with the small tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            waiting = [file for file in self.workqueue if file in WAITING]
            others = [file for file in self.workqueue if file not in WAITING]
            if not others or (waiting and node is self.nodes[-1]):
                chosen = waiting[0]
            else:
                chosen = others[-1 if node in self.nodes[-2:] else 0]
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if (
                len(self.nodes) > 3
                and node is self.nodes[-1]
                and WAITING.isdisjoint(self.workqueue)
            ):
                node.shutdown()
            else:
                super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Return the test that ended a worker, None if no test did. The other workers get what
            is left of its files.

            xdist would run that test again, and so end every other worker. It would also hand out
            files without a test left, and a worker with such a file waits for ever.
            """
            files = self.assigned_work[node]
            ended_by = next(
                (test for tests in files.values() for test, done in tests.items() if not done), None
            )
            if ended_by is not None:
                files[self._split_scope(ended_by)][ended_by] = True
            for file in [file for file, tests in files.items() if all(tests.values())]:
                del files[file]
            super().remove_node(node)
            return ended_by

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "gpu" if file.startswith("tests/gpu/") else file

    return Together(config, log)


class Processes:
    """Starts real processes for a test. Each has a log of its own, and none outlives the fixture,
    or pytest itself.

    Example:
        service = processes.start_service(port)
        processes.start("environment", [sys.executable, ROOT / "environments/arithmetic_server.py", "serve"])
        ...
        processes.kill(service)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = Supervisor()
        self.count = 0

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str | None] | None = None,
        directory: Path = ROOT,
        grace: float = 10.0,
        may_finish: bool = False,
    ) -> ManagedProcess:
        """Start a command; its output goes to `<folder>/<n>-<name>.log`.

        Args:
            name: for messages and the log.
            command: program and arguments.
            environment: variables on top of this process's own; None as a value removes one.
            directory: working directory.
            grace: seconds between SIGTERM and SIGKILL when it is stopped.
            may_finish: it may end by itself, with status 0, while others still run.
        """
        self.count += 1
        log = self.folder / f"{self.count:02d}-{name.replace(' ', '-')}.log"
        words = [str(part) for part in command]
        return self.supervisor.add(
            ForkedProcess(name, words, log, environment, directory, grace, may_finish)
        )

    def start_service(self, port: int, *flags: str | Path) -> ManagedProcess:
        """Start a rollout service, and wait until it answers.

        It keeps its rollouts among the logs. By default they would be in the checkout, with the
        rollouts of its owner's runs, and of earlier tests at the same port.
        """
        command = roles.service("127.0.0.1", port, store=self.folder / f"rollouts-{port}.db")
        service = self.start("service", [*command, *flags])
        self.wait_for_http(f"http://127.0.0.1:{port}/", 180)
        return service

    def wait_until(self, what: str, probe: Probe, seconds: float) -> float:
        """Poll until `probe()` answers None (else: what is missing); returns the seconds it took.

        Fails at the deadline, and at once if any process of this fixture has died, with the last
        lines of its log.
        """
        return wait_until(what, probe, seconds, check=self.supervisor.check)

    def wait_for_http(self, url: str, seconds: float) -> float:
        """Wait until GET `url` answers with a status below 400; see wait_until."""
        return self.wait_until(url, http_probe(url), seconds)

    def wait_for_text(self, process: ManagedProcess, text: str, seconds: float) -> float:
        """Wait until the process has written `text` to its log; see wait_until."""

        def probe() -> str | None:
            written = process.log_path.read_text(errors="replace")
            return (
                None
                if text in written
                else f"{process.name} has not written {text!r}; it last wrote: {process.tail(3)}"
            )

        return self.wait_until(process.name, probe, seconds)

    def stop(self, process: ManagedProcess) -> int:
        """Stop one with all that it started; returns its exit status (128 + n for signal n)."""
        return self.supervisor.stop(process)

    def finish(self, process: ManagedProcess, seconds: float) -> str:
        """Wait for one to end with status 0 while the others live; returns what it wrote."""
        self.supervisor.finish(process, seconds)
        return process.log_path.read_text(errors="replace")

    def kill(self, process: ManagedProcess) -> None:
        """`kill -9` the command itself, as a crash would, and wait until it and all that it started
        are gone.
        """
        os.kill(process.command_pid(), signal.SIGKILL)
        self.supervisor.stop(process)


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the project's commands that a benchmark or a check starts, instead of executing them."""
    from example_trainer.child_processes.processes import ManagedProcess
    from tests.forked_commands import start_guard

    monkeypatch.setattr(ManagedProcess, "start_guard", start_guard)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes that end with the test."""
    started = Processes(tmp_path / "logs")
    with started.supervisor:
        yield started


@pytest.fixture(scope="session")
def session_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Starts processes that several tests share and that end with the session."""
    started = Processes(tmp_path_factory.mktemp("session-logs"))
    with started.supervisor:
        yield started


@pytest.fixture(scope="session")
def free_port() -> Iterator[Callable[[], int]]:
    """Return a function that returns an unused TCP port, another one each time."""
    with PortReservations() as ports:
        yield ports.pick


@pytest.fixture(params=KINDS)
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    """A disk that can be full: a file system of its own, which needs root, and one with a limit on
    the size of files.
    """
    with disk_of_kind(request.param, tmp_path) as disk:
        yield disk
