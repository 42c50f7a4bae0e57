"""The memory plan: what fits, the refusal of what does not, and the tokens of a bin."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from example_trainer.parallel.experts import require_expert_parallel
from example_trainer.training.memory_plan import (
    ACTIVATIONS,
    BUDGETS,
    MemoryShortage,
    Room,
    backward_activation_bytes,
    fitting_server_share,
    host_bytes,
    kept_activation_bytes,
    parameter_count,
    plan_memory,
    remedies,
    require_memory,
    token_budget,
)
from example_trainer.training.optimizer import free_host_memory
from tests.example_trainer.training.memory_cases import geometry, qwen_7b, qwen_14b, request
from tests.geometries import geometry_of
from vllm_patching.weights.families import Geometry

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GIB = 2**30


def room(
    free: float,
    host: float = 10**6,
    ranks_here: int = 1,
    device: torch.device = GPU,
    total: float = 0,
) -> Room:
    """Free memory in GiB."""
    return Room(device, int(free * GIB), int((total or free) * GIB), int(host * GIB), ranks_here)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 2**16), length=st.integers(2, 2048), layers=st.integers(1, 60), ranks=st.integers(1, 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), checkpointing=st.booleans(),
)  # fmt: skip
def test_more_of_anything_never_takes_less(
    tokens: int, length: int, layers: int, ranks: int, dtype: torch.dtype, checkpointing: bool
) -> None:
    asked = request(
        geometry=geometry(num_layers=layers),
        tokens_per_microbatch=tokens,
        seq_len=length,
        dtype=dtype,
        gradient_checkpointing=checkpointing,
    )
    total = plan_memory(asked).total
    assert plan_memory(replace(asked, tokens_per_microbatch=asked.tokens + 16)).total > total
    assert plan_memory(replace(asked, table="fast")).total <= total
    assert plan_memory(replace(asked, share_prefixes=True)).total >= total
    exact = replace(asked, table="invariant")
    assert plan_memory(replace(exact, share_prefixes=True)) == plan_memory(exact)
    assert plan_memory(replace(asked, geometry=geometry(num_layers=layers + 1))).total > total
    assert plan_memory(replace(asked, reference=True)).total > total
    assert plan_memory(replace(asked, single_copy=True)).total < total
    assert plan_memory(replace(asked, lora=(4, ("q_proj",)))).total < total
    if layers > 1:
        for count in (kept_activation_bytes, backward_activation_bytes):
            assert count(replace(asked, gradient_checkpointing=True)) <= count(
                replace(asked, gradient_checkpointing=False)
            )
    sharded = dict(plan_memory(replace(asked, world_size=ranks)).items)
    assert sharded["float32 masters"] <= dict(plan_memory(asked).items)["float32 masters"]
    sizes = [size for _, size in plan_memory(asked).items]
    assert sizes == sorted(sizes, reverse=True)


def test_a_shortage_names_the_items_what_is_free_and_the_remedies() -> None:
    asked = request(geometry=qwen_14b(), seq_len=2048, single_copy=True, tokens_per_microbatch=8192)
    need = plan_memory(asked).total
    total = 400 * GIB
    with pytest.raises(MemoryShortage) as caught:
        require_memory(asked, room(need / GIB - 5, total=400))
    line = str(caught.value)
    assert "\n" not in line
    for part in (
        f"needs about {need / 2**30:.2f} GiB and {need / 2**30 - 5:.2f} of 400.00 GiB are free on cuda:0",
        f"AdamW's two moments {8 * 14_770_033_664 / 2**30:.2f}, ",
        "--gpu-memory-utilization 0.", "--gradient-checkpointing (", "--skip-memory-check",
    ):  # fmt: skip
        assert part in line
    # The share that is advised does make room: what vLLM holds now, less what is short.
    share = float(line.split("--gpu-memory-utilization ")[1].split()[0])
    assert total * (1 - share) >= need
    assert require_memory(asked, Room(GPU, need, total, 0)).total == need


@pytest.mark.parametrize(
    ("share", "free", "advised"),
    [
        (0.92, 8.0, 0.75),  # 30.8 GiB are needed: 22.8 of 140 more than are free
        (0.80, 8.0, 0.63),  # another program has some of the memory too
        (
            None,
            8.0,
            0.76,
        ),  # another flag decides how much vLLM takes: the plan gets what it needs of the device
        (0.26, 8.0, None),  # the rest would not hold vLLM's 13.8 GiB of weights
    ],
)
def test_the_share_that_is_advised_leaves_what_is_missing(
    share: float | None, free: float, advised: float | None
) -> None:
    """14B over two GPUs of 140 GiB, in the smallest way that its plan knows, beside a vLLM that has
    most of them.
    """
    asked = request(
        geometry=qwen_14b(), seq_len=2048, tokens_per_microbatch=2048, table="fast", single_copy=True, world_size=2,
        offload=True, gradient_checkpointing=True,
    )  # fmt: skip
    full = replace(room(free, total=140), server_share=share)
    assert fitting_server_share(asked, full) == advised
    assert not full.holds(asked)
    if advised is None:
        assert not any("--gpu-memory-utilization" in line for line in remedies(asked, full))
        return
    assert (
        remedies(asked, full)[0]
        == f"start vLLM with --gpu-memory-utilization {advised:.2f} or less"
    )
    taken = share if share is not None else 1 - free / 140
    assert replace(full, free=full.free + round((taken - advised) * 140 * GIB)).holds(asked)


def test_remedies_are_those_that_suffice() -> None:
    """A 14B model on one GPU of 140 GiB: its optimizer alone does not fit."""
    asked = request(geometry=qwen_14b(), seq_len=2048, tokens_per_microbatch=8192, table="fast")
    found = [text.split(" (")[0] for text in remedies(asked, room(139))]
    assert found == [
        "--gradient-checkpointing --optimizer-offload on",
        "--tokens-per-microbatch 4096 --optimizer-offload on",
        "4 GPUs",
        "2 GPUs and --optimizer adamw-8bit",
        "--weight-bridge-mode lora_only",
    ]
    assert (
        plan_memory(replace(asked, world_size=4)).total
        <= 139 * GIB
        < plan_memory(replace(asked, world_size=2)).total
    )
    # If nothing suffices, the refusal names the flags that lower the need.
    assert any("--gradient-checkpointing (" in text for text in remedies(asked, room(1)))
    longer = replace(asked, seq_len=32768, tokens_per_microbatch=65536, world_size=4)
    assert "--tokens-per-microbatch 32768" in str(remedies(longer, room(1024)))


def test_a_refusal_names_numbers_of_gpus_that_can_share_the_experts() -> None:
    """12 experts cannot be divided among 8 ranks, which would have enough memory."""
    sizes = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 2048}
    wide = geometry_of("Qwen3Moe", 24, 2048, 6144, 32, 4, 128, 32000, **sizes)
    spread = {"world_size": 2, "expert_parallel": 2, "optimizer": "adamw-8bit"}
    asked = request(geometry=wide, dtype=torch.bfloat16, **spread)
    totals = {n: plan_memory(replace(asked, world_size=n)).total / GIB for n in (4, 8)}
    assert totals[8] < totals[4]
    for free, advised in ((totals[4] * 1.01, True), (totals[8] * 1.01, False)):
        named = [int(n) for n in re.findall(r"(\d+) GPUs", " ".join(remedies(asked, room(free))))]
        assert bool(named) == advised
        for ranks in named:
            require_expert_parallel(asked.expert_parallel, ranks, wide)


def test_a_refusal_names_expert_parallelism_where_it_suffices() -> None:
    """Qwen3-30B-A3B over 8 GPUs: of the gathered layers, nearly all is experts."""
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    mixture = geometry_of("Qwen3Moe", 48, 2048, 6144, 32, 4, 128, 151936, **sizes)
    asked = request(
        geometry=mixture, seq_len=1024, tokens_per_microbatch=1024, table="fast", world_size=8,
        gradient_checkpointing=True,
    )  # fmt: skip
    totals = [plan_memory(replace(asked, expert_parallel=count)).total / GIB for count in (1, 8)]
    assert totals[0] - totals[1] > 3
    between = room(sum(totals) / 2, ranks_here=8)
    assert remedies(asked, between)[0].startswith("--expert-parallel 8 (")
    # 128 experts cannot be divided among 6 ranks, and are shared already by 8.
    for other in (replace(asked, world_size=6), replace(asked, expert_parallel=8)):
        assert "--expert-parallel" not in str(remedies(other, room(20)))


@settings(max_examples=60, deadline=None)
@given(
    free=st.integers(20, 200),
    host=st.integers(10, 300),
    offload=st.booleans(),
    recompute=st.booleans(),
)
def test_every_remedy_does_suffice(free: int, host: int, offload: bool, recompute: bool) -> None:
    """The sizes that a refusal promises are within what is free, and no remedy is in vain."""
    asked = request(
        geometry=qwen_14b(), seq_len=2048, tokens_per_microbatch=4096, table="fast", offload=offload,
        gradient_checkpointing=recompute,
    )  # fmt: skip
    here = room(free, host)
    if here.holds(asked):
        assert require_memory(asked, here).total <= here.free
        return
    with pytest.raises(MemoryShortage) as caught:
        require_memory(asked, here)
    found = re.findall(
        r"\((\d+\.\d+) GiB then(?:, and (\d+\.\d+) GiB of host memory)?\)", str(caught.value)
    )
    assert found or "a device with more memory" in str(caught.value)
    if any(float(size) <= free for size, _ in found):
        assert all(
            float(size) <= free + 0.01 and float(memory or 0) <= host + 0.01
            for size, memory in found
        )


H200 = 139
"""GiB that are free on one of 141 GB."""


@pytest.mark.parametrize(
    ("shape", "ranks", "host"),
    [(qwen_7b(), 1, 128), (qwen_14b(), 2, 256)],
    ids=["7B on one", "14B on two"],
)
def test_offloaded_models_fit(shape: Geometry, ranks: int, host: int) -> None:
    asked = request(
        geometry=shape, seq_len=4096, tokens_per_microbatch=4096, table="fast", world_size=ranks, workspace=2**30,
        gradient_checkpointing=True,
    )  # fmt: skip
    offloaded = replace(asked, offload=True)
    plan = require_memory(offloaded, room(H200, 0.9 * host * 10**9 / GIB, ranks))
    # On several ranks the masters are the parameters, which stay.
    bytes_each = 12 if ranks == 1 else 8
    assert plan.lasting["AdamW's two moments"] == 0
    masters = (12 - bytes_each) * parameter_count(shape) // ranks
    assert plan.lasting["float32 masters"] == masters
    assert host_bytes(offloaded) * ranks == bytes_each * parameter_count(shape)
    resident = plan_memory(asked)
    staged = plan.lasting["masters and moments on their way"]
    moved = bytes_each * parameter_count(shape) // ranks - staged
    assert resident.total - plan.total == pytest.approx(moved, abs=10)
    assert token_budget(offloaded, H200 * GIB) >= 8192


def test_more_offloaded_than_the_host_holds_is_refused() -> None:
    asked = request(geometry=qwen_14b(), offload=True, world_size=2, table="fast")
    refusal = (
        r"^moments in host memory \(--optimizer-offload\) need 110\.05 GiB, "
        r"and 93\.13 are free\. .* what helps: --optimizer adamw-8bit \("
    )
    with pytest.raises(MemoryShortage, match=refusal):
        require_memory(asked, room(H200, 100e9 / GIB, 2))
    require_memory(replace(asked, offload=False), room(400, 0, 2))


def test_8_bit_moments_take_a_byte_and_a_share_of_a_scale() -> None:
    """Matrices of whole blocks alone: biases and norms keep float32."""
    shape = qwen_14b()
    plain, small = request(geometry=shape), request(geometry=shape, optimizer="adamw-8bit")
    vectors = (
        shape.num_layers * (2 * shape.hidden_size + shape.q_size + 2 * shape.kv_size)
        + shape.hidden_size
    )
    assert small.trained - small.quantised == vectors
    assert small.moment_bytes == 2 * small.quantised + small.quantised // 256 * 8 + 8 * vectors
    assert (
        plan_memory(plain).total - plan_memory(small).total
        == plain.moment_bytes - small.moment_bytes
    )
    assert host_bytes(replace(small, offload=True)) == 4 * small.trained + small.moment_bytes
    # Over ranks, rows of 896 are not whole blocks; adapters are too small to be worth it.
    odd = request(geometry=geometry(hidden_size=896), optimizer="adamw-8bit")
    assert replace(odd, world_size=2).quantised < odd.trained // 3 < odd.quantised
    assert request(lora=(16, ("q_proj",)), optimizer="adamw-8bit").quantised == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(10**9, 200 * 10**9), st.integers(2, 40000), st.booleans())
def test_the_budget_is_the_largest_that_leaves_room(
    free: int, longest: int, checkpointing: bool
) -> None:
    asked = request(
        geometry=qwen_7b(),
        seq_len=longest,
        table="fast",
        gradient_checkpointing=checkpointing,
        offload=True,
        share_prefixes=True,
    )
    budget = token_budget(asked, free)
    assert budget >= min(longest, 32768)
    assert budget in (*BUDGETS, longest)
    if budget > max(min(longest, 32768), BUDGETS[-1]):
        assert plan_memory(replace(asked, tokens_per_microbatch=budget)).total <= free
    larger = [b for b in BUDGETS if b > budget]
    assert all(
        plan_memory(replace(asked, tokens_per_microbatch=b)).total > 0.92 * free for b in larger
    )


def test_on_a_cpu_only_what_is_certain_is_refused() -> None:
    asked = request(tokens_per_microbatch=65536, seq_len=1024, logprob_chunk=1)
    plan = plan_memory(asked)
    assert dict(plan.items)[ACTIVATIONS] > plan.total / 2
    assert plan.certain == plan_memory(replace(asked, tokens_per_microbatch=8, seq_len=8)).certain
    require_memory(asked, Room(CPU, plan.certain, plan.total, 0))
    with pytest.raises(MemoryShortage):
        require_memory(asked, Room(CPU, plan.certain - 1, plan.total, 0))
    with pytest.raises(MemoryShortage):
        require_memory(asked, Room(GPU, plan.certain, plan.total, 0))


def test_free_memory_heeds_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 kB\nHugePages_Total: 0\n"
    )
    assert free_host_memory(tmp_path, tmp_path / "none") == (800 * 1024, 1000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert free_host_memory(tmp_path, tmp_path) == (800 * 1024, 1000 * 1024)
    (tmp_path / "memory.max").write_text("102400\n")
    assert free_host_memory(tmp_path, tmp_path) == (102400 - 4096, 102400)
