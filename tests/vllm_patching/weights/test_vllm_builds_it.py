"""vLLM builds the parameters that the table of families plans, at each tensor-parallel degree."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.geometries import config_of, windowless
from vllm_patching.weights.families import FAMILIES, Geometry
from vllm_patching.weights.sharding import plan_shards

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
DEGREES = (1, 2, 4)
CASES: dict[str, dict[str, Any]] = {name.removesuffix("ForCausalLM"): {} for name in FAMILIES} | {
    "Qwen3 with biases": {"attention_bias": True},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}

BUILD = """
import json, sys
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models import ModelRegistry
from vllm_patching.worker.parameters import own_parameters

shapes = {}
for architecture in json.loads(sys.argv[3]):
    lazy = ModelRegistry.models[architecture]
    ModelRegistry.register_model(architecture, lazy.load_model_cls())  # without a process for each
for name, folder in json.loads(sys.argv[1]).items():
    model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
            if parallel_state._EP is None:  # made only if the first model has experts
                parallel_state._EP = parallel_state.init_model_parallel_group(
                    [[0]], 0, "gloo", group_name="ep"
                )
        group = get_tp_group()
        for degree in json.loads(sys.argv[2]):
            # Layers read only these two to choose their shapes.
            group.world_size, group.rank_in_group = degree, degree - 1
            make, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
            config.compilation_config.static_forward_context.clear()
            with torch.device("meta"):
                model = make(vllm_config=config, prefix="")
            held = own_parameters(model)
            shapes[f"{name} {degree}"] = {n: list(p.shape) for n, p in held.items()}
        group.world_size, group.rank_in_group = 1, 0
print(json.dumps(shapes))
"""


def config(case: str) -> dict[str, Any]:
    return (
        config_of(case.split()[0], 1, 64, 80, 4, 2, 16, 97, hidden_act="silu")
        | windowless(case.split()[0])
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        | CASES[case]
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    """The shapes that vLLM gives to each case and degree, in a process of its own."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folders = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config(case)))
        folders[case] = str(folder)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BUILD,
            json.dumps(folders),
            json.dumps(DEGREES),
            json.dumps(list(FAMILIES)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes: dict[str, dict[str, list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return shapes


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES)
def test_vllm_builds_the_planned_parameters(
    case: str, degree: int, built: dict[str, dict[str, list[int]]]
) -> None:
    geometry = Geometry.from_config(config(case))
    planned = {s.name: list(s.shape) for s in plan_shards(geometry, degree - 1, degree)}
    shapes = built[f"{case} {degree}"]
    if case == "Qwen3 with biases":
        # vLLM would drop this bias silently; the worker refuses the model instead.
        assert planned.pop("model.layers.0.self_attn.o_proj.bias") == [64]
        assert "model.layers.0.self_attn.o_proj.bias" not in shapes
    if geometry.tie_word_embeddings:
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    assert shapes == planned
