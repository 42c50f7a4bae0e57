"""Asynchronous runs on a Ray cluster of several nodes on this machine: what is killed comes back, what is accepted is kept."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.child_processes.readiness import wait_until
from tests.conftest import ROOT, Processes
from tests.e2e.async_roles import numbers

pytest.importorskip("ray", reason="Ray is not installed: scripts/setup.sh installs it")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STORE_BYTES = 80 << 20
SECONDS = 150.0


@pytest.fixture(scope="module")
def dashboard(free_port: Callable[[], int]) -> str:
    """Where jobs are handed in."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def cluster(dashboard: str) -> Iterator[Any]:
    """A head with three CPUs, to which tests add nodes."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray reads it so; in nodes, when they start
    arguments = {"num_cpus": 3, "object_store_memory": STORE_BYTES, "include_dashboard": True}
    arguments |= {"dashboard_port": int(dashboard.rpartition(":")[2])}
    made = Cluster(initialize_head=True, head_node_args=arguments)
    yield made
    made.shutdown()


def write_config(folder: Path, **changes: dict[str, Any]) -> Path:
    cpus = {"service_cpus": 0.1, "generator_cpus": 1, "environment_cpus": 0.5, "trainer_cpus": 1}
    orchestration = {"device": "cpu", "generators": 2, "restart_delay": 0.2, "steady_seconds": 5, **cpus}
    sections: dict[str, Any] = {
        "orchestration": orchestration | changes.get("orchestration", {}),
        "inference": {"environment": "arithmetic"} | changes.get("inference", {}),
        "training": {"model_name": str(ROOT / "assets/starter_model")} | changes.get("training", {}),
        "logging": {"folder": str(folder / "run"), "timeline": False},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


class Run:
    """A driver with light roles, and what can be done to it."""

    def __init__(self, processes: Processes, address: str, folder: Path, config: Path) -> None:
        self.folder = folder / "run"
        command = [sys.executable, "-u", ROOT / "tests/e2e/async_roles.py", "drive", "--config", config]
        self.driver: ManagedProcess = processes.start("driver", command, {"RAY_ADDRESS": address}, grace=60, may_finish=True)

    @property
    def log(self) -> str:
        return self.driver.log_path.read_text(errors="replace")

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        def check() -> None:
            assert self.driver.poll() is None or done(), self.log[-3000:]

        wait_until(what, lambda: None if done() else f"the driver said {self.log[-1500:]}", SECONDS, check)

    def trained(self) -> int:
        return len(numbers(self.folder / "trained"))

    def progress(self) -> None:
        """Wait until training has gone on from here."""
        before = self.trained()
        self.wait("progress", lambda: self.trained() >= before + 3)

    def up(self, role: str) -> bool:
        """Whether the last that the driver said of a role is that it runs."""
        said = re.findall(rf"\[Async\] {role} (.*)", self.log)
        return bool(said) and said[-1].startswith("runs")

    def process(self, role: str) -> psutil.Process:
        """The command of a role, whose parent is its guard, whose parent is its actor."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if (
                "guard.py" not in " ".join(words)
                and str(self.folder) in " ".join(words)
                and (role in words or (role == "service" and "atroposlib.cli.run_api" in words))
            ):
                return process
        raise AssertionError(f"{role} does not run")

    def kill(self, *roles: str, actors: bool = False) -> None:
        """`kill -9` the processes of roles, or their actors, at once; wait until they are back and training goes on."""
        found = [self.process(role) for role in roles]
        if actors:
            found = [process.parent().parent() for process in found]  # type: ignore[union-attr]
            assert not any("guard" in " ".join(process.cmdline()) for process in found)
        before = len(self.log)
        for process in found:
            os.kill(process.pid, signal.SIGKILL)
        again = [rf"\[Async\] {role} runs again" for role in roles]
        self.wait(f"{roles} to be back", lambda: all(re.search(line, self.log[before:]) for line in again))
        self.progress()


def test_what_is_killed_comes_back_and_nothing_accepted_is_lost(cluster: Any, processes: Processes, tmp_path: Path) -> None:
    second = cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    run = Run(processes, cluster.address, tmp_path, write_config(tmp_path))
    run.wait("training", lambda: run.trained() >= 3)
    run.kill("environment-1", "trainer", "service")
    run.kill("generator-2", "trainer", "service", actors=True)

    # Not everything had room on the head, so that some of it goes with this node.
    cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    cluster.remove_node(second, allow_graceful=False)
    run.wait("the loss to be seen", lambda: "its node is lost" in run.log)
    everything = {"service", "generator-1", "generator-2", "environment-1", "environment-2", "trainer"}

    run.wait("all to be up again", lambda: all(run.up(role) for role in everything))
    run.progress()

    (run.folder / "enough").touch()
    processes.finish(run.driver, SECONDS)
    trained = numbers(run.folder / "trained")
    accepted = [number for file in run.folder.glob("accepted-*") for number in numbers(file)]
    assert sorted(trained) == sorted(accepted)
    assert "training is complete; all roles are stopped" in run.log
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(run.folder) in " ".join(p.info["cmdline"] or [])]
    assert left == []
    assert {file.stem for file in (run.folder / "logs").glob("*.log")} == everything


def test_a_job_that_is_handed_in_runs_from_a_copy_of_this_repository(
    cluster: Any, dashboard: str, processes: Processes, tmp_path: Path
) -> None:
    """`ray job submit` as docs/async.md has it."""
    folder, ray = tmp_path / "run", Path(sys.executable).with_name("ray")
    words = [ray, "job", "submit", "--address", dashboard, "--working-dir", ROOT, "--", sys.executable, "-u"]
    words += ["tests/e2e/async_roles.py", "drive", "--config", write_config(tmp_path, orchestration={"generators": 1})]
    job = processes.start("job", [*words, "--folder", folder], may_finish=True)

    def trained() -> str | None:
        return None if len(numbers(folder / "trained")) >= 3 else job.log_path.read_text(errors="replace")[-1500:]

    processes.wait_until("training", trained, SECONDS)
    (folder / "enough").touch()
    said = processes.finish(job, SECONDS)
    assert "training is complete; all roles are stopped" in said
    assert "succeeded" in said
    assert sorted(numbers(folder / "trained")) == sorted(numbers(folder / "accepted-environment-1"))


def test_what_cannot_work_is_one_line_and_all_is_stopped(cluster: Any, processes: Processes, tmp_path: Path) -> None:
    def fails(name: str, **changes: Any) -> str:
        folder = tmp_path / name
        (folder / "run").mkdir(parents=True)
        if broken := changes.pop("broken", ""):
            (folder / "run" / f"{broken}.broken").touch()
        run = Run(processes, cluster.address, folder, write_config(folder, **changes))
        wait_until("the end", lambda: None if run.driver.poll() is not None else run.log[-500:], SECONDS)
        assert run.driver.poll() == 1
        processes.supervisor.processes.remove(run.driver)
        left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(run.folder) in " ".join(p.info["cmdline"] or [])]
        assert left == []
        (line,) = [line for line in run.log.splitlines() if line.startswith("ERROR")]
        return line

    small, huge = {"generators": 1}, tmp_path / "huge"
    huge.mkdir()
    sizes = {"num_hidden_layers": 1, "hidden_size": 1 << 20, "intermediate_size": 64, "num_attention_heads": 1, "head_dim": 64}
    described = {"model_type": "qwen3", "num_key_value_heads": 1, "vocab_size": 1 << 20, "tie_word_embeddings": True, **sizes}
    (huge / "config.json").write_text(json.dumps(described))
    holder = {"parameter_servers": 1, "parameter_server_cpus": 0.5, "environment_cpus": 0.2}
    line = fails("memory", orchestration=small | holder, training={"model_name": str(huge)})
    assert re.search(r"parameter-server-1 exited with code 1 .* needs \d+\.\d\d GiB on cpu .*; \d+\.\d\d GiB are free", line)
    assert "cannot place generator-" in fails("large", orchestration={"generators": 9})
    line = fails("nomodel", orchestration=small, training={"model_name": "/no/such/model"})
    assert re.search(r"node localhost \(\S+\) cannot run generator-1: model folder /no/such/model is not there: copy", line)
    line = fails("broken", orchestration=small, broken="environment-1")
    assert re.search(r"environment-1 exited with code 1 .*: ModuleNotFoundError: No module named 'what_it_needs'; log:", line)
