"""The share of GPU memory of a vLLM server that the trainer starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.training import memory_choice
from example_trainer.training.memory_choice import (
    DEFAULT_SHARE,
    OUTSIDE_SHARE,
    WORKSPACE,
    choose_memory,
    server_needs,
    share_elsewhere,
    share_of,
)
from example_trainer.training.memory_plan import MemoryShortage, parameter_count
from example_trainer.weight_bridge.base import NoBridge
from example_trainer.weight_bridge.server_gpus import (
    GpuMemory,
    ServerFlags,
    ServerGpus,
    choose_server_gpus,
)
from tests.example_trainer.weight_bridge.test_server_gpus import geometry
from vllm_patching.weights.families import Geometry

GIB = 2**30
GPU = torch.device("cuda", 0)
QWEN_3B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_14B = QWEN_3B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


class Starts(NoBridge):
    """A bridge that would start a server, and keeps its flags."""

    def __init__(self, config: TrainerConfig, seen: list[str]) -> None:
        self.config, self.seen = config, seen
        self.flags: tuple[str, ...] | None = None

    def place_server(self, device: torch.device, geometry: Geometry) -> ServerGpus:
        flags = ServerFlags.of(self.config.vllm_args)
        return choose_server_gpus(self.config.vllm_gpus, self.seen, 0, geometry, flags.size)

    def add_server_flags(self, flags: tuple[str, ...]) -> None:
        self.flags = flags


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Plan a training with so many GiB of GPU memory; returns the server's flags and the choice."""

    def plan(
        model: dict, gib: float, seen: list[str], elsewhere: float | None = None, **options: object
    ):  # type: ignore[no-untyped-def,type-arg]
        (tmp_path / "config.json").write_text(json.dumps(model))
        total = int(gib * GIB)
        config = TrainerConfig(model_name=str(tmp_path), **options)  # type: ignore[arg-type]
        bridge = Starts(config, seen)
        other = total if elsewhere is None else int(elsewhere * GIB)
        monkeypatch.setattr(memory_choice, "free_memory", lambda device: (total - GIB, total))
        monkeypatch.setattr(memory_choice, "free_host_memory", lambda: (1000 * GIB, 1000 * GIB))
        monkeypatch.setattr(
            memory_choice,
            "memory_of_gpus",
            lambda: {"1": GpuMemory(other, total), "7": GpuMemory(other, total)},
        )
        choice = choose_memory(config, bridge, torch.bfloat16, GPU)
        return bridge.flags, choice

    return plan


def test_the_guides_legacy_run_fits_on_one_gpu(plan) -> None:  # type: ignore[no-untyped-def]
    """Qwen2.5-3B on 80 GB: trainer and server share the GPU, and every byte is planned for."""
    flags, _ = plan(QWEN_3B, 79, ["0"], batch_size=2, lr=1e-5)
    assert flags[0] == "--gpu-memory-utilization"
    share = float(flags[1])
    needs = server_needs(geometry(), torch.bfloat16, 1, 2048)
    assert share * 79 * GIB >= needs.share
    assert 0.10 <= share <= 0.40


def test_on_a_gpu_of_its_own_the_server_has_its_default(plan) -> None:  # type: ignore[no-untyped-def]
    assert plan(QWEN_3B, 79, ["0", "1"])[0] == ()
    assert plan(QWEN_3B, 79, ["0"], vllm_gpus="7")[0] == ()
    assert plan(QWEN_3B, 79, ["0"], vllm_gpus="1,7")[0] == ("--tensor-parallel-size", "2")
    flags, _ = plan(QWEN_3B, 79, ["0"], vllm_gpus="7", elsewhere=40)
    assert flags == ("--gpu-memory-utilization", "0.48")
    with pytest.raises(
        MemoryShortage,
        match=r"the vLLM server needs about .* on GPU 7, where 8\.00 of 79\.00 GiB are free",
    ):
        plan(QWEN_3B, 79, ["0"], vllm_gpus="7", elsewhere=8)


def test_a_gpu_that_is_not_there_is_named_before_anything_is_loaded(plan) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        ConfigError, match="--vllm-gpus 1,3: GPU 3 is not there; nvidia-smi lists 1, 7"
    ):
        plan(QWEN_3B, 79, ["0"], vllm_gpus="1,3")


def test_flags_of_the_user_win(plan) -> None:  # type: ignore[no-untyped-def]
    flags, choice = plan(QWEN_3B, 79, ["0"], vllm_args="--gpu-memory-utilization 0.2")
    assert flags == ()
    _, small = plan(QWEN_3B, 79, ["0"], vllm_args="--gpu-memory-utilization 0.3")
    assert small.tokens_per_microbatch <= choice.tokens_per_microbatch


def test_what_fits_nowhere_names_the_flag_that_makes_it_run(plan) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MemoryShortage) as caught:
        plan(QWEN_14B, 110, ["0"], optimizer_offload=True, gradient_checkpointing=True)
    message = str(caught.value)
    assert "beside the" in message
    assert "that the vLLM server needs there" in message
    assert "--vllm-gpus with the number of another GPU" in message
    assert "\n" not in message
    flags, _ = plan(
        QWEN_14B, 110, ["0"], vllm_gpus="7", optimizer_offload=True, gradient_checkpointing=True
    )
    assert flags == ()


@given(st.integers(1, 200), st.floats(0, 1))
def test_a_share_stays_within_what_is_left(gib: int, part: float) -> None:
    total = gib * GIB
    left = int(part * total)
    share = share_of(left, total)
    assert 0 <= share <= DEFAULT_SHARE
    assert share == 0 or share * total + OUTSIDE_SHARE <= left + 1
    assert share == DEFAULT_SHARE or (share + 0.0101) * total + OUTSIDE_SHARE > left


@given(st.integers(1, 64), st.sampled_from([1, 2, 4]), st.integers(1, 40000), st.integers(1, 40000))
def test_needs_are_those_of_one_long_sequence_or_of_many_short_ones(
    layers: int, degree: int, seq: int, longest: int
) -> None:
    model = replace(geometry(), num_layers=layers)
    needs = server_needs(model, torch.bfloat16, degree, seq, longest)
    tokens = max(min(longest, 32768), 32 * min(seq, longest, 32768))
    assert needs.weights == 2 * parameter_count(model) // degree
    assert needs.cache == tokens * 2 * layers * max(1, 2 // degree) * 128 * 2
    assert needs.share == needs.weights + needs.cache + WORKSPACE


def test_a_gpu_that_nvidia_smi_does_not_list_counts_as_free() -> None:
    needs = server_needs(geometry(), torch.bfloat16, 1, 2048)
    assert share_elsewhere(["0", "1"], {}, needs) == DEFAULT_SHARE
