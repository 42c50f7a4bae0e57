"""Who sends what: every bucket once, every rank its share, every row from who holds it, and the
memory that was promised.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.checkpoint_sources import Place, in_own_tensor
from example_trainer.weight_bridge.stream import (
    Cuts,
    SendPlan,
    buffer_bytes,
    packed_bytes,
    route_to,
    sent_together,
    steps_of,
)
from tests.geometries import geometry_of
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, local_view, source_view
from vllm_patching.protocol.messages import Route
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.regions import Region
from vllm_patching.weights.sharding import LearnedShard, SourceSlice, plan_shards

TINY = geometry_of("Qwen3", 2, 16, 32, 8, 4, 2, 70)
MIXTURE = geometry_of("Qwen3Moe", 2, 16, 32, 8, 4, 2, 70, num_experts=5, mlp_only_layers=[0])
QWEN_14B = geometry_of("Qwen3", 40, 5120, 17408, 40, 8, 128, 151936)


def manifests(geometry: Geometry, tp_size: int, dtype: str = "bfloat16") -> tuple[Manifest, ...]:
    """Manifests of every rank of a vLLM."""
    return tuple(
        Manifest(
            r,
            tp_size,
            tuple(ManifestEntry(spec, dtype, "cpu") for spec in plan_shards(geometry, r, tp_size)),
        )
        for r in range(tp_size)
    )


@given(world_size=st.integers(1, 40), vllm_ranks=st.integers(1, 16), data=st.data())
def test_every_rank_sends_and_every_bucket_is_sent_once(
    world_size: int, vllm_ranks: int, data: st.DataObject
) -> None:
    plan = SendPlan(world_size, vllm_ranks)
    for cohort in range(vllm_ranks):
        expected = [s for s in range(world_size) if s % vllm_ranks == cohort] or [
            cohort % world_size
        ]
        assert plan.senders(cohort) == expected
        assert {plan.sender(cohort, lane) for lane in range(plan.lanes)} == set(expected)
    lanes = [lane for rank in range(world_size) for lane in plan.own_lanes(rank)]
    assert sorted(lanes) == [
        (cohort, lane) for cohort in range(vllm_ranks) for lane in range(plan.lanes)
    ]
    assert all(plan.own_lanes(rank) for rank in range(world_size))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=vllm_ranks, max_size=vllm_ranks))
    rounds = plan.rounds(counts)
    sent = [one for row in rounds for one in row.values()]
    assert sorted(sent) == [
        (cohort, bucket) for cohort, count in enumerate(counts) for bucket in range(count)
    ]
    for row in rounds:
        assert all(
            plan.sender(cohort, bucket % plan.lanes) == rank
            for rank, (cohort, bucket) in row.items()
        )
    for cohort in range(vllm_ranks):  # a receiver meets the buckets of a lane in their order
        for lane in range(plan.lanes):
            over = [
                b
                for row in rounds
                for c, b in row.values()
                if c == cohort and b % plan.lanes == lane
            ]
            assert over == sorted(over)


@settings(max_examples=60, deadline=None)
@given(
    geometry=st.sampled_from([TINY, MIXTURE]),
    world_size=st.integers(1, 7),
    tp_size=st.sampled_from([1, 2, 4]),
    limit=st.sampled_from([64, 500, 4096]),
    handed=st.sampled_from([64, 1 << 20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_row_comes_from_the_rank_that_holds_it(
    geometry: Geometry,
    world_size: int,
    tp_size: int,
    limit: int,
    handed: int,
    dtype: torch.dtype,
) -> None:
    cuts = Cuts.of(manifests(geometry, tp_size), limit)
    plan = SendPlan(world_size, tp_size)
    covered: Counter[tuple[int, int, int]] = Counter()
    for steps in steps_of(plan, cuts, dtype, handed):
        for step in steps:
            packed: Counter[int] = Counter()
            largest = 0
            for t in step:
                item = cuts.item(t.cohort, t.piece)
                full = torch.arange(torch.Size(item.full_shape).numel()).view(item.full_shape)
                wanted = t.piece.of(source_view(item, full))[t.first : t.last]
                held = full.chunk(world_size)[t.owner].clone()
                own = held.as_strided(wanted.shape, item.slice.source_strides, t.local)
                assert torch.equal(own, wanted)
                assert plan.sender(t.cohort, t.bucket % plan.lanes) == t.sender
                covered.update(
                    (t.cohort, t.piece.item, t.piece.first + row) for row in range(t.first, t.last)
                )
                packed[t.owner] += packed_bytes(cuts, t, dtype)
                largest = max(largest, packed_bytes(cuts, t, dtype))
            assert max(packed.values(), default=0) <= max(handed, largest)
    wanted = {
        (cohort, number, row)
        for cohort, layout in enumerate(cuts.layouts)
        for number, item in enumerate(layout)
        for row in range(item.shape[0])
    }
    assert covered.keys() == wanted
    assert set(covered.values()) == {1}


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_model_takes_more_than_a_gibibyte(
    world_size: int, tp_size: int, dtype: torch.dtype
) -> None:
    """A model of 30 GB, in the server's dtype and rounded to it."""
    found = buffer_bytes(manifests(QWEN_14B, tp_size), world_size, dtype, packs=False)
    assert found.total <= 1 << 30
    assert (found.total == 0) == (world_size == 1 and tp_size == 1 and dtype is torch.bfloat16), (
        "all of it lies in place"
    )
    assert (found.handed == 0) == (world_size == 1 or (tp_size == 1 and dtype is torch.bfloat16))


@given(
    gpus=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    replicas=st.integers(1, 2),
    data=st.data(),
)
def test_nccl_is_never_asked_to_connect_two_processes_on_one_gpu(
    gpus: list[str], ranks: int, replicas: int, data: st.DataObject
) -> None:
    uuids = data.draw(
        st.lists(st.sampled_from("abcd"), min_size=ranks * replicas, max_size=ranks * replicas)
    )
    info = {"gpu_uuids": uuids, "tp_degree": ranks}
    plan = SendPlan(len(gpus), ranks)
    pairs = [
        (gpus[s], uuids[k * ranks + r])
        for k in range(replicas)
        for r in range(ranks)
        for s in plan.senders(r)
    ]
    assert route_to(info, gpus) is (Route.CUDA_IPC if any(a == b for a, b in pairs) else Route.NCCL)
    assert route_to(info, ["", *gpus[1:]]) is Route.GLOO
    assert route_to({**info, "gpu_uuids": ["", *uuids[1:]]}, gpus) is Route.GLOO


SERVERS = st.tuples(
    st.sampled_from("xy"),
    st.sampled_from(Route),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=2),
)


@given(st.lists(SERVERS, max_size=7))
def test_each_server_is_sent_to_once_with_its_like_and_by_nccl_once_on_a_gpu(
    servers: list[tuple[str, Route, list[str]]],
) -> None:
    servers = [((kind, route), route, uuids) for kind, route, uuids in servers]
    groups = sent_together(servers)
    assert sorted(place for _, places in groups for place in places) == list(range(len(servers)))
    assert len({(servers[places[0]][0], number) for number, places in groups}) == len(groups)
    for _, places in groups:
        assert len({servers[place][0] for place in places}) == 1
        if servers[places[0]][1] is Route.NCCL:
            used = [gpu for place in places for gpu in set(servers[place][2])]
            assert len(used) == len(set(used))
    for (kind, route), _, _ in servers:
        if route is not Route.NCCL:
            assert sum(servers[places[0]][0] == (kind, route) for _, places in groups) == 1


def test_servers_that_share_no_gpu_are_one_group() -> None:
    apart: list[tuple[str, Route, list[str]]] = [("x", Route.NCCL, [gpu]) for gpu in "abc"]
    assert sent_together(apart) == [(0, [0, 1, 2])]
    assert sent_together([*apart, ("x", Route.NCCL, ["a"])]) == [(0, [0, 1, 2]), (1, [3])]


def experts(count: int, width: int, hidden: int) -> tuple[Manifest, dict[str, Place]]:
    """vLLM's parameter of all experts, filled from a checkpoint tensor for each of two matrices.
    The trainer's parameter has these the other way round.
    """
    slices, sources, places = [], [], {}
    for expert in range(count):
        for number, name in enumerate(("gate", "up")):
            source, size = f"{expert}.{name}", width * hidden
            slices.append(SourceSlice(source, (size,), 0, (1,), (2 * expert + number) * size))
            sources.append((source, (width, hidden)))
            offset = (2 * expert + 1 - number) * size
            places[source] = Place(
                "experts",
                (count, 2 * width, hidden),
                Region(offset, (width, hidden), (hidden, 1)),
            )
    shard = LearnedShard("w13", (count, 2 * width, hidden), tuple(sources), tuple(slices))
    return Manifest(0, 1, (ManifestEntry(shard, "float32", "cpu"),)), places


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 5),
    count=st.integers(1, 5),
    width=st.integers(1, 4),
    hidden=st.integers(1, 5),
    limit=st.sampled_from([64, 500]),
)
def test_every_element_of_an_expert_comes_from_the_rank_that_holds_it(
    world_size: int, count: int, width: int, hidden: int, limit: int
) -> None:
    manifest, places = experts(count, width, hidden)
    cuts = Cuts.of([manifest], limit, lambda item: in_own_tensor(item, places[item.slice.source]))
    full = torch.randn(count, 2 * width, hidden)
    parameter = torch.full((full.numel(),), torch.nan)
    for steps in steps_of(SendPlan(world_size, 1), cuts, torch.float32):
        for transfer in (one for step in steps for one in step):
            item = cuts.item(0, transfer.piece)
            held = full.chunk(world_size)[transfer.owner].clone()
            rows = (transfer.last - transfer.first, *item.shape[1:])
            target = transfer.piece.of(local_view(item, parameter))
            target[transfer.first : transfer.last] = held.as_strided(
                rows, item.slice.source_strides, transfer.local
            )
    swapped = full.view(count, 2, width, hidden).flip(1)
    assert torch.equal(parameter.view_as(swapped), swapped)


def test_rows_that_are_spread_over_ranks_are_refused() -> None:
    """A transposed matrix: each of its rows has elements on all ranks."""
    shard = LearnedShard("w", (3, 4), (("x", (4, 3)),), (SourceSlice("x", (3, 4), 0, (1, 3), 0),))
    manifest = Manifest(0, 1, (ManifestEntry(shard, "float32", "cpu"),))
    cuts = Cuts.of([manifest])
    assert list(steps_of(SendPlan(1, 1), cuts, torch.float32))
    with pytest.raises(BridgeError, match="rows that are spread over ranks in the trainer's x"):
        list(steps_of(SendPlan(2, 1), cuts, torch.float32))
