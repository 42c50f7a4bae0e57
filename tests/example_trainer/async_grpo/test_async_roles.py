"""Which processes a configuration becomes."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from atroposlib.cli import run_api
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.runner.command_line import parse_flags
from atroposlib.service.app import make_app
from atroposlib.service.service import RolloutService
from atroposlib.service.store import MemoryStore
from example_trainer import reference_worker
from example_trainer.async_grpo.actor import PYTHON, Address
from example_trainer.async_grpo.cluster import ClusterError, RayCluster
from example_trainer.async_grpo.roles import (
    NEEDED_KEYS,
    STOP_ORDER,
    Commands,
    Node,
    Role,
    demands_of,
    natural,
    refusal,
    roles_of,
)
from example_trainer.async_grpo.settings import Settings, make_settings, read_settings
from example_trainer.batch.client import registration
from example_trainer.command_line import parse_config, parse_section
from example_trainer.parameter_server.options import ParameterServerOptions
from tests.example_trainer.async_grpo.test_async_settings import CONFIGS

KEYS = {"ROLLOUT_API_KEY": "secret-r", "VLLM_API_KEY": "secret-v"}


def settings(training: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Settings:
    values = {
        "training": {"model_name": "assets/starter_model"} | (training or {}),
        "logging": {"folder": "/tmp/run"},
    }
    return make_settings(values | sections, Path("x.yaml"))


def places_of(roles: list[Role]) -> dict[str, Address]:
    return {
        role.name: Address(
            "localhost",
            tuple(range(7000 + 10 * n, 7000 + 10 * n + role.ports)),
            ("3",) * ("GPU" in role.resources),
        )
        for n, role in enumerate(roles)
    }


def test_a_generator_lies_together_with_its_environments() -> None:
    made = settings(
        orchestration={
            "generators": 2,
            "environments_per_generator": 2,
            "trainer_ranks": 2,
            "reference_workers": 0,
        },
        inference={"tensor_parallel_size": 2},
    )
    roles = roles_of(made)
    demands = {demand.name: demand for demand in demands_of(roles)}
    assert demands.keys() == {"service", "generator-1", "generator-2", "trainer"}
    assert list(demands["generator-2"].bundles) == [
        "generator-2",
        "environment-2-1",
        "environment-2-2",
    ]
    assert demands["generator-2"].total == {"GPU": 2.0, "CPU": 6.0}
    assert demands["trainer"].total == {"GPU": 2.0, "CPU": 4.0}
    assert {role.kind for role in roles} <= NEEDED_KEYS.keys() == set(STOP_ORDER)


def test_with_one_copy_of_the_weights_trainer_and_generator_share_a_node_and_its_gpu() -> None:
    made = settings({"colocate": True})
    roles = roles_of(made)
    (demand,) = [demand for demand in demands_of(roles) if "trainer" in demand.bundles]
    assert demand.name == "generator-1"
    assert demand.total["GPU"] == 1.0
    launch = Commands(made, KEYS).launch(
        next(r for r in roles if r.kind == "trainer"), places_of(roles)
    )
    assert launch.variables["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_trainers_file_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    made = settings(
        {"max_staleness": 2}, orchestration={"generators": 11, "device": "cpu", "steps": 5}
    )
    roles = roles_of(made)
    launch = Commands(made, KEYS).launch(
        next(r for r in roles if r.kind == "trainer"), places_of(roles)
    )
    file = tmp_path / "trainer.yaml"
    file.write_text(launch.files["trainer.yaml"])
    config = parse_config(["--config", str(file)])
    assert config.vllm_servers[0] == places_of(roles)["generator-1"].server
    assert config.vllm_servers[10] == places_of(roles)["generator-11"].server
    assert (config.resume, config.training_steps, config.max_staleness) == ("auto", 5, 2)
    assert launch.arguments[:2] == (PYTHON, "-u")
    assert not any("secret" in text for text in (*launch.arguments, *launch.files.values()))


def test_a_trainer_of_several_ranks_is_told_their_number_on_cpus_too() -> None:
    made = settings(orchestration={"device": "cpu", "trainer_ranks": 2, "trainer_cpus": 6})
    roles = roles_of(made)
    role = next(r for r in roles if r.kind == "trainer")
    assert role.resources == {"CPU": 6}
    launch = Commands(made, KEYS).launch(role, places_of(roles))
    assert launch.arguments[:3] == (PYTHON, "-u", "example_trainer/grpo.py")
    assert yaml.safe_load(launch.files["trainer.yaml"])["ranks"] == 2
    assert launch.variables["OMP_NUM_THREADS"] == "3"


def test_how_rollouts_are_used_again_goes_from_the_configuration_to_the_rollout_service(
    tmp_path: Path,
) -> None:
    """By way of the trainer's file and its registration with a service that is real but for its
    socket.
    """
    made = settings({"max_staleness": 6, "replay": "uniform", "max_reuse": 3, "seed": 11})
    roles = roles_of(made)
    file = tmp_path / "trainer.yaml"
    file.write_text(
        Commands(made, KEYS)
        .launch(next(r for r in roles if r.kind == "trainer"), places_of(roles))
        .files["trainer.yaml"]
    )
    told = asdict(registration(parse_config(["--config", str(file)]), 0))

    async def stats() -> dict[str, Any]:
        service = RolloutService(MemoryStore())
        try:
            transport = httpx.ASGITransport(make_app(service))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                (await client.post("/register", json=told)).raise_for_status()
                answer: dict[str, Any] = (await client.get("/stats")).raise_for_status().json()
                return answer
        finally:
            await service.committer.close()

    found = asyncio.run(stats())
    replay = {name: found["replay"][name] for name in ("policy", "max_reuse", "seed")}
    assert replay == {"policy": "uniform", "max_reuse": 3, "seed": 11}
    assert found["max_staleness"] == 6


def test_keys_go_to_who_needs_them_as_variables_alone() -> None:
    made = settings(
        orchestration={"device": "cpu"}, inference={"environment": "arithmetic", "seed": 1}
    )
    roles = roles_of(made)
    for role in roles:
        launch = Commands(made, KEYS).launch(role, places_of(roles))
        has = {name for name in KEYS if launch.variables[name]}
        assert has == set(NEEDED_KEYS[role.kind])
        assert not any("secret" in word for word in launch.arguments)


def test_the_service_names_the_generators_to_which_it_may_send_their_key() -> None:
    made = settings(
        orchestration={"generators": 2, "device": "cpu"}, inference={"environment": "arithmetic"}
    )
    roles = roles_of(made)
    places, service = places_of(roles), next(role for role in roles if role.kind == "service")
    assert service.knows == ("generator-1", "generator-2")
    arguments = Commands(made, KEYS).launch(service, places).arguments
    named = [after for word, after in itertools.pairwise(arguments) if word == "--vllm-server"]
    assert named == [places["generator-1"].url, places["generator-2"].url]


def test_an_environment_uses_its_own_generator_and_is_bound_to_it() -> None:
    made = settings(
        orchestration={"generators": 2, "device": "cpu"},
        inference={"environment": "my/env.py", "seed": 5},
    )
    roles = roles_of(made)
    places = places_of(roles)
    role = next(r for r in roles if r.name == "environment-2")
    words = Commands(made, KEYS).launch(role, places).arguments
    assert words[2] == "my/env.py"
    assert words[words.index("--openai.base_url") + 1] == places["generator-2"].url
    assert role.bound == ("service", "generator-2")
    other = (
        Commands(made, KEYS)
        .launch(next(r for r in roles if r.name == "environment-1"), places)
        .arguments
    )
    assert other[other.index("--env.seed") + 1] != words[words.index("--env.seed") + 1]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_run_that_is_resumed_exactly_takes_nothing_that_time_decides(
    device: str, tmp_path: Path
) -> None:
    """On CPUs one sequence and one thread at a time; on GPUs deterministic mode sees to that, at
    its full width.
    """
    training = {"deterministic": True} if device == "gpu" else {}
    made = settings(
        training,
        orchestration={
            "device": device,
            "exact_resume": True,
            "trainer_cpus": 4,
            "generator_cpus": 4,
        },
    )
    roles = roles_of(made)
    places = places_of(roles)
    launches = {role.kind: Commands(made, KEYS).launch(role, places) for role in roles}
    generator, environment = launches["generator"].arguments, launches["environment"].arguments
    (tmp_path / "trainer.yaml").write_text(launches["trainer"].files["trainer.yaml"])
    config = parse_config(["--config", str(tmp_path / "trainer.yaml")])
    assert environment[environment.index("--env.exact_resume") + 1] == "true"
    assert (config.oldest_rollouts, config.resume) == (0, "auto")
    one_by_one = (
        "--max-num-seqs" in generator and generator[generator.index("--max-num-seqs") + 1] == "1"
    )
    assert (
        one_by_one
        == ("--no-enable-prefix-caching" in generator)
        == (config.num_threads == 1)
        == (device == "cpu")
    )
    if device == "cpu":
        assert {launch.variables["OMP_NUM_THREADS"] for launch in launches.values()} == {"1"}
    else:
        assert "--deterministic" in generator
        assert config.deterministic


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.name)
def test_every_program_takes_what_the_configurations_that_we_ship_make_of_it(
    file: Path, tmp_path: Path
) -> None:
    """But for vLLM's server, whose flags only vLLM knows."""
    made = read_settings(file)
    roles = roles_of(made)
    for role in roles:
        launch = Commands(made, KEYS).launch(role, places_of(roles))
        program, words = launch.arguments[-1], list(launch.arguments)
        if role.kind == "service":
            run_api.parse_arguments(words[words.index("atroposlib.cli.run_api") + 1 :])
        elif role.kind == "environment":
            module = importlib.import_module(f"environments.{made.inference.environment}_server")
            found = [
                c
                for c in vars(module).values()
                if isinstance(c, type) and c.__module__ == module.__name__
            ]
            (environment,) = [c for c in found if issubclass(c, BaseEnv)]
            known = parse_flags(
                words[words.index("serve") + 1 :], type(environment.config_init()[0])
            )
            assert known["env"]["group_size"] == str(made.inference.group_size)
        elif role.kind == "parameter-server":
            parse_section(
                ParameterServerOptions,
                "p",
                words[words.index("example_trainer.parameter_server") + 1 :],
            )
        elif role.kind == "reference":
            reference_worker.parse_arguments(
                words[words.index("example_trainer.reference_worker") + 1 :]
            )
        elif role.kind == "trainer":
            (tmp_path / "trainer.yaml").write_text(launch.files["trainer.yaml"])
            config = parse_config(["--config", str(tmp_path / "trainer.yaml")])
            assert program == str(made.folder / "trainer.yaml")
            assert config.training_steps == made.orchestration.steps
    if file.name == "qwen3b_async_grpo.yaml":
        assert sum(role.resources.get("GPU", 0) for role in roles) == 8
        assert {"reference-1", "parameter-server-1"} <= {role.name for role in roles}


@pytest.mark.parametrize("gpus", [6, 2])
def test_the_large_configuration_on_fewer_gpus_is_as_its_head_says(gpus: int) -> None:
    (file,) = [one for one in CONFIGS if one.name == "qwen3b_async_grpo.yaml"]
    sections = yaml.safe_load(file.read_text())
    for section, left_out in (
        ("orchestration", ("reference_workers", "parameter_servers")),
        ("inference", ("weight_sync_every",)),
        ("training", ("push_every",)),
    ):
        for key in left_out:
            del sections[section][key]
    if gpus == 2:
        sections["orchestration"] |= {"generators": 1, "trainer_ranks": 1}
        sections["inference"] |= {"tensor_parallel_size": 1}
    roles = roles_of(make_settings(sections, file))
    node = Node("node a", {"GPU": float(gpus), "CPU": 32.0})
    assert sum(role.resources.get("GPU", 0) for role in roles) == gpus
    assert refusal(demands_of(roles), [node]) is None


def test_only_the_first_life_of_a_server_forgets_what_was_published() -> None:
    made = settings(orchestration={"device": "cpu"})
    roles = roles_of(made)
    role = next(r for r in roles if r.kind == "generator")
    commands = Commands(made, KEYS)
    assert commands.launch(role, places_of(roles)).stale == (
        "generator-1/vllm_bridge_config*.json",
    )
    assert commands.launch(role, places_of(roles), first=False).stale == ()


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["g-10", "g-9", "trainer"], key=natural) == ["g-9", "g-10", "trainer"]


def test_the_trainers_file_holds_plain_values() -> None:
    made = settings({"save_path": "/tmp/x"})
    roles = roles_of(made)
    launch = Commands(made, KEYS).launch(
        next(r for r in roles if r.kind == "trainer"), places_of(roles)
    )
    assert yaml.safe_load(launch.files["trainer.yaml"])["save_path"] == "/tmp/x"


def test_a_parameter_server_takes_its_command() -> None:
    made = settings(
        orchestration={"generators": 2, "parameter_servers": 2}, inference={"weight_sync_every": 3}
    )
    roles = roles_of(made)
    launch = Commands(made, KEYS).launch(
        next(r for r in roles if r.name == "parameter-server-2"), places_of(roles)
    )
    program = launch.arguments.index("example_trainer.parameter_server")
    options = parse_section(
        ParameterServerOptions, "parameter_server", launch.arguments[program + 1 :]
    )
    assert (options.part, options.pull_every, options.device) == ("2/2", 3, "cuda")
    assert options.vllm_servers == [
        places_of(roles)[name].server for name in ("generator-1", "generator-2")
    ]
    trainer = Commands(made, KEYS).launch(
        next(r for r in roles if r.kind == "trainer"), places_of(roles)
    )
    values = yaml.safe_load(trainer.files["trainer.yaml"])
    assert values["weight_bridge_mode"] == "parameter_server"
    assert len(values["parameter_servers"]) == 2
    assert "vllm_servers" not in values


def test_a_parameter_server_may_hold_the_weights_of_gpus_in_the_hosts_memory() -> None:
    made = settings(orchestration={"parameter_servers": 1, "parameter_server_gpus": 0})
    roles = roles_of(made)
    role = next(r for r in roles if r.kind == "parameter-server")
    assert "GPU" not in role.resources
    launch = Commands(made, KEYS).launch(role, places_of(roles))
    program = launch.arguments.index("example_trainer.parameter_server")
    options = parse_section(
        ParameterServerOptions, "parameter_server", launch.arguments[program + 1 :]
    )
    assert (options.device, options.dtype) == ("cpu", "bfloat16")


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ClusterError,
        match=r"the package ray is not installed, .*: `pip install 'ray\[default\]==2\.60\.0'`",
    ):
        RayCluster("run")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{free}", "no-such-host.invalid:6379", "localhost:99999"]
)
def test_an_address_where_no_ray_listens_is_one_line_at_once(
    address: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    address = address.format(free=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ClusterError, match=rf"^RAY_ADDRESS {address}: .*; start Ray there .*, or unset RAY_ADDRESS"
    ):
        RayCluster("run")
