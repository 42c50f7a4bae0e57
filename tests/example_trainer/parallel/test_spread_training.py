"""Spread over two ranks, by FSDP2 or as vLLM splits layers, a model is trained exactly as in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.models import load_model, save_model
from example_trainer.models.hf_checkpoint import read_geometry
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.cases import make_config, make_geometry, make_optimizer, make_whole, take_steps

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
SEEDS = range(9)


def hugging_face_config(seed: int) -> dict[str, object]:
    g = make_geometry(seed)
    return {
        "architectures": [g.architecture],
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size,
        "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.num_heads,
        "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim,
        "max_position_embeddings": g.max_positions,
        "rms_norm_eps": g.rms_norm_eps,
        "rope_theta": g.rope_theta,
        "attention_bias": g.o_bias,
        "mlp_bias": g.mlp_bias,
        "tie_word_embeddings": g.tie_word_embeddings,
    }


@pytest.mark.parametrize("kind", ["fsdp", "tensor_parallel"])
def test_two_ranks_train_as_one_process_does(kind: str, processes: Processes, tmp_path: Path) -> None:
    for seed in SEEDS:
        folder = tmp_path / f"model-{seed}"
        save_model(make_whole(make_geometry(seed), seed), folder)
        (folder / "config.json").write_text(json.dumps(hugging_face_config(seed)))
        assert read_geometry(folder)[0] == make_geometry(seed)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, HERE / "spread_worker.py", kind, tmp_path, *map(str, SEEDS)]
    processes.finish(processes.start(kind, command, environment={"PYTHONPATH": str(ROOT)}), seconds=240)
    for seed in SEEDS:
        config = make_config(seed)
        model, reference = (load_model(str(tmp_path / f"model-{seed}"), torch.float32) for _ in range(2))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = make_optimizer(model, config)
        figures = take_steps(model, optimizer, reference, config, seed)
        for one, many in zip(figures, json.loads((tmp_path / f"{kind}-{seed}.json").read_text()), strict=True):
            assert many == pytest.approx(one, rel=1e-4, abs=2e-6), f"case {seed}"
        expected = dict(optimizer.whole_state()) | {f"weight.{name}": p.detach() for name, p in model.named_parameters()}
        found = load_file(tmp_path / f"{kind}-{seed}.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = float((found[name] - tensor).abs().max())
            assert difference < 2e-6 + 1e-5 * float(tensor.abs().max()), f"case {seed}: {name} differs by {difference}"
        for name, tensor in before.items():
            assert (expected[f"weight.{name}"] - tensor).abs().max() > 1e-4, f"{name} was not trained: the comparison is empty"
