"""Processes in which vLLM calls our functions once its mode is entered or its modules are patched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.forked_commands import start_unguarded

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.nightly

PATCHES = """
import os
import torch
from vllm_patching.batch_invariant.patches import apply_patches
names = apply_patches()
from vllm.v1.sample.sampler import Sampler
from vllm.model_executor.layers import layernorm, linear
from vllm_patching.batch_invariant import ops
logits = torch.randn(3, 50).bfloat16()
assert torch.equal(Sampler.compute_logprobs(logits), ops.log_softmax(logits))
x, w = torch.randn(3, 16), torch.randn(16)
assert torch.equal(layernorm.rms_norm_batch_invariant(x, w, 1e-6), ops.rms_norm(x, w, 1e-6))
y, total = layernorm.rms_norm_batch_invariant(x, w, 1e-6, residual=x)
assert torch.equal(total, x + x)
assert torch.equal(linear.linear_batch_invariant(x, w.view(1, 16)), ops.linear(x, w.view(1, 16)))
os.environ.update(NCCL_PROTO="LL", VLLM_BATCH_INVARIANT="1")
from vllm_patching.compat.batch_invariant import start_batch_invariance
assert start_batch_invariance()
nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
assert nccl == {"NCCL_PROTO": "LL"}, nccl
print("REPLACED", len(names))
"""
RANKS = """
import os
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from vllm_patching.batch_invariant.patches import apply_patches
apply_patches()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import linear as linear_module
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.layouts_test import rank_sum_failure
from vllm_patching.compat.batch_invariant import tensor_ranks

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["VLLM_DIST_IDENT"] = f"rank{rank}"  # unequal ones: vLLM then takes Gloo, no shared memory
torch.set_default_dtype(torch.bfloat16)
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(size, rank, "file://" + store, rank, "gloo")
    initialize_model_parallel(size)
    layer = RowParallelLinear(64, 24, bias=True)
    table = VocabParallelEmbedding(100, 24)
assert tensor_ranks() == size

class Linear:
    def apply(self, layer, x, bias=None):
        from vllm.model_executor.layers import linear
        return linear.linear_batch_invariant(x, layer.weight, bias)

    def embedding(self, layer, ids):
        return torch.nn.functional.embedding(ids, layer.weight)

layer.quant_method = table.quant_method = Linear()  # as vLLM's on a GPU in its mode
torch.manual_seed(0)
x, weight, bias, rows = (torch.randn(*shape) for shape in ((9, 64), (24, 64), (24,), (100, 24)))
rows[3] = -0.0
wide = 64 // size
with torch.no_grad():
    layer.weight.copy_(weight[:, rank * wide : (rank + 1) * wide])
    layer.bias.copy_(bias)
    table.weight.zero_()
    indices = table.shard_indices
    mine = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
    table.weight[: mine.stop - mine.start].copy_(rows[mine])
    columns = x[:, rank * wide : (rank + 1) * wide].contiguous()
    summed = layer(columns)[0]
    assert torch.equal(summed, ops.row_linear(x, weight, size, bias))
    assert size == 1 or not torch.equal(summed, ops.linear(x, weight, bias))
    assert torch.equal(layer(columns[4:5])[0][0], summed[4])
    looked_up = table(torch.arange(100))
    assert torch.equal(looked_up, rows)
    assert size == 1 or not looked_up[3].signbit().any()
    decoder = SimpleNamespace(self_attn=SimpleNamespace(o_proj=layer))
    assert rank_sum_failure(decoder, size) == ""
    if size > 1:
        linear_module.tensor_model_parallel_all_reduce = lambda x: x  # as another vLLM would do
        failure = rank_sum_failure(decoder, size)
        assert failure.startswith(f"vLLM's layer o_proj is not that of {size} parts: first"), failure
dist.barrier()
print("RANK", rank, "SUMS IN ORDER")
"""
"""A row-parallel layer and an embedding of vLLM, on each of several ranks."""


ENTERING = """
import os
os.environ["NCCL_PROTO"] = "LL"
from vllm_patching.batch_invariant.process import enter_mode
names = enter_mode()
assert enter_mode() is names
nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
assert nccl == {"NCCL_PROTO": "LL"}, nccl
assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["VLLM_BATCH_INVARIANT"]) == (":16:8", "1")
from vllm_patching.compat.batch_invariant import start_batch_invariance
assert start_batch_invariance()
os.environ["VLLM_BATCH_INVARIANT"] = "0"
assert not start_batch_invariance(), "a mode that is switched off is reported as such"
print("REPLACED", len(names))
"""


@pytest.mark.parametrize("program", [ENTERING, PATCHES], ids=["enters its mode", "is patched"])
def test_vllm_calls_our_functions(program: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", program]
        started = start_unguarded(command, log.fileno(), os.environ, ROOT, "vllm")
    status, said = started.wait(120), (tmp_path / "log").read_text()
    assert (status, "REPLACED 8" in said) == (0, True), said[-2000:]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vllms_layers_sum_in_the_order_of_the_ranks(size: int, tmp_path: Path) -> None:
    """The bias is the first rank's, and a rank's rows of the embedding are whole."""
    logs = [tmp_path / f"rank-{rank}" for rank in range(size)]
    ranks = []
    for rank, path in enumerate(logs):
        command = [sys.executable, "-c", RANKS, str(rank), str(size), str(tmp_path / "store")]
        with path.open("wb") as log:
            ranks.append(start_unguarded(command, log.fileno(), os.environ, ROOT, "vllm"))
    statuses = [process.wait(180) for process in ranks]
    outputs = [path.read_text() for path in logs]
    assert statuses == [0] * size, "\n".join(output[-1500:] for output in outputs)
    assert all("SUMS IN ORDER" in output for output in outputs)
