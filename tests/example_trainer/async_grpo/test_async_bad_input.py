"""Configurations that cannot work, with real processes on this machine and no Ray: one line, all is
stopped, accepted groups are kept.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from example_trainer.async_grpo import actor
from example_trainer.async_grpo.actor import RoleProcess, project_ray
from example_trainer.async_grpo.driver import Driver, RunFailed
from example_trainer.async_grpo.restarts import State
from example_trainer.async_grpo.roles import Demand, Node, Role
from example_trainer.async_grpo.service import ServiceFleet
from example_trainer.async_grpo.settings import read_settings
from tests.conftest import ROOT
from tests.e2e.async_roles import light_commands, numbers
from tests.example_trainer.async_grpo.fake_cluster import Answer, FakeSilences
from tests.forked_commands import ForkedProcess

pytestmark = pytest.mark.nightly

KEYS = {"ROLLOUT_API_KEY": "r" * 32, "VLLM_API_KEY": "v" * 32}


class SeatHere:
    """Stands for an actor, in this process."""

    def __init__(self, role: Role, folder: str) -> None:
        self.process = RoleProcess(role.name, folder)

    def ask(self, method: str, *arguments: Any) -> Answer:
        return Answer(getattr(self.process, method)(*arguments))

    def node(self) -> str:
        return "here"

    def kill(self) -> None:
        self.process.stop()
        if self.process._ports is not None:  # as for an actor that ends
            self.process._ports.close()


class ThisMachine:
    """A cluster of one node that has room for everything."""

    def __init__(self) -> None:
        self.version = project_ray()
        self.seats: list[SeatHere] = []

    def nodes(self) -> list[Node]:
        return [Node("node here", {"CPU": 64.0, "node:here": 1.0})]

    def host(self, node: str) -> str:
        return "localhost"

    def home(self) -> str:
        return "node:here"

    def lives(self, node: str) -> bool:
        return True

    def reserve(self, demand: Demand) -> None:
        pass

    def seat(self, role: Role, folder: str, life: int) -> SeatHere:
        self.seats.append(SeatHere(role, folder))
        return self.seats[-1]

    def close(self) -> None:
        pass


class Failing:
    """A run that cannot work, and what it leaves.

    Args:
        light: kinds of its roles that weigh nothing (tests/e2e/async_roles.py); the others are the
            real ones.
        sections: of its configuration.
    """

    def __init__(self, folder: Path, *light: str, **sections: dict[str, Any]) -> None:
        values = {
            "training": {"model_name": "assets/starter_model"},
            "logging": {"folder": str(folder / "run")},
        }
        values["orchestration"] = {"device": "cpu"} | sections.pop("orchestration", {})
        (folder / "run.yaml").write_text(yaml.safe_dump(values | sections))
        self.settings, self.cluster = read_settings(folder / "run.yaml"), ThisMachine()
        fleet, commands = (
            ServiceFleet(KEYS["ROLLOUT_API_KEY"]),
            light_commands(*light)(self.settings, KEYS),
        )
        self.driver = Driver(
            self.settings, self.cluster, KEYS, fleet, FakeSilences("r"), self.post, commands
        )
        self.posted = False

    def post(self) -> None:
        """Have the service take a group, once it is there; called by the driver between two looks."""
        service = self.driver.keepers["service"]
        if service.state is not State.UP or self.posted:
            return
        assert service.place is not None
        headers = {"Authorization": f"Bearer {KEYS['ROLLOUT_API_KEY']}"}
        # One sequence, and the trainer's batches have two: it waits, whichever process is up first.
        group = {"tokens": [[1, 2, 0]], "masks": [[-100, 2, 0]], "scores": [1.0]}
        httpx.post(
            f"{service.place.url}/scored_data",
            json=group,
            headers=headers,
            timeout=120,
            trust_env=False,
        ).raise_for_status()
        self.posted = True

    def line(self) -> str:
        """The line with which it ends."""
        with pytest.raises(RunFailed) as caught:
            self.driver.run()
        said = str(caught.value)
        assert "\n" not in said
        for seat in self.cluster.seats:
            assert seat.process._process is None or seat.process._process.poll() is not None, said
        return said

    def all_is_kept(self) -> bool:
        """Report if the groups that the service has accepted are in its store."""
        accepted = self.posted + len(numbers(self.settings.folder / "accepted-environment-1"))
        with closing(sqlite3.connect(self.settings.folder / "rollouts.db")) as store:
            (kept,) = store.execute("SELECT count(*) FROM bodies").fetchone()
        return self.posted and int(kept) >= accepted


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    monkeypatch.setattr(actor, "ManagedProcess", ForkedProcess)
    return lambda *light, **sections: Failing(tmp_path, *light, **sections)


def test_an_environment_whose_file_cannot_be_imported(
    failing: Callable[..., Failing], tmp_path: Path
) -> None:
    """The generator weighs nothing; service and environment are real."""
    file = tmp_path / "broken_server.py"
    file.write_text("import what_it_needs\n")
    made = failing("generator", "trainer", inference={"environment": str(file)})
    said = made.line()
    assert said.startswith("environment-1 exited with code 1 after ")
    assert (
        f"ModuleNotFoundError: No module named 'what_it_needs'; log: {made.settings.folder}/logs/environment-1.log"
        in said
    )
    assert made.all_is_kept()


def test_a_parameter_server_without_enough_memory(
    failing: Callable[..., Failing], tmp_path: Path
) -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 1 << 20,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "head_dim": 64,
    }
    described = {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "model_type": "qwen3",
        "num_key_value_heads": 1,
        "vocab_size": 1 << 20,
        "tie_word_embeddings": True,
        **sizes,
    }
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "config.json").write_text(json.dumps(described))
    made = failing(
        "generator", "environment", "trainer",
        orchestration={"parameter_servers": 1}, training={"model_name": str(tmp_path / "huge")},
    )  # fmt: skip
    said = made.line()
    assert said.startswith("parameter-server-1 exited with code 1 after ")
    needed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert float(said.split(" needs ")[1].split(" GiB on cpu")[0]) > needed
    assert " GiB are free" in said
    assert made.all_is_kept()


def test_a_node_that_lacks_what_a_role_needs(
    failing: Callable[..., Failing], tmp_path: Path
) -> None:
    said = failing("generator", training={"model_name": "/no/such/model"}).line()
    assert (
        "cannot run generator-1: model folder /no/such/model is not there: copy it to this node"
        in said
    )
    said = failing("generator", "trainer", inference={"environment": "no_such_server.py"}).line()
    assert (
        f"cannot run environment-1: environment file {ROOT}/no_such_server.py is not there: copy it to this node"
        in said
    )
