"""Models without a row in the table of families: vLLM's layout is learned, transformers trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.models.hf_checkpoint import load_model
from tests.conftest import Processes
from tests.e2e.bridge_helpers import (
    joined,
    largest_difference,
    made_up_group,
    new_weights,
)
from tests.e2e.conftest import (
    BRIDGE_TIMEOUT,
    VllmServer,
    save_byte_tokenizer,
    start_vllm,
    trainer_command,
)
from tests.tiny_models import CONFIGS, UPDATED, make_model, without_images

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

SERVED = {
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "hidden_size": 128,
    "eos_token_id": 257,
}
HEADS = {
    "head_dim": 32,  # vLLM's CPU attention has heads of 32 or more
    "kv_lora_rank": 512,  # and latent attention of these sizes alone
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
IMAGES = {"Qwen2_5_VL": {"image_token_id": 298, "video_token_id": 299}}
"""Keys of models that also read images, with tokens within the vocabulary."""
FLAGS = {
    "DeepseekV3": ("--attention-backend", "CPU_MLA"),
    "Qwen2_5_VL": ("--language-model-only",),
}
"""vLLM would choose a backend for bfloat16 on processors that have one, and load a vision tower."""
LOGGED = {
    "DeepseekV3": "Recomputed after each update: model.layers.0.self_attn.mla_attn.mla_attn.W_UK_T",
    "Qwen2_5_VL": "Layout of Qwen2_5_VLForConditionalGeneration learned from vLLM's loader",
    "Falcon": "Updates of FalconForCausalLM go through vLLM's loader, from a copy of the whole checkp",
}
"""Lines about models with tensors that vLLM derives, and with a loader that computes."""
ROUNDING = 2e-4
"""Latent attention multiplies in another order than transformers."""


@pytest.mark.parametrize("name", UPDATED)
def test_an_update_arrives_whole(
    name: str,
    tmp_path: Path,
    processes: Processes,
    free_port: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In both kinds of transfer; the served logprobs equal transformers'."""
    folder = tmp_path / name
    save_served(name, folder)
    if name in IMAGES:
        for variable, value in without_images().items():
            monkeypatch.setenv(variable, value)
    flags = ("--bridge-timeout", str(BRIDGE_TIMEOUT), *FLAGS.get(name, ()))
    server = start_vllm(processes, free_port, folder, tmp_path, flags=flags)
    assert LOGGED.get(name, f"Layout of {name}ForCausalLM learned from vLLM's loader") in server.log
    stale = load_model(str(folder), torch.float32)
    assert largest_difference(server, stale) < ROUNDING
    for version, kind in ((1, "direct"), (2, "overlapped")):
        with joined(server, kind, free_port, monkeypatch) as (bridge, model):
            assert bridge.params_mapped == bridge.params_total
            report = bridge.sync(version, new_weights(model, version))
            state = server.state()
            assert (state["weight_version"], state["state"]) == (version, "serving")
            assert state["checksums"] == [report.checksum]
            assert largest_difference(server, model) < ROUNDING
            assert largest_difference(server, stale) > 0.01, "old weights would be seen"
    if name == "Mixtral":
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        train(server, processes, free_port(), tmp_path)
        trained = load_model(str(tmp_path / "checkpoints" / "step_2"), torch.float32)
        assert largest_difference(server, trained) < ROUNDING


def save_served(name: str, folder: Path) -> None:
    """Save a random model that vLLM's CPU build serves, and a tokenizer."""
    case = CONFIGS[name]
    keys: dict[str, Any] = SERVED | {key: value for key, value in HEADS.items() if key in case}
    if name in IMAGES:
        rope = case["text_config"]["rope_parameters"] | {"mrope_section": [4, 6, 6]}
        keys = IMAGES[name] | {
            "text_config": case["text_config"] | keys | {"rope_parameters": rope},
            "vision_config": case["vision_config"] | {"out_hidden_size": SERVED["hidden_size"]},
        }
    make_model(name, folder, **keys)
    save_byte_tokenizer(folder)


def train(server: VllmServer, processes: Processes, port: int, folder: Path, tier: int = 2) -> None:
    """Train two steps by the trainer's own process, which broadcasts to the server."""
    processes.start_service(port)
    service = f"http://127.0.0.1:{port}"
    for number in range(2):
        group = made_up_group(number)
        httpx.post(f"{service}/scored_data", json=group, timeout=120).raise_for_status()
    command = trainer_command(
        server.model,
        service,
        folder,
        bridge="broadcast",
        vllm_port=server.port,
        lr=1e-3,
        training_steps=2,
        batch_size=1,
        gradient_accumulation_steps=4,
        seq_len=64,
        num_threads=1,
    )
    text = processes.finish(processes.start("trainer", command), seconds=240)
    assert ("model: tier 2" in text) == (tier == 2)
    assert "Training complete: 2 steps" in text
    assert (server.state()["state"], server.state()["weight_version"]) == ("serving", 2)
