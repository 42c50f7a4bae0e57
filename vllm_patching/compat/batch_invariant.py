"""vLLM's batch-invariant mode."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam, seam_missing, vllm_version


def replace_batch_invariant(
    rms_norm: Callable[..., Any],
    linear: Callable[..., Any],
    log_softmax: Callable[..., Any],
    token_logprobs: Callable[..., Any],
    softmax: Callable[..., Any],
    all_reduce: Callable[..., Any],
) -> list[str]:
    """Replace the functions of vLLM's batch-invariant mode; call before a worker sets up its
    device.

    Args:
        rms_norm: (x, weight, eps, residual) -> y, or (y, new residual).
        linear: (x, weight, bias) -> y.
        log_softmax: of logits in the model's dtype, float32, for the V1 model runner.
        token_logprobs: (logits, token ids [tokens, k]) -> [tokens, k], for the V2 model runner.
        softmax: (x, dim, widen), for aten::_softmax on the GPU.
        all_reduce: (x) -> the sum over tensor-parallel ranks, behind row-parallel layers and the
            embedding.

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
        (f"{layers}.linear", "", "tensor_model_parallel_all_reduce", all_reduce),
        (f"{layers}.vocab_parallel_embedding", "", "tensor_model_parallel_all_reduce", all_reduce),
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


def keep_nccl_variables(kept: Callable[[Callable[[], Any]], Any]) -> None:
    """Have vLLM's mode leave NCCL's variables as the user set them; call before a worker sets up
    its device.

    The mode pins them so that NCCL's all-reduce sums in one order. Deterministic mode does not call
    it. With one channel, gathering would be slow. NCCL keeps the pinned protocol in every
    group of the process, so the bridge's other side would wait for ever.

    Args:
        kept: calls a function that changes the environment, and puts NCCL's variables back.

    Raises:
        UnsupportedVllm: the function that pins them is missing.
    """
    module = importlib.import_module(_mode_module())
    pin = seam(module, "override_envs_for_invariance")

    @functools.wraps(pin)
    def override(*arguments: Any, **options: Any) -> Any:
        return kept(functools.partial(pin, *arguments, **options))

    module.override_envs_for_invariance = override  # type: ignore[attr-defined]


def tensor_ranks() -> int:
    """Return how many tensor-parallel ranks the server has, in a worker."""
    count: int = _parallel_state().get_tensor_model_parallel_world_size()
    return count


def gather_parts(x: Any) -> Any:
    """Return every tensor-parallel rank's x [...] in the order of the ranks: [ranks, ...].

    Data is copied and nothing is summed. It runs on the current stream, so a CUDA graph can hold
    it.
    """
    return _parallel_state().get_tp_group().all_gather(x.unsqueeze(0), dim=0)


def sum_in_one_kernel(x: Any) -> Any | None:
    """Return the sum of x [...] over the tensor-parallel ranks by vLLM's one-stage all-reduce.

    Each rank's kernel reads the parts of all ranks from their GPUs, adds them in float32 in the
    order of the ranks, and rounds once. A CUDA graph can hold it.

    Returns:
        None where vLLM has no such kernel for these GPUs or this tensor.
    """
    reducer = _one_stage_reducer()
    return None if reducer is None else reducer.custom_all_reduce(x)


def sums_in_one_kernel() -> bool:
    """Report if the ranks of this server have vLLM's one-stage all-reduce, in a worker."""
    reducer = _one_stage_reducer()
    return reducer is not None and not reducer.disabled


def _one_stage_reducer() -> Any | None:
    """vLLM's custom all-reduce of the tensor-parallel ranks, if its mode pins it to one stage."""
    group = _parallel_state().get_tp_group()
    reducer = getattr(group.device_communicator, "ca_comm", None)
    return reducer if getattr(reducer, "batch_invariant", False) else None


def _parallel_state() -> Any:
    return importlib.import_module("vllm.distributed.parallel_state")


def keep_ordered_sums(args: Any) -> None:
    """Switch off vLLM's sums over ranks whose order is not the ranks', in place: flags and
    environment of a server.

    Custom all-reduce stays where vLLM's mode pins it to one stage: 0.26 does not. The others go
    through NVLink multicast, or sum in parts.
    """
    place = "vllm.distributed.device_communicators.custom_all_reduce"
    reducer = seam(importlib.import_module(place), "CustomAllreduce")
    if not hasattr(reducer, "batch_invariant"):
        args.disable_custom_all_reduce = True
    for name in _SUMMING_VARIABLES:
        os.environ[name] = "0"


_SUMMING_VARIABLES = (
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_USE_NCCL_SYMM_MEM",
)


def enabled_passes(args: Any, names: Iterable[str]) -> list[str]:
    """Return which compiler passes the user's --compilation-config switches on.

    Args:
        args: vLLM's parsed flags.
        names: of passes, in any version.
    """
    config = getattr(args, "compilation_config", None)
    passes = getattr(config, "pass_config", None)
    return [name for name in names if getattr(passes, name, None) is True]


def start_batch_invariance() -> bool:
    """Call vLLM's own init_batch_invariance, which reads VLLM_BATCH_INVARIANT.

    Versions differ in where the function is, and in whether it takes the attention backend.

    Returns:
        True if vLLM's mode is on. It is off if vLLM read the variable before it was set.

    Raises:
        UnsupportedVllm: vLLM is missing, or has no such function.
    """
    vllm_version()  # names a missing vLLM
    module = importlib.import_module(_mode_module())
    start = seam(module, "init_batch_invariance")
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
