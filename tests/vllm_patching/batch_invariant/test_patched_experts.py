"""vLLM's own layers with experts call our router and experts, in a process of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.nightly

LAYER = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm_patching.batch_invariant.patches import patch_experts, sum_over_ranks

replaced = patch_experts()
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.utils.torch_utils import set_default_torch_dtype
from tests.tiny_models import make_model
from tests.vllm_patching.worker.learn_layouts import tensor_parallel_group
from vllm_patching.batch_invariant import ops, self_test
from vllm_patching.batch_invariant.experts_test import expert_operations, layer_pairs, ties_failure
from vllm_patching.compat.experts import other_experts

folder = sys.argv[1]
make_model("Qwen3Moe", Path(folder), num_experts=6, norm_topk_prob=True)
model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64)
config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
    tensor_parallel_group(folder)
    layer = Qwen3MoeSparseMoeBlock(config, prefix="model.layers.0.mlp")
torch.manual_seed(0)
for parameter in layer.parameters():
    parameter.data = 0.2 * torch.randn(parameter.shape)
runner = layer.experts
assert "CPURouter" in other_experts(layer), other_experts(layer)
runner.router = FusedTopKRouter(2, 6, renormalize=True)  # as vLLM makes it on a GPU
assert other_experts(layer) == "", other_experts(layer)

with torch.no_grad():
    x = torch.randn(50, 64)
    held = runner.routed_experts
    logits = ops.linear(x, layer.gate.weight)
    weights, chosen = ops.route(logits, 2, True)
    ours = ops.experts(x, weights, chosen, held.w13_weight, held.w2_weight)
    with set_forward_context(None, config):
        assert torch.equal(layer(x), ours)
        for size in (1, 2, 3, 4):
            assert torch.equal(layer(x[-size:].clone()), ours[-size:])
    pairs = layer_pairs(layer)
    assert set(pairs) == {"gate", "router's weights", "router's choice", "experts"}
    assert self_test._pairs_failure(pairs) == ""
    assert ties_failure(layer) == ""
    named = [name for name, *_ in expert_operations(layer, 40, 4)]
    assert [name.endswith(("2 times the width", "4 times the width")) for name in named].count(1) == 2
    for name, total, operation, *expected in expert_operations(layer, 40, 4):
        assert self_test.first_difference(name, operation, total, *expected) == "", name
        if expected:
            assert self_test.first_difference(name, operation, total, expected[0] + 1), name

    held.quant_method.apply = lambda *_, **__: ours[:1].expand(300, -1) + 1
    assert "vLLM's layer experts does not run" in self_test._experts_failure(layer)
    del held.quant_method.apply


def changed(**values):
    own = dict(quant_method=held.quant_method, activation=held.activation, expert_map=None)
    own["apply_router_weight_on_input"] = False
    seen = dict(router=runner.router, moe_config=SimpleNamespace(tp_size=1), shared_experts=None)
    own |= {name: value for name, value in values.items() if name not in seen}
    seen |= {name: value for name, value in values.items() if name in seen}
    return SimpleNamespace(experts=SimpleNamespace(routed_experts=SimpleNamespace(**own), **seen))


assert other_experts(changed()) == ""
assert other_experts(changed(moe_config=SimpleNamespace(tp_size=2))) == ""
# The runner's own sum over ranks is the ordered one.
assert moe_runner.tensor_model_parallel_all_reduce is sum_over_ranks
split = SimpleNamespace(tp_size=2, ep_size=1, is_sequence_parallel=False)
split.skip_final_all_reduce = False
part, summed = torch.ones(3, 4), []
moe_runner.tensor_model_parallel_all_reduce = lambda x: summed.append(x) or 2 * x
owner = SimpleNamespace(moe_config=split, _fused_output_is_reduced=False)
found = moe_runner.MoERunner._maybe_reduce_final_output(owner, part, None)
assert len(summed) == 1 and torch.equal(found, 2 * part)
sigmoid = FusedTopKRouter(2, 6, scoring_func="sigmoid")
for values, words in (
    ({"expert_map": torch.zeros(6)}, "leave --enable-expert-parallel out"),
    ({"apply_router_weight_on_input": True}, "weights are applied before the experts"),
    ({"router": sigmoid}, "not by a softmax"),
    (
        {"moe_config": SimpleNamespace(tp_size=2, is_sequence_parallel=True)},
        "the sum of 2 ranks is not taken behind the experts",
    ),
    ({"shared_experts": layer}, "it has shared experts"),
    ({"w13_bias": torch.zeros(6)}, "its experts have biases"),
    ({"activation": SimpleNamespace(value="gelu")}, "the activation gelu"),
    ({"quant_method": SimpleNamespace()}, "start the server with --moe-backend triton"),
):
    assert words in other_experts(changed(**values)), (words, other_experts(changed(**values)))
print("REPLACED", len(replaced))
"""


def test_vllms_block_of_experts_calls_our_functions(tmp_path: Path) -> None:
    """On tokens alone and among others, and the self-test sees what differs."""
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", LAYER, str(tmp_path)]
        process = start_unguarded(command, log.fileno(), os.environ, ROOT, "vllm")
    status, text = process.wait(180), (tmp_path / "log").read_text()
    assert (status, "REPLACED 4" in text) == (0, True), text[-3000:]
