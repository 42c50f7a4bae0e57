"""Ray, as far as a run needs it: nodes, placement groups, and actors that each look after one
process.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from example_trainer.async_grpo.actor import (
    ROOT,
    NodeNeeds,
    NodeProblem,
    NodeReport,
    RoleProcess,
    project_ray,
)
from example_trainer.async_grpo.roles import NODE, Demand, Node, Role
from example_trainer.errors import TrainerError
from example_trainer.prerequisites import COMMANDS

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20
"""Ray's own bound is a third of the memory; nothing of a run but a few words goes through it."""
MISSING = "the package ray is not installed, and asynchronous runs need it: " + COMMANDS["ray"]
REACH_SECONDS = 10.0
LOOPBACK = "127.0.0.1"


class ClusterError(TrainerError):
    """Ray is not there, or cannot be used. A single line."""


class SeatLost(Exception):
    """An actor is gone, with its process: its node or worker ended, or it was killed."""


class SeatSilent(Exception):
    """An actor does not answer, and Ray does not report it as gone: its node may be busy, or cut
    off for a moment.
    """


class Pending(Protocol):
    """An answer that may not have come."""

    def done(self) -> bool:
        """Return whether `get` returns or raises at once."""

    def get(self) -> Any:
        """The answer.

        Raises SeatLost if the actor is gone, SeatSilent if it may be, NodeProblem if the node
        cannot.
        """


class Seat(Protocol):
    """An actor for one process."""

    def ask(self, method: str, *arguments: object) -> Pending:
        """Call a method of RoleProcess there; the first answer comes when the actor has its place."""

    def node(self) -> str:
        """The id of its node; empty as long as it has none."""

    def kill(self) -> None:
        """End the actor. Its process ends after it, within the grace period.

        Safe to call twice.
        """


class Cluster(Protocol):
    """The driver's interface to Ray."""

    version: str

    def nodes(self) -> list[Node]:
        """The nodes that live, with what they have and is not taken."""

    def host(self, node: str) -> str:
        """By what other roles reach a node; localhost if all nodes were one machine from the start."""

    def home(self) -> str:
        """Resource that only nodes on the driver's machine have."""

    def lives(self, node: str) -> bool:
        """Return whether a node is there."""

    def reserve(self, demand: Demand) -> None:
        """Ask for a placement group, once for each group; it moves by itself when its node dies."""

    def seat(self, role: Role, folder: str, life: int) -> Seat:
        """Make the role's actor, its so-manieth, in its bundle."""

    def close(self) -> None:
        """Give everything back."""


@dataclass
class _RayPending:
    reference: Any

    def done(self) -> bool:
        import ray

        return bool(ray.wait([self.reference], timeout=0)[0])

    def get(self) -> Any:
        import ray

        try:
            return ray.get(self.reference, timeout=60)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, NodeProblem):
                raise error.cause from None
            raise  # a bug: raise all of it
        except ray.exceptions.ActorUnavailableError as error:
            raise SeatSilent(first_line(error)) from error
        except ray.exceptions.RayError as error:
            raise SeatLost(first_line(error)) from error


class _RaySeat:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._where = actor.where.remote()
        self._node = ""

    def ask(self, method: str, *arguments: object) -> _RayPending:
        return _RayPending(getattr(self._actor, method).remote(*arguments))

    def node(self) -> str:
        if not self._node and _RayPending(self._where).done():
            self._node = str(_RayPending(self._where).get())
        return self._node

    def kill(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)


@contextmanager
def _node_on_loopback() -> Iterator[None]:
    """Have a Ray that is started here listen on loopback.

    Ray listens there if its node's address is loopback, but replaces that address by the machine's
    address in the network.
    """
    import ray._private.services as services

    name = "resolve_ip_for_localhost"
    if not hasattr(services, name):
        logger.warning(
            "[Async] this release of Ray listens on every address of this machine: close its ports to others"
        )
        yield
        return
    replaces = getattr(services, name)
    setattr(services, name, str)
    try:
        yield
    finally:
        setattr(services, name, replaces)


class RayCluster:
    """The cluster that RAY_ADDRESS names, or one on this machine alone that ends with this process.

    Args:
        name: of the run, in the names of its actors.
        dashboard: start Ray's dashboard, where Ray is started here.

    Raises:
        ClusterError: Ray is not installed, does not listen there, or is another release.
    """

    def __init__(self, name: str, dashboard: bool = False) -> None:
        os.environ.setdefault(
            "GRPC_DNS_RESOLVER", "native"
        )  # else a name that is in /etc/hosts alone is not found
        self.version = project_ray()
        if not self.version:
            raise ClusterError(MISSING)
        address = os.environ.get("RAY_ADDRESS", "")
        check_reachable(address)
        import ray

        self._name = name
        try:
            self._init(address, dashboard)
        except (RuntimeError, ConnectionError, ValueError, OSError) as error:
            same = "; install the same release of Ray and Python on all machines, as scripts/setup.sh does, and start it again"
            remedy = same * ("Version mismatch" in str(error))
            raise ClusterError(
                f"cannot use Ray at {address or 'this machine'}: {said(error)}{remedy}"
            ) from error
        self._groups: dict[str, Any] = {}
        self._here = str(ray.util.get_node_ip_address())
        self._one_machine = True

        class Keeper(RoleProcess):
            """RoleProcess as an actor."""

            def where(self) -> str:
                return str(ray.get_runtime_context().get_node_id())

            def check(self, needs: NodeNeeds, gpus: Sequence[str] = ()) -> NodeReport:
                return super().check(needs, [str(gpu) for gpu in ray.get_gpu_ids()])

        self._keeper = ray.remote(max_restarts=0, max_task_retries=0)(Keeper)

    def _init(self, address: str, dashboard: bool) -> None:
        """Join the cluster at an address, or start one here if the address is empty."""
        import ray

        # Workers find this project where it lies here; a job that was handed in with --working-dir
        # has it there already.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths)}
        # Else a worker that ends kills at once the guard that it has started, which would give its
        # process time to end. It kills no more than the guard, so that the children of that process
        # go on unwatched.
        variables["RAY_kill_child_processes_on_worker_exit"] = "0"
        # Ray's workers are nice to the rest of the machine; here they are what the machine is for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        where: dict[str, Any] = {"address": address}
        around: AbstractContextManager[None] = nullcontext()
        if not address:
            around = _node_on_loopback()
            where = {
                "address": "local",
                "include_dashboard": dashboard,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": LOOPBACK,
            }
        with around:
            ray.init(
                **where,
                # The name is this driver's alone: another run's folder may have the same name, and
                # with it the names of its actors.
                namespace=f"lockstep-{self._name}-{secrets.token_hex(4)}",
                runtime_env={"env_vars": variables},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )

    def _alive(self) -> list[dict[str, Any]]:
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def nodes(self) -> list[Node]:
        """See Cluster."""
        import ray

        alive = self._alive()
        addresses = [node["NodeManagerAddress"] for node in alive]
        free = ray._private.state.available_resources_per_node()
        return [
            Node(
                f"node {address}"
                + (f" ({node['NodeID'][:6]})" if addresses.count(address) > 1 else ""),
                dict(free.get(node["NodeID"], node["Resources"])),
            )
            for node, address in zip(alive, addresses, strict=True)
        ]

    def host(self, node: str) -> str:
        """See Cluster."""
        addresses = {
            node_row["NodeID"]: str(node_row["NodeManagerAddress"]) for node_row in self._alive()
        }
        # After there were several machines it never counts as one machine again: lost machines come
        # back, and must reach the others.
        self._one_machine = self._one_machine and set(addresses.values()) <= {self._here}
        return "localhost" if self._one_machine else addresses.get(node, self._here)

    def home(self) -> str:
        """See Cluster."""
        return NODE + self._here

    def lives(self, node: str) -> bool:
        """See Cluster."""
        return any(node_row["NodeID"] == node for node_row in self._alive())

    def reserve(self, demand: Demand) -> None:
        """See Cluster."""
        from ray.util.placement_group import placement_group

        bundles = [dict(bundle) or {"CPU": 0.001} for bundle in demand.bundles.values()]
        self._groups[demand.name] = placement_group(
            bundles, strategy="STRICT_PACK", name=f"{self._name}-{demand.name}"
        )

    def seat(self, role: Role, folder: str, life: int) -> _RaySeat:
        """See Cluster."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            self._groups[role.group], placement_group_bundle_index=role.bundle
        )
        name = role.name
        if life > 1:
            name += f", life {life}"
        actor = self._keeper.options(
            name=name,
            num_cpus=role.resources.get("CPU", 0),
            num_gpus=role.resources.get("GPU", 0),
            scheduling_strategy=place,
        )
        return _RaySeat(actor.remote(role.name, folder, True))

    def close(self) -> None:
        """See Cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Raise ClusterError if no program listens at `host:port`.

    Ray itself tries for a quarter of an hour.
    """
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return  # auto, local, or a client's address
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"RAY_ADDRESS {address}: {error}; start Ray there (`ray start --head --port {port}`), where this machine "
            "reaches it, or unset RAY_ADDRESS to run on this machine alone"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error; if an actor could not be made, the last line, which has the
    cause.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    if "creation task" in lines[0]:
        return f"its actor could not be made: {lines[-1]}"
    return lines[0]


def said(error: BaseException) -> str:
    """Return an error of Ray as one line."""
    return " ".join(str(error).split())[:600]


def demands_at_home(demands: Sequence[Demand], home: str) -> list[Demand]:
    """The same, with the service's group tied to the driver's machine, where the run's folder is."""
    return [
        Demand(d.name, {role: {**bundle, home: 0.001} for role, bundle in d.bundles.items()})
        if d.name == "service"
        else d
        for d in demands
    ]
