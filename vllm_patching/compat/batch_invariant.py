"""vLLM's batch-invariant mode."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing


def replace_batch_invariant(
    rms_norm: Callable[..., Any],
    linear: Callable[..., Any],
    log_softmax: Callable[..., Any],
    token_logprobs: Callable[..., Any],
    softmax: Callable[..., Any],
) -> list[str]:
    """Put functions in the place of those that vLLM's batch-invariant mode uses; call before a worker sets up its device.

    Args:
        rms_norm: (x, weight, eps, residual) -> y, or (y, new residual).
        linear: (x, weight, bias) -> y.
        log_softmax: of logits in the model's dtype, float32, for the V1 model runner.
        token_logprobs: (logits, token ids [tokens, k]) -> [tokens, k], for the V2 model runner.
        softmax: (x, dim, widen), for aten::_softmax on the GPU.

    Returns:
        what was replaced.

    Raises:
        UnsupportedVllm: one of them is missing.
    """
    layers = "vllm.model_executor.layers"
    mode = f"{layers}.batch_invariant"
    if importlib.util.find_spec(mode) is None:  # since 0.27 or later
        mode = "vllm.model_executor.determinism.batch_invariant"
    places = [
        (f"{layers}.layernorm", "", "rms_norm_batch_invariant", rms_norm),
        (f"{layers}.linear", "", "linear_batch_invariant", linear),
        (f"{layers}.vocab_parallel_embedding", "", "linear_batch_invariant", linear),
        (mode, "", "softmax_batch_invariant", softmax),
        ("vllm.v1.sample.sampler", "Sampler", "compute_logprobs", staticmethod(log_softmax)),
        ("vllm.v1.worker.gpu.sample.logprob", "", "compute_token_logprobs", token_logprobs),
    ]
    found = []
    for place, inside, name, replacement in places:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UnsupportedVllm(seam_missing(place)) from error
        owner = getattr(module, inside, None) if inside else module
        if not hasattr(owner, name):
            raise UnsupportedVllm(seam_missing(".".join(filter(None, (place, inside, name)))))
        found.append((owner, name, replacement))
    for owner, name, replacement in found:
        setattr(owner, name, replacement)
    return [".".join(filter(None, place[:3])) for place in places]


def graphs_without_compilation() -> Any:
    """vLLM's compilation settings for CUDA graphs of decode steps over layers that run as they are written."""
    config = importlib.import_module("vllm.config").CompilationConfig
    return config(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
