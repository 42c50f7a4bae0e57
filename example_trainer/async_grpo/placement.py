"""What each role asks of the cluster, and whether there is as much.

Pure: numbers in, numbers and sentences out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

EXACT = 1e-6
"""Ray counts resources in ten-thousandths."""
NODE = "node:"
"""How the name of a resource begins that only the node of an address has."""


@dataclass(frozen=True)
class Demand:
    """What must lie together on one node.

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
        found: dict[str, float] = {}
        for bundle in self.bundles.values():
            for resource, amount in bundle.items():
                found[resource] = found.get(resource, 0.0) + amount
        return found


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
    """`2 GPU and 4 CPU`, without what nobody reads."""
    shown = [
        f"{amount:g} {name}"
        for name, amount in sorted(resources.items(), reverse=True)
        if name in ("CPU", "GPU")
    ]
    return " and ".join(shown) or "nothing"


def fits(demand: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Whether a node has as much of everything."""
    return all(free.get(name, 0.0) + EXACT >= amount for name, amount in demand.items())


def hardest_first(demands: Sequence[Demand]) -> list[Demand]:
    """Groups in the order in which they should get their places: those that may lie on one node
    alone, then the largest.

    Whoever is small and may go anywhere would otherwise take what only they can use. Ray places in
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
        this says whether all fit.
    """
    free = {node.name: dict(node.free) for node in nodes}
    found: dict[str, str] = {}
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
        found[demand.name] = best
    return found, left


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
    asked = " with ".join(f"{role} ({amounts(bundle)})" for role, bundle in first.bundles.items())
    beside = f", after {len(placed)} of {len(demands)} groups have their places" if placed else ""
    return (
        f"the cluster cannot place {first.name}: it asks {amounts(first.total)} on one node{beside}: {asked}; "
        f"the cluster: {there}; the run as a whole asks {amounts(whole)}: add nodes, or lower orchestration's numbers or …_cpus"
    )
