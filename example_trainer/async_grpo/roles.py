"""From settings to processes: which roles there are, what each asks of a node, and the command that each is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from example_trainer.async_grpo.launch import PYTHON, Address, Launch, environment_file
from example_trainer.async_grpo.placement import Demand
from example_trainer.async_grpo.settings import Settings

NEEDED_KEYS = {
    "service": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),  # its page asks the servers how their weights are
    "generator": ("VLLM_API_KEY",),
    "environment": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
    "reference": ("ROLLOUT_API_KEY",),
    "parameter-server": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
    "trainer": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
}
"""Kind of role -> the variables with keys that it gets."""
STOP_ORDER = ("environment", "reference", "trainer", "parameter-server", "generator", "service")
"""Kinds in the order in which they are stopped: those that feed others first."""
TRAINER_FILE = "trainer.yaml"
STORE_FILE = "rollouts.db"


@dataclass(frozen=True)
class Role:
    """One process of the run.

    Attributes:
        name: unique, such as `generator-2`; its log is `logs/<name>.log`.
        kind: see NEEDED_KEYS.
        group: the placement group in which it lies.
        bundle: its bundle there.
        resources: what it asks of Ray.
        ports: how many it may listen on.
        needs: roles that must be up before it is started.
        wants: roles that must be up before it is started the first time.
        knows: roles that must have their places before it is started: their addresses are in its command.
        bound: roles with whose new address it is started anew.
        ready: paths that it answers once it works, for its first life and for later ones; empty if it listens nowhere.
        grace: seconds between SIGTERM and SIGKILL.
        may_finish: it may end by itself, with status 0, before the run does.
    """

    name: str
    kind: str
    group: str
    bundle: int
    resources: Mapping[str, float]
    ports: int = 0
    needs: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    knows: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    ready: tuple[str, str] = ("", "")
    grace: float = 10.0
    may_finish: bool = False


def roles_of(settings: Settings) -> list[Role]:
    """Every role of a run, those that others need first."""
    asked = settings.orchestration
    gpu = 1.0 if asked.device == "gpu" else 0.0
    generators = [f"generator-{n + 1}" for n in range(asked.generators)]
    service_needs = {"CPU": asked.service_cpus}
    known = tuple(generators)  # the service sends the vLLM key only to addresses in its command
    found = [Role("service", "service", "service", 0, service_needs, 1, knows=known, ready=("/", "/"), grace=15.0)]
    for name in generators:
        needs = {"CPU": asked.generator_cpus, "GPU": gpu * settings.inference.tensor_parallel_size}
        found.append(Role(name, "generator", name, 0, some(needs), 1, ready=("/health_generate", "/weights"), grace=30.0))
    servers = [f"parameter-server-{n + 1}" for n in range(asked.parameter_servers)]
    for name in servers:
        needs = {"CPU": asked.parameter_server_cpus, "GPU": gpu * asked.parameter_server_gpus}
        answers, service = ("/weights", "/weights"), ("service",)
        found.append(
            Role(name, "parameter-server", name, 0, some(needs), 1, service, knows=known, bound=service, ready=answers)
        )
    for n in range(asked.reference_workers):
        needs = {"CPU": asked.reference_cpus, "GPU": gpu}
        name = f"reference-{n + 1}"
        found.append(Role(name, "reference", name, 0, some(needs), 0, ("service",), bound=("service",), grace=60.0))
    first = ("service", *servers)
    if settings.shares_gpus:
        group, bundle, needs = generators[0], 1 + asked.environments_per_generator, {"CPU": asked.trainer_cpus}
    else:
        group, bundle, needs = "trainer", 0, {"CPU": asked.trainer_cpus, "GPU": gpu * asked.trainer_ranks}
    found.append(
        Role(
            "trainer", "trainer", group, bundle, some(needs), 1, first, tuple(generators), bound=("service", *servers),
            grace=120.0, may_finish=True,
        )
    )  # fmt: skip
    for server in generators:
        number = server.rpartition("-")[2]
        for n in range(asked.environments_per_generator):
            name = f"environment-{number}" + (f"-{n + 1}" if asked.environments_per_generator > 1 else "")
            both = ("service", server)
            found.append(
                Role(
                    name,
                    "environment",
                    server,
                    1 + n,
                    some({"CPU": asked.environment_cpus}),
                    0,
                    both,
                    bound=both,
                    may_finish=True,
                )
            )
    return found


def some(resources: Mapping[str, float]) -> dict[str, float]:
    """Those of which there is anything."""
    return {name: amount for name, amount in resources.items() if amount}


def demands_of(roles: list[Role]) -> list[Demand]:
    """What must lie together, for each group."""
    groups: dict[str, list[Role]] = {}
    for role in roles:
        groups.setdefault(role.group, []).append(role)
    return [
        Demand(name, {role.name: dict(role.resources) for role in sorted(members, key=lambda role: role.bundle)})
        for name, members in groups.items()
    ]


class Commands:
    """The command of each role.

    Args:
        settings: of the run.
        keys: variable → key, of all servers.
    """

    def __init__(self, settings: Settings, keys: Mapping[str, str]) -> None:
        self._settings, self._keys = settings, keys

    def launch(self, role: Role, places: Mapping[str, Address], first: bool = True) -> Launch:
        """What starts a role.

        Args:
            role: which.
            places: role → where it is, of this role and of all that it needs.
            first: nothing of this run has been started in this place before.
        """
        made: dict[str, Any] = getattr(self, "_" + role.kind.replace("-", "_"))(role, places)
        variables: dict[str, str | None] = {
            **self._variables(role, places),
            "LOCKSTEP_PROCESS": role.name,
            **dict.fromkeys(("ROLLOUT_API_KEY", "VLLM_API_KEY")),
            **{name: self._keys[name] for name in NEEDED_KEYS[role.kind]},
            **made.get("variables", {}),
        }
        stale = (f"{role.name}/vllm_bridge_config*.json",) if first and role.kind == "generator" else ()
        return Launch(tuple(made["arguments"]), variables, made.get("files", {}), stale)

    def _variables(self, role: Role, places: Mapping[str, Address]) -> dict[str, str | None]:
        computes = role.kind in ("generator", "reference", "trainer", "parameter-server")
        gpus = places[role.name].gpus
        if role.kind == "trainer" and self._settings.shares_gpus:
            gpus = places["generator-1"].gpus
        found: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "VLLM_NO_USAGE_STATS": "1"}
        if computes and gpus:
            found["OMP_NUM_THREADS"] = None  # Ray sets it by the CPUs that were asked for
        else:
            asked = self._settings.orchestration
            ranks = asked.trainer_ranks if role.kind == "trainer" else 1
            several = computes and not asked.exact_resume
            found["OMP_NUM_THREADS"] = str(math.ceil(role.resources.get("CPU", 1.0) / ranks) or 1) if several else "1"
            found["OMP_WAIT_POLICY"] = "passive"  # a thread that waits must not keep others from the cores
        if self._settings.logging.timeline:
            found["LOCKSTEP_TIMELINE"] = str(self._settings.folder / "logs")
        return found

    def _service(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here = places[role.name]
        words = [PYTHON, "-u", "-m", "atroposlib.cli.run_api", "--host", here.listen, "--port", str(here.ports[0])]
        words += ["--store", str(self._settings.folder / STORE_FILE)]
        for server in servers_in(places):
            words += ["--vllm-server", f"http://{server}"]
        if self._settings.orchestration.buffer_groups:
            words += ["--max-queue-groups", str(self._settings.orchestration.buffer_groups)]
        return {"arguments": words}

    def _generator(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here, asked, training = places[role.name], self._settings.inference, self._settings.trainer_values
        words = [PYTHON, "-u", "example_trainer/vllm_api_server.py", "--model", self._settings.model]
        words += ["--host", here.listen, "--port", str(here.ports[0])]
        on_cpu = self._settings.orchestration.device == "cpu"
        words += ["--dtype", self._dtype]
        words += ["--enforce-eager"] if on_cpu else []
        words += ["--tensor-parallel-size", str(asked.tensor_parallel_size)] if asked.tensor_parallel_size > 1 else []
        words += ["--max-model-len", str(asked.max_model_length)] if asked.max_model_length else []
        one_by_one = on_cpu and self._settings.orchestration.exact_resume  # as there is no deterministic mode on CPUs
        sequences = 1 if one_by_one else asked.max_sequences
        words += ["--max-num-seqs", str(sequences)] if sequences else []
        words += ["--no-enable-prefix-caching"] if one_by_one else []
        words += ["--seed", str(asked.seed + number_of(role))] if asked.seed is not None else []
        words += ["--colocate"] if training.get("colocate") else []
        words += ["--deterministic"] if training.get("deterministic") else []
        lora = training.get("weight_bridge_mode") == "lora_only"
        words += ["--enable-lora"] if lora else []
        variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "0" if lora else "1", "LOGDIR": str(self._settings.folder / role.name)}
        return {"arguments": [*words, *asked.server_args], "variables": variables}

    def _environment(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        asked, server = self._settings.inference, role.bound[1]
        words = [PYTHON, "-u", environment_file(asked.environment), "serve"]
        words += ["--env.rollout_server_url", places["service"].url]
        words += ["--openai.base_url", places[server].url, "--openai.server_type", "vllm"]
        words += ["--env.group_size", str(asked.group_size)]
        words += ["--env.max_token_length", str(asked.max_response_tokens)] if asked.max_response_tokens else []
        words += ["--env.max_batches_offpolicy", str(asked.max_batches_ahead)] if asked.max_batches_ahead is not None else []
        words += ["--env.dataset_path", asked.dataset_path] if asked.dataset_path else []
        words += ["--env.seed", str(asked.seed + 1000 * role.bundle + number_of(role))] if asked.seed is not None else []
        words += ["--env.exact_resume", "true"] if self._settings.orchestration.exact_resume else []
        return {"arguments": [*words, *asked.environment_args]}

    def _reference(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        training = self._settings.trainer_values
        model = str(training.get("reference_model") or self._settings.model)
        words = [PYTHON, "-u", "-m", "example_trainer.reference_worker", "--model-name", model]
        words += ["--atropos-url", places["service"].url, "--name", role.name]
        words += ["--deterministic"] if training.get("deterministic") else []
        return {"arguments": words}

    @property
    def _dtype(self) -> str:
        """Of the weights that generators serve."""
        on_cpu = self._settings.orchestration.device == "cpu"
        return self._settings.inference.dtype or ("float32" if on_cpu else "bfloat16")

    def _parameter_server(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here = places[role.name]
        words = [PYTHON, "-u", "-m", "example_trainer.parameter_server", "--model-name", self._settings.model]
        words += ["--host", here.listen, "--port", str(here.ports[0]), "--atropos-url", places["service"].url]
        words += ["--part", f"{number_of(role)}/{self._settings.orchestration.parameter_servers}"]
        if self._settings.inference.weight_sync_every:
            words += ["--pull-every", str(self._settings.inference.weight_sync_every)]
        words += ["--device", "cuda" if here.gpus else "cpu"]
        words += ["--dtype", self._dtype]
        words += ["--log-dir", str(self._settings.folder / role.name)]
        return {"arguments": [*words, "--vllm-servers", *servers_in(places)]}

    def _trainer(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        settings = self._settings
        values = settings.trainer_values | {"atropos_url": places["service"].url, "resume": "auto"}
        values["ranks"] = settings.orchestration.trainer_ranks
        if settings.orchestration.parameter_servers:
            values["parameter_servers"] = servers_in(places, "parameter-server-")
        else:
            values["vllm_servers"] = servers_in(places)
        file = str(settings.folder / TRAINER_FILE)
        variables = {"MASTER_ADDR": None, "MASTER_PORT": str(places[role.name].ports[0]), "NUM_INFERENCE_NODES": "0"}
        variables["LOGDIR"] = str(settings.folder / "generator-1")
        text = "# Written by the driver at each start of the trainer.\n" + yaml.safe_dump(plain(values), sort_keys=True)
        return {
            "arguments": [PYTHON, "-u", "example_trainer/grpo.py", "--config", file],
            "variables": variables,
            "files": {TRAINER_FILE: text},
        }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as YAML knows them."""
    return {
        name: value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
        for name, value in values.items()
    }


def number_of(role: Role) -> int:
    """`generator-2` → 2, `environment-2-1` → 2, another → 1."""
    numbers = [int(part) for part in role.name.split("-") if part.isdigit()]
    return numbers[0] if numbers else 1


def servers_in(places: Mapping[str, Address], kind: str = "generator-") -> list[str]:
    """host:port of all roles whose names begin so, in the order of their numbers."""
    return [places[name].server for name in sorted(places, key=natural) if name.startswith(kind)]


def natural(name: str) -> tuple[str, int]:
    """Sorts `generator-10` behind `generator-9`."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)
