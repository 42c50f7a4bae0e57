"""From settings to processes: which roles there are, what each asks of a node, and the command that
each is. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from example_trainer.async_grpo.actor import PYTHON, Address, Launch
from example_trainer.async_grpo.settings import Orchestration, Settings
from example_trainer.launcher import roles as commands

# The needs of each role, compared with the cluster.
#
# Pure: numbers in, numbers and sentences out.

EXACT = 1e-6
"""Ray counts resources in ten-thousandths."""
NODE = "node:"
"""Beginning of the name of a resource that only the node of an address has."""


@dataclass(frozen=True)
class Demand:
    """Resources that must lie together on one node.

    Attributes:
        name: of the group, such as `generator-2`.
        bundles: role -> its resources (`CPU`, `GPU`), in the order of the placement group's
            bundles.
    """

    name: str
    bundles: Mapping[str, Mapping[str, float]]

    @property
    def total(self) -> dict[str, float]:
        """The sum over the bundles."""
        amounts_of: dict[str, float] = {}
        for bundle in self.bundles.values():
            for resource, amount in bundle.items():
                amounts_of[resource] = amounts_of.get(resource, 0.0) + amount
        return amounts_of


@dataclass
class Node:
    """A node of the cluster, and what of it is not given away.

    Attributes:
        name: its address, or address and id where several have one.
        free: resource -> amount.
    """

    name: str
    free: dict[str, float] = field(default_factory=dict)


def amounts(resources: Mapping[str, float]) -> str:
    """`2 GPU and 4 CPU`, other resources left out."""
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items(), reverse=True)
        if name in ("CPU", "GPU")
    ]
    return " and ".join(shown) or "nothing"


def fits(demand: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Return whether a node has as much of everything."""
    return all(free.get(name, 0.0) + EXACT >= amount for name, amount in demand.items())


def hardest_first(demands: Sequence[Demand]) -> list[Demand]:
    """Groups in the order in which they should get their places: groups that may lie on one node
    alone, then the largest.

    Small groups that may go anywhere would otherwise take it. Ray places in
    the order of the requests.
    """

    def ease(demand: Demand) -> tuple[bool, float, float]:
        total = demand.total
        tied = any(name.startswith(NODE) for name in total)
        return (not tied, -total.get("GPU", 0.0), -total.get("CPU", 0.0))

    return sorted(demands, key=ease)


def assign(demands: Sequence[Demand], nodes: Sequence[Node]) -> tuple[dict[str, str], list[Demand]]:
    """Find a node for each group, the hardest first, each on the fullest node that has room.

    Args:
        demands: the groups.
        nodes: not changed.

    Returns:
        Group -> node, and the groups that found none. Ray decides by itself where a group comes;
        this shows whether all fit.
    """
    free = {node.name: dict(node.free) for node in nodes}
    places: dict[str, str] = {}
    left: list[Demand] = []
    for demand in hardest_first(demands):
        total = demand.total
        room = [name for name in free if fits(total, free[name])]
        if not room:
            left.append(demand)
            continue
        best = min(room, key=lambda name: (free[name].get("GPU", 0.0), free[name].get("CPU", 0.0)))
        for resource, amount in total.items():
            free[best][resource] = free[best].get(resource, 0.0) - amount
        places[demand.name] = best
    return places, left


def refusal(demands: Sequence[Demand], nodes: Sequence[Node]) -> str | None:
    """Why the cluster cannot hold the run, as one line: the role, what it asks, what there is; None
    if it can.
    """
    placed, left = assign(demands, nodes)
    if not left:
        return None
    first = left[0]
    there = "; ".join(f"{node.name} has {amounts(node.free)}" for node in nodes) or "no node"
    whole: dict[str, float] = {}
    for demand in demands:
        for resource, amount in demand.total.items():
            whole[resource] = whole.get(resource, 0.0) + amount
    requests = " with ".join(
        f"{role} ({amounts(bundle)})" for role, bundle in first.bundles.items()
    )
    beside = ""
    if placed:
        beside = f", after {len(placed)} of {len(demands)} groups have their places"
    return (
        f"the cluster cannot place {first.name}: it asks {amounts(first.total)} on one "
        f"node{beside}: {requests}; the cluster: {there}; the run as a whole asks "
        f"{amounts(whole)}. Add nodes, or lower orchestration's numbers or …_cpus"
    )


NEEDED_KEYS = {
    "service": (
        "ROLLOUT_API_KEY",
        "VLLM_API_KEY",
    ),  # its page asks the servers how their weights are
    "generator": ("VLLM_API_KEY",),
    "environment": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
    "reference": ("ROLLOUT_API_KEY",),
    "parameter-server": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
    "trainer": ("ROLLOUT_API_KEY", "VLLM_API_KEY"),
}
"""Kind of role -> the variables with keys that it gets."""
STOP_ORDER = ("environment", "reference", "trainer", "parameter-server", "generator", "service")
"""Kinds in the order in which they are stopped: producers first."""
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
        knows: roles that must have their places before it is started: their addresses are in its
            command.
        bound: roles whose new address restarts it.
        ready: paths that it answers once it works, for its first life and for later ones; empty if
            it listens nowhere.
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
    """Return every role of a run, in the order of need."""
    asked = settings.orchestration
    gpu = float(asked.device == "gpu")
    generators = tuple(f"generator-{n + 1}" for n in range(asked.generators))
    servers = tuple(f"parameter-server-{n + 1}" for n in range(asked.parameter_servers))
    # The service sends the vLLM key only to addresses in its command.
    service = _role(
        "service", asked.service_cpus, ports=1, knows=generators, ready=("/", "/"), grace=15.0
    )
    gpus = gpu * settings.inference.tensor_parallel_size
    return [
        service,
        *(
            _role(name, asked.generator_cpus, gpus, ports=1, ready=("/health_generate", "/weights"), grace=30.0)
            for name in generators
        ),
        *(
            _role(
                name, asked.parameter_server_cpus, gpu * asked.parameter_server_gpus, ports=1, needs=("service",),
                knows=generators, bound=("service",), ready=("/weights", "/weights"),
            )
            for name in servers
        ),
        *(
            _role(
                f"reference-{n + 1}", asked.reference_cpus, gpu, needs=("service",), bound=("service",), grace=60.0
            )
            for n in range(asked.reference_workers)
        ),
        _trainer_role(settings, gpu, generators, servers),
        *(
            _environment_role(server, number, asked)
            for server in generators
            for number in range(asked.environments_per_generator)
        ),
    ]  # fmt: skip


def _role(name: str, cpus: float, gpus: float = 0.0, **rest: Any) -> Role:
    """A role that has a placement group of its own, unless `rest` names another."""
    kind = name.rstrip("-0123456789")
    place: dict[str, Any] = {"group": name, "bundle": 0} | rest
    return Role(name=name, kind=kind, resources=some({"CPU": cpus, "GPU": gpus}), **place)


def _trainer_role(
    settings: Settings, gpu: float, generators: tuple[str, ...], servers: tuple[str, ...]
) -> Role:
    """The trainer, which lies beside the generator if both hold one copy of the weights."""
    asked, first = settings.orchestration, ("service", *servers)
    place: dict[str, Any] = {}
    gpus = gpu * asked.trainer_ranks
    if settings.shares_gpus:
        place = {"group": generators[0], "bundle": 1 + asked.environments_per_generator}
        gpus = 0.0
    return _role(
        "trainer", asked.trainer_cpus, gpus, ports=1, needs=first, wants=generators, bound=first, grace=120.0,
        may_finish=True, **place,
    )  # fmt: skip


def _environment_role(server: str, number: int, asked: Orchestration) -> Role:
    """An environment of a generator, in whose placement group it lies."""
    name = server.replace("generator", "environment")
    if asked.environments_per_generator > 1:
        name += f"-{number + 1}"
    both = ("service", server)
    return _role(
        name, asked.environment_cpus, group=server, bundle=1 + number, needs=both, bound=both, may_finish=True
    )  # fmt: skip


def some(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out resources of amount 0."""
    return {name: amount for name, amount in resources.items() if amount}


def demands_of(roles: list[Role]) -> list[Demand]:
    """Return the demand of each placement group."""
    groups: dict[str, list[Role]] = {}
    for role in roles:
        groups.setdefault(role.group, []).append(role)
    return [
        Demand(
            name,
            {
                role.name: dict(role.resources)
                for role in sorted(members, key=lambda role: role.bundle)
            },
        )
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
        """Return the command that starts a role.

        Args:
            role: which.
            places: role → where it is, of this role and of all that it needs.
            first: nothing of this run has been started in this place before.
        """
        parts: dict[str, Any] = getattr(self, "_" + role.kind.replace("-", "_"))(role, places)
        variables: dict[str, str | None] = {
            **self._variables(role, places),
            "LOCKSTEP_PROCESS": role.name,
            **dict.fromkeys(("ROLLOUT_API_KEY", "VLLM_API_KEY")),
            **{name: self._keys[name] for name in NEEDED_KEYS[role.kind]},
            **parts.get("variables", {}),
        }
        stale: tuple[str, ...] = ()
        if first and role.kind == "generator":
            stale = (f"{role.name}/vllm_bridge_config*.json",)
        return Launch(tuple(parts["arguments"]), variables, parts.get("files", {}), stale)

    def _variables(self, role: Role, places: Mapping[str, Address]) -> dict[str, str | None]:
        computes = role.kind in ("generator", "reference", "trainer", "parameter-server")
        gpus = places[role.name].gpus
        if role.kind == "trainer" and self._settings.shares_gpus:
            gpus = places["generator-1"].gpus
        variables: dict[str, str | None] = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "VLLM_NO_USAGE_STATS": "1",
        }
        if computes and gpus:
            variables["OMP_NUM_THREADS"] = None  # Ray sets it by the CPUs that were asked for
        else:
            asked, threads = self._settings.orchestration, 1
            ranks = {"trainer": asked.trainer_ranks}.get(role.kind, 1)
            if computes and not asked.exact_resume:
                threads = math.ceil(role.resources.get("CPU", 1.0) / ranks) or 1
            variables["OMP_NUM_THREADS"] = str(threads)
            # A thread that waits must not keep others from the cores.
            variables["OMP_WAIT_POLICY"] = "passive"
        if self._settings.logging.timeline:
            variables["LOCKSTEP_TIMELINE"] = str(self._settings.folder / "logs")
        return variables

    def _service(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here = places[role.name]
        words = commands.service(
            here.listen,
            here.ports[0],
            store=self._settings.folder / STORE_FILE,
            vllm_server=[f"http://{server}" for server in servers_in(places)],
            max_queue_groups=self._settings.orchestration.buffer_groups or None,
            python=PYTHON,
        )
        return {"arguments": words}

    def _generator(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here, asked, training = (
            places[role.name],
            self._settings.inference,
            self._settings.trainer_values,
        )
        on_cpu = self._settings.orchestration.device == "cpu"
        one_by_one = (
            on_cpu and self._settings.orchestration.exact_resume
        )  # CPUs have no deterministic mode
        lora = training.get("weight_bridge_mode") == "lora_only"
        server_flags = commands.vllm_flags(
            here.listen,
            not on_cpu,
            self._dtype,
            tensor_parallel_size=asked.tensor_parallel_size
            if asked.tensor_parallel_size > 1
            else None,
            max_model_len=asked.max_model_length or None,
            max_num_seqs=(1 if one_by_one else asked.max_sequences) or None,
            no_enable_prefix_caching=one_by_one,
            seed=self._seed(number_of(role)),
            colocate=bool(training.get("colocate")),
            deterministic=bool(training.get("deterministic")),
            enable_lora=lora,
        )
        words = commands.vllm_server(
            self._settings.model, here.ports[0], server_flags, python=PYTHON
        )
        variables = {
            "VLLM_ENABLE_SHARED_WEIGHTS": str(int(not lora)),
            "LOGDIR": str(self._settings.folder / role.name),
        }
        return {"arguments": [*words, *asked.server_args], "variables": variables}

    def _environment(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        asked, server = self._settings.inference, role.bound[1]
        words = commands.environment(
            asked.environment,
            places["service"].url,
            [places[server].url],
            settings={
                "group_size": asked.group_size,
                "max_token_length": asked.max_response_tokens or None,
                "max_batches_offpolicy": asked.max_batches_ahead,
                "dataset_path": asked.dataset_path or None,
                "seed": self._seed(1000 * role.bundle + number_of(role)),
                "exact_resume": self._settings.orchestration.exact_resume or None,
            },
            python=PYTHON,
        )
        return {"arguments": [*words, *asked.environment_args]}

    def _reference(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        training = self._settings.trainer_values
        model = str(training.get("reference_model") or self._settings.model)
        words = commands.reference_worker(
            model,
            places["service"].url,
            name=role.name,
            deterministic=bool(training.get("deterministic")),
            python=PYTHON,
        )
        return {"arguments": words}

    def _seed(self, offset: int) -> int | None:
        """The run's seed and an offset; None if the run has no seed."""
        seed = self._settings.inference.seed
        if seed is None:
            return None
        return seed + offset

    @property
    def _dtype(self) -> str:
        """The type of the weights that generators serve."""
        on_gpu = self._settings.orchestration.device != "cpu"
        return self._settings.inference.dtype or commands.weights_dtype(on_gpu)

    def _parameter_server(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        here = places[role.name]
        words = commands.parameter_server(
            self._settings.model,
            places["service"].url,
            servers_in(places),
            host=here.listen,
            port=here.ports[0],
            part=f"{number_of(role)}/{self._settings.orchestration.parameter_servers}",
            pull_every=self._settings.inference.weight_sync_every or None,
            device="cuda" if here.gpus else "cpu",
            dtype=self._dtype,
            log_dir=self._settings.folder / role.name,
            python=PYTHON,
        )
        return {"arguments": words}

    def _trainer(self, role: Role, places: Mapping[str, Address]) -> dict[str, Any]:
        settings = self._settings
        values = settings.trainer_values | {"atropos_url": places["service"].url, "resume": "auto"}
        values["ranks"] = settings.orchestration.trainer_ranks
        if settings.orchestration.parameter_servers:
            values["parameter_servers"] = servers_in(places, "parameter-server-")
        else:
            values["vllm_servers"] = servers_in(places)
        variables = {
            "MASTER_ADDR": None,
            "MASTER_PORT": str(places[role.name].ports[0]),
            "NUM_INFERENCE_NODES": "0",
        }
        variables["LOGDIR"] = str(settings.folder / "generator-1")
        text = "# Written by the driver at each start of the trainer.\n" + yaml.safe_dump(
            plain(values), sort_keys=True
        )
        return {
            "arguments": commands.trainer_with_file(settings.folder / TRAINER_FILE, python=PYTHON),
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
    numbers = (int(part) for part in role.name.split("-") if part.isdigit())
    return next(numbers, 1)


def servers_in(places: Mapping[str, Address], kind: str = "generator-") -> list[str]:
    """host:port of all roles whose names begin so, in the order of their numbers."""
    return [places[name].server for name in sorted(places, key=natural) if name.startswith(kind)]


def natural(name: str) -> tuple[str, int]:
    """Sorts `generator-10` behind `generator-9`."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, 0)
