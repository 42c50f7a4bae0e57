"""Asynchronous runs on a Ray cluster of several nodes on this machine: what is killed comes back,
what is accepted is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.child_processes.run_keys import read_keys
from tests.conftest import ROOT, Processes
from tests.e2e.async_roles import numbers
from tests.e2e.conftest import CACHE, NEEDS_RAY
from tests.forked_commands import FOLDER, shared_fork_servers
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, NEEDS_RAY, pytest.mark.e2e, pytest.mark.timeout(540)]

STORE_BYTES = 80 << 20
SECONDS = 150.0
AGENTS = ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent")
STEPS = 8
ROLES = ROOT / "tests/e2e/async_roles.py"


@pytest.fixture(scope="module")
def dashboard(free_port: Callable[[], int]) -> str:
    """Where jobs are handed in."""
    return f"http://127.0.0.1:{free_port()}"


def patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """The same question until it is answered: Ray gives a node half a minute to be known, which a
    busy machine needs alone.
    """

    def asking(*arguments: Any) -> Any:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    return asking


@pytest.fixture(scope="module")
def cluster(dashboard: str, free_port: Callable[[], int]) -> Iterator[Any]:
    """A head with three CPUs, to which tests add nodes."""
    from ray._private import ray_constants, services
    from ray._private.node import Node
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
    from ray.cluster_utils import Cluster

    class OnGivenPorts(Cluster):
        """A node's agents get their ports from the command line. An agent that chose them itself
        would have fifteen seconds to start and to report them, or its node ends. A busy machine
        needs longer. The logs of workers are not followed: Ray would look through all of them again
        and again.
        """

        def add_node(self, **arguments: Any) -> Any:
            ports = {f"{agent}_port": free_port() for agent in AGENTS}
            return super().add_node(include_log_monitor=False, **ports, **arguments)

    start_raylet = Node.start_raylet

    def start_told(self: Any, *arguments: Any) -> None:
        """Ray hands all of these ports to the raylet but this one, which it reads from a file that
        the agent writes.
        """
        port = self.dashboard_agent_listen_port
        persist_port(
            self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port
        )
        start_raylet(self, *arguments)

    with (
        contextlib.nullcontext() if FOLDER in os.environ else shared_fork_servers(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_worker_niceness", "0")  # in nodes, when they start
        patch.setenv("REPORTER_UPDATE_INTERVAL_MS", "60000")  # of figures that no test reads
        patch.setattr(ray_constants, "RAY_DASHBOARD_STARTUP_TIMEOUT_S", SECONDS)
        patch.setattr(services, "get_node", patient(services.get_node))
        patch.setattr(Node, "start_raylet", start_told)
        # Else each node starts a worker for each of its CPUs, in an environment without our actors.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        arguments = {"num_cpus": 3, "object_store_memory": STORE_BYTES, "include_dashboard": True}
        arguments |= {"dashboard_port": int(dashboard.rpartition(":")[2])}
        made = OnGivenPorts(initialize_head=True, head_node_args=arguments)
        yield made
        made.shutdown()


def left(folder: Path) -> list[int]:
    """Processes that write to the logs of a run."""
    return holders("1", lambda path: path.is_relative_to(folder / "logs"))


def holders(descriptor: str, wanted: Callable[[Path], bool]) -> list[int]:
    """Processes that have such a file open, with a descriptor of this pattern."""
    found = []
    for opened in Path("/proc").glob(f"[0-9]*/fd/{descriptor}"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted(opened.readlink()):
                found.append(int(opened.parts[2]))
    return found


class Run:
    """A driver, and what can be done to it and to its roles."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        command: Sequence[str | Path],
        environment: dict[str, str | None] | None = None,
    ) -> None:
        self.folder, self._processes = folder, processes
        words = [*command, "--folder", folder]
        self.driver: ManagedProcess = processes.start(
            "driver", words, environment, grace=60, may_finish=True
        )

    @property
    def log(self) -> str:
        return self.driver.log_path.read_text(errors="replace")

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        def missing() -> str | None:
            ended = self.driver.poll() is not None
            if done():
                return None
            assert not ended, self.log[-3000:]
            return f"the driver said {self.log[-1500:]}"

        self._processes.wait_until(what, missing, SECONDS)

    def up(self, role: str) -> bool:
        """Report if the driver's last line about a role is that it runs."""
        said = re.findall(rf"\[Async\] {role} (.*)", self.log)
        return bool(said) and said[-1].startswith("runs")

    def pids(self, role: str) -> tuple[int, int]:
        """Process ids of a role's command, whose parent is its guard, and of its actor."""
        *_, last = (self.folder / f"pids-{role}").read_text().splitlines()
        guard, actor = (int(pid) for pid in last.split())
        return descendants(guard)[0], actor

    def kill(self, roles: Sequence[str], actors: Sequence[str] = ()) -> None:
        """`kill -9` the processes of roles, or their actors, at once; wait until they are back."""
        victims = [self.pids(role)[0] for role in roles] + [self.pids(role)[1] for role in actors]
        before = len(self.log)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        again = [rf"\[Async\] {role} runs again" for role in (*roles, *actors)]
        self.wait(
            "all to be back", lambda: all(re.search(line, self.log[before:]) for line in again)
        )

    def ask_service(self, path: str) -> dict[str, Any] | None:
        """Return the rollout service's answer; None while it gives none."""
        found = re.findall(r"\[Async\] service on (\S+) port (\d+)", self.log)
        if not found or not self.up("service"):
            return None
        key = read_keys(self.folder)["ROLLOUT_API_KEY"]
        url, headers = "http://{}:{}".format(*found[-1]), {"Authorization": f"Bearer {key}"}
        try:
            answer: dict[str, Any] = httpx.get(url + path, headers=headers, timeout=120).json()
        except httpx.HTTPError:
            return None
        return answer

    def kill_driver(self, everything: bool = False) -> None:
        """`kill -9` the driver itself, which may be another process than what was started; wait
        until all has ended.

        Args:
            everything: every process of every role too, so that no process can end in order.
        """

        def missing() -> str | None:
            found = left(self.folder)
            for pid in found if everything else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return f"{found} run" if found else None

        (driver,) = holders("*", lambda path: path == self.folder / ".driver-lock")
        os.kill(driver, signal.SIGKILL)
        missing()
        assert self.driver.guard.wait(SECONDS) != 0
        self._processes.supervisor.processes.remove(self.driver)
        self._processes.wait_until("the end of all roles", missing, SECONDS)

    def finish(self) -> str:
        """Wait for its good end; return the driver's output."""
        said = self._processes.finish(self.driver, SECONDS)
        assert "training is complete; all roles are stopped" in said
        assert left(self.folder) == []
        return said


def test_what_is_killed_comes_back_and_nothing_accepted_is_lost(
    cluster: Any, dashboard: str, processes: Processes, tmp_path: Path
) -> None:
    """Light roles beside the real service. The first driver is killed; the next is handed in as a
    job, as docs/async.md has it: from a copy of this repository."""
    config = tmp_path / "run.yaml"
    write_light_settings(config)
    second = cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    drive = [sys.executable, "-u", ROLES.relative_to(ROOT), "drive", "--config", config]
    run = Run(processes, tmp_path / "run", drive, {"RAY_ADDRESS": cluster.address})

    def trained() -> list[int]:
        return numbers(run.folder / "trained")

    def progress() -> None:
        before = len(trained())
        run.wait("progress", lambda: len(trained()) >= before + 3)

    progress()
    run.kill_driver()
    assert len(numbers(run.folder / "saved")) == 1  # the trainer had time to end

    submit = [
        Path(sys.executable).with_name("ray"),
        "job",
        "submit",
        "--address",
        dashboard,
        "--working-dir",
        ROOT,
        "--",
    ]
    run = Run(processes, tmp_path / "run", [*submit, *drive])
    progress()
    run.kill(["environment-1", "trainer"], actors=["generator-2", "service"])
    progress()
    run.kill([], actors=["environment-2", "reference-1", "trainer"])
    assert len(numbers(run.folder / "saved")) == 2
    progress()

    # Not everything had room on the head, so that some of it goes with this node.
    third = cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    cluster.remove_node(second, allow_graceful=False)
    run.wait("the loss to be seen", lambda: "its node is lost" in run.log)
    everything = {
        "service",
        "generator-1",
        "generator-2",
        "environment-1",
        "environment-2",
        "reference-1",
        "trainer",
    }
    run.wait("all to be up again", lambda: all(run.up(role) for role in everything))
    progress()

    finish_and_compare(run, everything)
    cluster.remove_node(third)


def finish_and_compare(run: Run, everything: set[str]) -> None:
    """Expect all that was accepted to have been trained on, once."""
    (run.folder / "enough").touch()
    assert "succeeded" in run.finish()
    accepted = [number for file in run.folder.glob("accepted-*") for number in numbers(file)]
    assert sorted(numbers(run.folder / "trained")) == sorted(accepted)
    assert numbers(run.folder / "overlaps") == []
    assert {file.stem for file in (run.folder / "logs").glob("*.log")} == everything


def write_light_settings(config: Path) -> None:
    """A run of two generators and a reference worker."""
    cpus = {
        "service_cpus": 0.1,
        "generator_cpus": 1,
        "environment_cpus": 0.5,
        "reference_cpus": 0.1,
        "trainer_cpus": 1,
    }
    several = {"generators": 2, "reference_workers": 1}
    sections = {
        "orchestration": {
            "device": "cpu",
            "restart_delay": 0.2,
            "steady_seconds": 5,
            **several,
            **cpus,
        },
        "inference": {"environment": "arithmetic"},
        "training": {"model_name": str(ROOT / "assets/starter_model"), "kl_coef": 0.01},
        "logging": {"timeline": False},
    }
    config.write_text(yaml.safe_dump(sections))


CONFIGS = ROOT / "example_trainer/configs"


def real_run(cluster: Any, processes: Processes, folder: Path, config: Path, steps: int) -> Run:
    """A driver of real roles."""
    words = [sys.executable, "-u", ROLES, "drive-real", "--config", config, "--steps", str(steps)]
    return Run(processes, folder, words, {"RAY_ADDRESS": cluster.address})


def steps_of(run: Run) -> list[int]:
    return [row["step"] for row in json_rows(run.folder / "trainer" / "metrics.jsonl")]


def test_what_a_lost_node_had_comes_back_on_another(
    cluster: Any, processes: Processes, tmp_path: Path
) -> None:
    """Every kind of role: the weights come by way of a parameter server. The trainer has two ranks,
    which it starts itself, and no reference of its own. The node goes with vLLM's server and its
    environment on it; reference worker and parameter server are killed in the same moment, wherever
    they are."""
    sections = yaml.safe_load((CONFIGS / "arithmetic_async_cpu.yaml").read_text())
    sections["orchestration"] |= {
        "reference_workers": 1,
        "parameter_servers": 1,
        "trainer_ranks": 2,
    }
    sections["orchestration"] |= {"reference_cpus": 0.1, "parameter_server_cpus": 0.1}
    # The head, of three CPUs, has no room for a generator with its environment beside the service.
    sections["orchestration"] |= {
        "service_cpus": 1.5,
        "generator_cpus": 0.9,
        "environment_cpus": 0.8,
    }
    sections["inference"] |= {
        "server_args": list(CACHE),
        "max_response_tokens": 48,
        "max_model_length": 256,
    }
    sections["training"] |= {"kl_coef": 0.01, "batch_size": 16, "seq_len": 256}
    config = tmp_path / "all-roles.yaml"
    config.write_text(yaml.safe_dump(sections))
    lost = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    run = real_run(cluster, processes, tmp_path / "run", config, STEPS)
    run.wait("a step", lambda: bool(steps_of(run)))
    logs, roles = (
        run.folder / "logs",
        ("generator-1", "environment-1", "reference-1", "parameter-server-1"),
    )
    cluster.remove_node(lost, allow_graceful=False)
    for victim in holders("1", lambda path: path in [logs / f"{role}.log" for role in roles]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    run.wait(
        "the loss to be seen",
        lambda: bool(re.search(r"\[Async\] generator-1 .*; it is started again", run.log)),
    )
    before = steps_of(run)[-1]
    other = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    run.wait(
        "all to be back", lambda: all(f"[Async] {role} runs again" in run.log for role in roles)
    )
    run.finish()
    cluster.remove_node(other)
    assert steps_of(run) == list(range(1, STEPS + 1))
    _, again = (logs / "generator-1.log").read_text().split("===== started again")
    served = [int(version) for version in re.findall(r"Serving weight version (\d+)", again)]
    assert served
    assert before - 1 <= served[0] <= STEPS
    assert served == sorted(served)
    for life in (logs / "reference-1.log").read_text().split("===== started again"):
        assert "Working for the trainer of" in life


def test_a_run_in_turns_that_is_killed_whole_goes_on_as_if_it_were_not(
    cluster: Any, processes: Processes, tmp_path: Path
) -> None:
    """As docs/async.md has it. The content of a batch, and every bit of the weights, are the same.
    One run is left alone. Every process of the other is killed when it has a part of its second
    batch.
    """
    sections = yaml.safe_load((CONFIGS / "arithmetic_sync_cpu.yaml").read_text())
    sections["orchestration"]["exact_resume"] = True
    del sections["inference"]["max_sequences"]
    sections["inference"] |= {
        "group_size": 4,
        "max_response_tokens": 24,
        "max_model_length": 256,
        "server_args": list(CACHE),
    }
    sections["training"] |= {"batch_size": 16, "seq_len": 256, "checkpoint_interval": 1, "lr": 1e-3}
    config = tmp_path / "exact.yaml"
    config.write_text(yaml.safe_dump(sections))

    def learned(run: Run) -> tuple[dict[int, tuple[str, float, int]], str]:
        """Return the weights' checksum, the mean reward and the tokens of each step, and the last
        weights' digest.
        """
        run.finish()
        rows = json_rows(run.folder / "trainer" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert re.search(
            r"\[Async\] step 2/2  reward \S+  success \S+ %  \d+ tok/s  staleness 0\.0 \(max 0\)",
            run.log,
        )
        assert [0 <= row["success_rate"] <= 1 for row in rows] == [True, True]
        weights = (run.folder / "checkpoints" / "step_2" / "model.safetensors").read_bytes()
        learned = {
            row["weight_version"]: (row["checksum"], row["reward_mean"], row["tokens"])
            for row in rows
        }
        return learned, hashlib.sha256(weights).hexdigest()

    expected = learned(real_run(cluster, processes, tmp_path / "whole", config, 2))
    assert len({checksum for checksum, *_ in expected[0].values()}) == 2
    run = real_run(cluster, processes, tmp_path / "killed", config, 2)

    def half_a_batch() -> bool:
        stats = run.ask_service("/stats")
        return bool(
            stats
            and stats["trainer_version"] == 1
            and 0 < stats["queue"]["groups"] < 4
            and not stats["leases"]
        )

    run.wait("half a batch", half_a_batch)
    run.kill_driver(everything=True)
    assert learned(real_run(cluster, processes, tmp_path / "killed", config, 2)) == expected


def test_a_run_that_the_cluster_cannot_hold_is_one_line(
    cluster: Any, processes: Processes, tmp_path: Path
) -> None:
    """Typed as docs/async.md has it, and refused because of Ray's list of nodes."""
    config = tmp_path / "large.yaml"
    shipped = (ROOT / "example_trainer/configs/arithmetic_async_cpu.yaml").read_text()
    config.write_text(shipped.replace("generators: 1", "generators: 50"))
    environment = {"LOCKSTEP_VENV": sys.prefix, "RAY_ADDRESS": cluster.address}
    words = [ROOT / "scripts/start.sh", "--ray", "--config", config, "--folder", tmp_path / "run"]
    driver = processes.start("driver", words, environment)
    assert driver.guard.wait(SECONDS) == 1
    processes.supervisor.processes.remove(driver)
    (line,) = [
        line for line in driver.log_path.read_text().splitlines() if line.startswith("ERROR")
    ]
    assert re.search(
        r" the cluster cannot place generator-\d+: it asks 0.8 CPU on one node, after \d+ of 52 ",
        line,
    )
    assert left(tmp_path / "run") == []
