"""A Ray cluster of two hosts, by the commands of docs/several-machines.md. Each host sees its own
processes and files in /tmp/ray alone, and reaches the other over the network.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import CACHE, FORKED_ENGINES, NEEDS_RAY
from tests.e2e.two_hosts import Host, NoNamespaces, hosts
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, NEEDS_RAY, pytest.mark.e2e, pytest.mark.timeout(900)]

SECONDS = 400.0
SHIPPED = "example_trainer/configs/qwen3b_async_grpo.yaml"
OVER_SSH = {
    "ssh": 'there=$HOMES/$1; shift; cd "$there" && exec "$@"',
    "scp": '[ "$1" = -p ] && exec cp -p "$2" "$HOMES/${3%%:*}/${3#*:}"',
}
"""Stand-ins for ssh and scp, on hosts whose home folders both can see: no host has an sshd."""
VLLM_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
VARIABLES = FORKED_ENGINES | {
    # vLLM's knowledge of its models is there already, and not in a host's home folder.
    "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or str(VLLM_CACHE),
    # Else each node starts a worker for each of its CPUs, in an environment without our actors.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""Environment of all typed commands; Ray's nodes hand it on to the roles."""


def blocks() -> dict[str, str]:
    """The commands of the section on two machines, by what they are for."""
    page = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    section = page.split("## On two machines", 1)[1].split("\n## ", 1)[0]
    found = [
        textwrap.dedent(block) for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    ]
    both, head, join, run = found
    assert f"`{patiently(join)}`" in section
    token, start = head.rsplit("\n", 2)[0], head.splitlines()[-1]
    return {
        "both": both,
        "head": f"{token}\n{patiently(start)}\n",
        "join": patiently(join),
        "run": run,
    }


def patiently(start: str) -> str:
    """Options of Ray on a machine that may be busy."""
    return f"until {start.strip()}; do ray stop; sleep 5; done"


@dataclass
class Cluster:
    """Two hosts with a home folder and a shell each."""

    processes: Processes
    folder: Path
    hosts: dict[str, Host]

    def start(self, name: str, lines: str, **changes: str) -> ManagedProcess:
        """Type lines on a host, in a new shell that begins with those for both."""
        text = blocks()["both"] + lines
        for old, new in {
            "/path/to/checkout": str(ROOT),
            ". .venv/": f". {sys.prefix}/",
            **changes,
        }.items():
            assert old in text
            text = text.replace(old, new)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        variables = {
            "HOME": str(self.folder / "homes" / name),
            "HOMES": str(self.folder / "homes"),
            "PATH": path,
        } | VARIABLES
        command = self.hosts[name].command("bash", "-ec", text, directory=self.folder)
        return self.processes.start(name, command, variables, grace=60, may_finish=True)

    def type(self, name: str, lines: str, **changes: str) -> str:
        """The same, to its end; returns what it wrote."""
        return self.processes.finish(self.start(name, lines, **changes), SECONDS)


@contextmanager
def two_hosts(processes: Processes, folder: Path) -> Iterator[Cluster]:
    for name, script in OVER_SSH.items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    try:
        with hosts(folder, "host-a", "host-b", own_processes="/tmp/ray") as network:
            for name in network.hosts:
                (folder / "homes" / name).mkdir(parents=True)
            with processes.supervisor:
                yield Cluster(processes, folder, dict(network.hosts))
    except NoNamespaces as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


def test_the_documented_commands_start_a_cluster_of_two_hosts_and_train_on_it(
    processes: Processes, tmp_path: Path
) -> None:
    """All roles are real.

    The trainer's host has no room for the generator, which is on the other one with its
    environment.
    """
    from ray._private.utils import get_num_cpus

    cores = get_num_cpus()
    config = tmp_path / "run.yaml"
    write_settings(config, cores)
    typed = blocks()
    direct, job = typed["run"].strip().splitlines()
    with two_hosts(processes, tmp_path) as cluster:
        cluster.type("host-a", typed["head"])
        cluster.type("host-b", typed["join"])
        a, b = (cluster.hosts[name].address for name in ("host-a", "host-b"))
        # Ray's report of the nodes follows a join some seconds later.
        joined = f"for n in $(seq 60); do ray status | grep -q '/{2.0 * cores} CPU' && break; sleep 1; done"
        refusal = (
            f"{joined}\nray status\n! {direct} --folder {tmp_path / 'refused'}\n"  # it is for GPUs
        )
        refused = cluster.type("host-a", refusal)
        assert f"/{2.0 * cores} CPU" in refused
        assert re.search(
            rf"cannot place .*; the cluster: (?=.*{a} has {cores} CPU).*{b} has {cores} CPU",
            refused,
        )
        said = cluster.type(
            "host-a", job, **{SHIPPED: str(config), "/shared/run": str(tmp_path / "run")}
        )
        for role, host in {
            "service": a,
            "trainer": a,
            "generator-1": b,
            "environment-1": b,
        }.items():
            assert f"[Async] {role} on {host}" in said
        assert "training is complete; all roles are stopped" in said
        assert [
            row["step"] for row in json_rows(tmp_path / "run" / "trainer" / "metrics.jsonl")
        ] == [1, 2]


def write_settings(config: Path, cores: float) -> None:
    """A small run, with an environment that has no room on the trainer's host."""
    sections = yaml.safe_load(
        (ROOT / "example_trainer/configs/arithmetic_async_cpu.yaml").read_text()
    )
    sections["orchestration"] |= {
        "steps": 2,
        "service_cpus": 1,
        "trainer_cpus": 1,
        "generator_cpus": 1,
    }
    sections["orchestration"] |= {"environment_cpus": cores - 1.5}
    sections["inference"] |= {
        "group_size": 4,
        "max_response_tokens": 16,
        "max_model_length": 128,
        "server_args": list(CACHE),
    }
    sections["training"] |= {
        "model_name": str(ROOT / "assets/starter_model"),
        "batch_size": 8,
        "seq_len": 128,
    }
    config.write_text(yaml.safe_dump(sections))
