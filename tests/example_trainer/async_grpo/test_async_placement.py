"""Roles fit on nodes, against the limits of every placement; and restarts, against their promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from example_trainer.async_grpo.restarts import LONGEST_DELAY, Ended, Policy, Row
from example_trainer.async_grpo.roles import (
    EXACT,
    Demand,
    Node,
    amounts,
    assign,
    hardest_first,
    refusal,
)

amount = st.integers(0, 8).map(lambda n: n / 2)
resources = st.fixed_dictionaries({"CPU": amount, "GPU": st.integers(0, 4).map(float)})
demands = st.lists(st.lists(resources, min_size=1, max_size=3), max_size=6).map(
    lambda groups: [
        Demand(f"group-{n}", {f"role-{n}-{m}": bundle for m, bundle in enumerate(bundles)})
        for n, bundles in enumerate(groups)
    ]
)
nodes = st.lists(resources, max_size=4).map(
    lambda each: [Node(f"node {n}", free) for n, free in enumerate(each)]
)


@given(demands, nodes)
def test_no_node_is_given_more_than_it_has(asked: list[Demand], there: list[Node]) -> None:
    placed, left = assign(asked, there)
    assert sorted([*placed, *(demand.name for demand in left)]) == sorted(
        demand.name for demand in asked
    )
    for node in there:
        for resource in ("CPU", "GPU"):
            used = sum(d.total.get(resource, 0) for d in asked if placed.get(d.name) == node.name)
            assert used <= node.free[resource] + EXACT
    for demand in left:  # nothing that fits beside all others is left out
        used_by = {
            node.name: [d for d in asked if placed.get(d.name) == node.name] for node in there
        }
        for node in there:
            rest = {
                r: node.free[r] - sum(d.total.get(r, 0) for d in used_by[node.name])
                for r in ("CPU", "GPU")
            }
            assert any(demand.total.get(r, 0) > rest[r] + EXACT for r in rest)
    assert (refusal(asked, there) is None) == (not left)


def test_a_refusal_names_role_request_and_nodes() -> None:
    asked = [
        Demand(
            "generator-1", {"generator-1": {"GPU": 2.0, "CPU": 4.0}, "environment-1": {"CPU": 1.0}}
        ),
        Demand("trainer", {"trainer": {"GPU": 1.0, "CPU": 4.0}}),
    ]
    there = [
        Node("node 10.0.0.1", {"GPU": 1.0, "CPU": 16.0}),
        Node("node 10.0.0.2", {"GPU": 1.0, "CPU": 8.0}),
    ]
    assert refusal(asked, there) == (
        "the cluster cannot place generator-1: it asks 2 GPU and 5 CPU on one node, after 1 of 2 groups have their places: "
        "generator-1 (2 GPU and 4 CPU) with environment-1 (1 CPU); the cluster: node 10.0.0.1 has 1 GPU and 16 CPU; "
        "node 10.0.0.2 has 1 GPU and 8 CPU; the run as a whole asks 3 GPU and 9 CPU. Add nodes, or lower orchestration's "
        "numbers or …_cpus"
    )
    assert amounts({}) == "nothing"


def test_two_groups_that_need_one_gpu_each_take_two_nodes() -> None:
    asked = [Demand(name, {name: {"GPU": 1.0}}) for name in ("a", "b")]
    placed, left = assign(asked, [Node("x", {"GPU": 1.0}), Node("y", {"GPU": 1.0})])
    assert (sorted(placed.values()), left) == (["x", "y"], [])


def test_who_may_lie_on_one_node_alone_comes_first() -> None:
    """Two generators would fill the driver's machine, on which the service must be."""
    asked = [
        Demand("service", {"service": {"CPU": 0.1, "node:a": 0.001}}),
        Demand("generator-1", {"generator-1": {"CPU": 1.5}}),
        Demand("generator-2", {"generator-2": {"CPU": 1.5}}),
        Demand("trainer", {"trainer": {"CPU": 2.0}}),
    ]
    there = [
        Node("node a", {"CPU": 3.0, "node:a": 1.0}),
        Node("node b", {"CPU": 3.0, "node:b": 1.0}),
    ]
    assert assign(asked, there)[0]["service"] == "node a"
    assert refusal(asked, there) is None
    assert [demand.name for demand in hardest_first(asked)] == [
        "service",
        "trainer",
        "generator-1",
        "generator-2",
    ]


ends = st.builds(
    Ended,
    code=st.none() | st.sampled_from([0, 1, 2, 137, 143]),
    lived=st.floats(0, 1000),
    was_ready=st.booleans(),
)


@given(st.lists(ends, max_size=30), st.integers(0, 6))
def test_restarts_are_bounded_and_slow_down(ended: list[Ended], restarts: int) -> None:
    row = Row(Policy(proven=60, restarts=restarts, delay=1.0, steady=300))
    in_a_row = 0
    for end in ended:
        delay = row.after(end)
        if end.code is not None and end.code <= 128 and not end.was_ready and end.lived < 60:
            assert delay is None
            return
        in_a_row = 1 if end.lived >= 300 else in_a_row + 1
        if in_a_row > restarts:
            assert delay is None
            return
        assert delay == min(LONGEST_DELAY, 2.0 ** (in_a_row - 1))
