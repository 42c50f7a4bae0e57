"""Operations of a step against a count by hand, traces of steps, and memory snapshots."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.gpu.shapes import SHAPES
from example_trainer.batch.reader import BatchFigures
from example_trainer.errors import ConfigError
from example_trainer.observe.perf import (
    Speed,
    StepProfiler,
    matrix_elements,
    memory_history,
    peak_memory,
    peak_rate,
    step_flops,
)
from tests.geometries import geometry_of
from vllm_patching.weights.families import Geometry


def run(profiler: StepProfiler, *steps: int) -> None:
    """Multiply matrices of as many rows as the step's number."""
    for step in steps:
        profiler.begin(step)
        with torch.profiler.record_function(f"work of step {step}"):
            torch.ones(step, 2) @ torch.ones(2, 2)
    profiler.close()


def traced(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {
            event["name"]
            for event in json.load(file)["traceEvents"]
            if event["name"].startswith("work of")
        }


@pytest.mark.parametrize(
    "steps",
    [(1, 2, 3, 4, 5), (1, 2, 3, 3, 4), (3, 4)],
    ids=["more follow", "one again", "ends there"],
)
def test_the_steps_that_are_named_are_traced(tmp_path: Path, steps: tuple[int, ...]) -> None:
    run(StepProfiler(range(3, 5), tmp_path, rank=1), *steps)
    assert traced(tmp_path / "steps_3-4.rank1.json.gz") == {"work of step 3", "work of step 4"}


def test_without_steps_nothing_is_made(tmp_path: Path) -> None:
    run(StepProfiler(range(0), tmp_path / "profile"), 1, 2)
    run(StepProfiler(range(7, 8), tmp_path / "behind the end"), 1, 2)
    assert [path.name for path in tmp_path.rglob("*")] == ["behind the end"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(range(1, 2), tmp_path)
    (tmp_path / "steps_1-1.rank0.json.gz").mkdir()
    run(profiler, 1, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"--profile: cannot write {tmp_path}/steps_1-1.rank0.json.gz" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"--profile cannot write to .*file/profile: Not a directory; give another --log-dir",
    ):
        StepProfiler(range(1, 2), tmp_path / "file" / "profile")


def test_the_history_of_a_cpus_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    history = memory_history(True, torch.device("cpu"), tmp_path)
    with (
        pytest.raises(
            ConfigError,
            match="--memory-snapshot records the memory of a GPU, and --device is cpu: ",
        ),
        history,
    ):
        pytest.fail("nothing is recorded")
    with memory_history(False, torch.device("cpu"), tmp_path / "none"):
        assert not list(tmp_path.iterdir())


def run_out_twice(observer: Callable[..., None]) -> None:
    for _ in range(2):
        observer(0, 1 << 40, 1 << 36, 0)
    raise RuntimeError("out of memory")


def test_a_gpus_memory_is_written_at_the_end_and_whenever_it_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own functions are stood in for: this machine may have no GPU."""
    recording: list[object] = []
    observers: list[Callable[..., None]] = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", **_: recording.append(enabled),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text("blocks")
    )
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )
    history = memory_history(True, torch.device("cuda"), tmp_path, rank=2)
    with pytest.raises(RuntimeError, match="out of memory"), history:
        run_out_twice(observers[0])
    names = ["memory.rank2.pickle", "out_of_memory_1.rank2.pickle", "out_of_memory_2.rank2.pickle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert recording == ["all", None]


QWEN3_1_7B = Geometry.from_config(SHAPES["qwen3-1.7b"])


SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_known_model_by_hand() -> None:
    assert (
        matrix_elements(QWEN3_1_7B)
        == 28 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144)
        == 1_409_286_144
    )
    pairs = 512 * 513 // 2
    expected = 6 * 512 * 1_409_286_144 + 6 * 409 * 2048 * 151_936 + 12 * 28 * 2048 * pairs
    assert step_flops(QWEN3_1_7B, 512, 409, pairs) == expected


def test_a_token_is_multiplied_with_its_experts_alone() -> None:
    mixture = geometry_of("Qwen3Moe", 2, 64, 160, 4, 2, 16, 97, mlp_only_layers=[0])
    attention = 64 * (64 + 2 * 32) + 64 * 64
    # Each token has 2 of 4 experts of width 160; the router's matrix has 4 rows.
    assert matrix_elements(mixture) == 2 * attention + 3 * 64 * 160 * (1 + 2) + 4 * 64


def test_what_torch_counts_in_transformers() -> None:
    """Its counter sees every matrix product; eager attention computes each pair of a length ×
    length matrix.
    """
    config = Qwen3Config(**SMALL, attn_implementation="eager")
    geometry = Geometry.from_config(config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    model = Qwen3ForCausalLM(config)
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None]).logits.sum().backward()
    rotary = (
        3 * 2 * (geometry.head_dim // 2) * length
    )  # positions times frequencies, which transformers has as a product
    assert counter.get_total_flops() == pytest.approx(
        step_flops(geometry, length, length, length * length), abs=rotary
    )


@given(st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 10**8), st.integers(1, 10**6))
def test_operations_of_passes_add_up(
    forwarded: int, trained: int, pairs: int, adapters: int
) -> None:
    one = step_flops(QWEN3_1_7B, forwarded, trained, pairs)
    assert step_flops(QWEN3_1_7B, 3 * forwarded, 3 * trained, 3 * pairs) == pytest.approx(3 * one)
    assert step_flops(QWEN3_1_7B, forwarded, trained, pairs, reference=1.0) == pytest.approx(
        one * 4 / 3
    )
    twice = step_flops(QWEN3_1_7B, forwarded, trained, pairs, reference=1.0, epochs=2)
    assert twice == pytest.approx(one * 7 / 3), "the reference is run once"
    assert step_flops(QWEN3_1_7B, forwarded, trained, pairs, epochs=2, ahead=0.75) == pytest.approx(
        one * 2.25
    )
    frozen = step_flops(QWEN3_1_7B, forwarded, trained, pairs, adapter_elements=adapters)
    forward = one / 3
    attention = 4 * 28 * 2048 * pairs
    assert frozen == pytest.approx(2 * forward + attention + 6 * adapters * forwarded)
    ahead = step_flops(QWEN3_1_7B, forwarded, trained, pairs, adapter_elements=adapters, ahead=1.0)
    assert ahead == pytest.approx(frozen + forward + 2 * adapters * forwarded)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("Ryzen", None),
    ],
)
def test_rates_by_name(name: str, rate: float | None) -> None:
    assert peak_rate(name, torch.bfloat16) == rate
    assert peak_rate(name, torch.float32) is None


FIGURES = BatchFigures(
    reward_mean=0.5, reward_std=0.5, tokens=320, sequences=4, response_length_mean=80.0, response_length_p50=80.0,
    response_length_p95=110.0, response_length_max=120, truncated_share=None, sequences_too_long=0, zero_advantage_share=0.25,
    groups_invalid=0, age_mean=1.0, age_max=2, forwarded_tokens=600, forwarded_targets=300, targets_with_logprobs=300,
    targets_with_reference=75, sequence_tokens=1000, attended_pairs=90_000, bins=1,
)  # fmt: skip


def test_the_figures_of_a_step() -> None:
    row = Speed(QWEN3_1_7B, peak=1e15).row(FIGURES, (1.0, 2.0, 1.0), 5)
    flops = step_flops(QWEN3_1_7B, 600, 300, 90_000)
    assert row == {
        "forwarded_tokens_per_second": 300.0, "packing_ratio": 0.6, "flops": flops, "mfu": flops / 2.0 / 1e15,
        "peak_memory_bytes": 5, "waiting_share": 0.25,
    }  # fmt: skip
    assert Speed(QWEN3_1_7B).row(FIGURES, (1.0, 2.0, 1.0), 5)["mfu"] is None
    scored = Speed(QWEN3_1_7B, reference=True).row(FIGURES, (1.0, 2.0, 1.0), 5)["flops"]
    assert scored == step_flops(QWEN3_1_7B, 600, 300, 90_000, reference=0.75), (
        "a quarter came along"
    )


def test_a_cpu_process_has_as_much_memory_as_it_ever_took() -> None:
    before = peak_memory(torch.device("cpu"))
    more = torch.ones(before // 4 + (64 << 20))  # float32
    assert peak_memory(torch.device("cpu")) >= more.nbytes
