"""vLLM's batch-invariant mode."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing, vllm_version


def replace_batch_invariant(
    rms_norm: Callable[..., Any],
    linear: Callable[..., Any],
    log_softmax: Callable[..., Any],
    token_logprobs: Callable[..., Any],
    softmax: Callable[..., Any],
) -> list[str]:
    """Put functions in the place of those that vLLM's batch-invariant mode uses; call before a
    worker sets up its device.

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
    layers, mode = "vllm.model_executor.layers", _mode_module()
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


def start_batch_invariance() -> bool:
    """Call vLLM's own init_batch_invariance, which reads VLLM_BATCH_INVARIANT.

    Versions differ in where the function is, and in whether it takes the attention backend.

    Returns:
        Whether vLLM's mode is on. It is off if vLLM read the variable before it was set.

    Raises:
        UnsupportedVllm: vLLM is missing, or has no such function.
    """
    vllm_version()  # names a missing vLLM
    module = importlib.import_module(_mode_module())
    start = getattr(module, "init_batch_invariance", None)
    if start is None:
        raise UnsupportedVllm(seam_missing(f"{_mode_module()}.init_batch_invariance"))
    if inspect.signature(start).parameters:
        start(_flash_attention_backend())
    else:
        start()
    is_on = getattr(module, "vllm_is_batch_invariant", None)
    return bool(
        is_on() if is_on is not None else importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT
    )


def _flash_attention_backend() -> Any:
    for place in ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry"):
        if _exists(place):
            return importlib.import_module(place).AttentionBackendEnum.FLASH_ATTN
    raise UnsupportedVllm(seam_missing("vllm.v1.attention.backends.registry.AttentionBackendEnum"))


def _mode_module() -> str:
    """Name of the module of the mode: the first is of 0.26, the second of later versions."""
    older = "vllm.model_executor.layers.batch_invariant"
    return older if _exists(older) else "vllm.model_executor.determinism.batch_invariant"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False


def pin_flash_attention(args: Any, version: int) -> None:
    """Have the server's attention run this version of FlashAttention, in place.

    Args:
        args: vLLM's parsed flags.
        version: 2, 3 or 4.

    Raises:
        UnsupportedVllm: this vLLM has no such setting.
    """
    config = getattr(args, "attention_config", None)
    if isinstance(config, dict):
        config["flash_attn_version"] = version
    elif config is not None and hasattr(config, "flash_attn_version"):
        config.flash_attn_version = version
    else:
        raise UnsupportedVllm(seam_missing("vllm.config.AttentionConfig.flash_attn_version"))


def graphs_without_compilation() -> Any:
    """vLLM's compilation settings for CUDA graphs of decode steps over layers that run as they are
    written.
    """
    config = importlib.import_module("vllm.config").CompilationConfig
    return config(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
