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
print("REPLACED", len(names))
"""


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


def test_a_process_enters_vllms_mode_with_our_functions(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        entering = start_unguarded(
            [sys.executable, "-c", ENTERING], log.fileno(), os.environ, ROOT, "vllm"
        )
    status, said = entering.wait(120), (tmp_path / "log").read_text()
    assert (status, "REPLACED 6" in said) == (0, True), said[-2000:]


def test_vllm_calls_our_functions_after_patching(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        patching = start_unguarded(
            [sys.executable, "-c", PATCHES], log.fileno(), os.environ, ROOT, "vllm"
        )
    status, said = patching.wait(120), (tmp_path / "log").read_text()
    assert (status, "REPLACED 6" in said) == (0, True), said[-2000:]
