"""The server's side of deterministic mode: which flags it sets and refuses, and which requests."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any

from vllm_patching.batch_invariant.flash_attention import OLDEST_CAPABILITY, flash_attention_version
from vllm_patching.batch_invariant.pages import PAGE
from vllm_patching.batch_invariant.plan import PARTS
from vllm_patching.batch_invariant.provenance import provenance_difference
from vllm_patching.batch_invariant.settings import ENVIRONMENT
from vllm_patching.compat.batch_invariant import (
    enabled_passes,
    graphs_without_compilation,
    keep_ordered_sums,
    pin_flash_attention,
)
from vllm_patching.compat.requests import check_requests
from vllm_patching.protocol.messages import DeterministicWorker

logger = logging.getLogger(__name__)

SELF_TEST_SECONDS = 180.0
"""Compiling the kernels for the first time takes most of it."""
WORKER = "vllm_patching.batch_invariant.worker.DeterministicWorker"
SHARED_WORKER = "vllm_patching.batch_invariant.worker.DeterministicSharedWorker"

_REFUSED: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "it was never tried"),
    "enable_expert_parallel": (False, "ranks add their experts in an order that the trainer does not follow; leave it out"),
    "data_parallel_size": (1, "start one server for each replica instead"),
    "decode_context_parallel_size": (1, "it splits the sums of attention"),
    "enable_lora": (False, "the kernels of adapters have no counterpart in the trainer; leave it out, train all weights"),
    "quantization": (None, "quantised weights differ from the trainer's"),
    "speculative_config": (None, "several tokens are verified in one step by other kernels"),
    "kv_cache_dtype": ("auto", "keys and values must be kept in the model's dtype"),
    "logprobs_mode": ("raw_logprobs", "others go through kernels that the trainer does not run, for the same numbers"),
    "cpu_offload_gb": (0, "it was never tried"),
    "block_size": (PAGE, f"the trainer lays keys and values out in pages of {PAGE}"),
    "inflight_cache": ("recompute", "keys and values of old and new weights would mix"),
    "logits_processors": (None, "the trainer does not know them"),
}  # fmt: skip
"""Flag -> the one value that is allowed, and why no other is."""

_SUMMING_PASSES = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""Compiler passes that sum over tensor-parallel ranks inside other operations."""

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameter -> the values under which the returned log-probabilities belong to what was
sampled from.

Temperature 0 is allowed besides 1: evaluation is greedy, and is not trained on.
"""


class DeterminismRefused(ValueError):
    """The options cannot be deterministic. The message has the remedy in one line."""


def prepare_server(args: argparse.Namespace, shared: bool) -> None:
    """Set flags and environment of a vLLM server, in place, before its engine starts.

    Args:
        args: vLLM's parsed flags and ours.
        shared: the weight bridge is on.

    Raises:
        DeterminismRefused: this machine or one of the flags does not allow it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise DeterminismRefused(
            "--deterministic needs an NVIDIA GPU: without one vLLM has no kernels that the trainer could share; leave it out"
        )
    if not current_platform.has_device_capability(OLDEST_CAPABILITY):
        raise DeterminismRefused(
            f"--deterministic needs a GPU of compute capability 8.0 or above, not {current_platform.get_device_name()}: older "
            "ones have neither FlashAttention nor bfloat16"
        )
    if not current_platform.is_device_capability_family(90):
        logger.warning(
            "--deterministic was only measured on Hopper GPUs; on %s the self-test decides whether this server may serve",
            current_platform.get_device_name(),
        )
        pin_flash_attention(
            args, flash_attention_version(current_platform.get_device_capability().major)
        )
    refuse_flags(args)
    _set_flags(args)
    keep_ordered_sums(args)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    args.compilation_config = graphs_without_compilation()
    args.worker_extension_cls = SHARED_WORKER if shared else WORKER


def refuse_flags(args: argparse.Namespace) -> None:
    """Raise DeterminismRefused for the first flag with a value that deterministic mode does not
    allow.
    """
    for name, (allowed, why) in _REFUSED.items():
        value = getattr(args, name, None)
        if value not in (allowed, None, []):
            raise DeterminismRefused(
                f"--{name.replace('_', '-')} {value} cannot be combined with --deterministic: {why}"
            )
    if args.tensor_parallel_size not in (None, *PARTS):
        raise DeterminismRefused(
            f"--tensor-parallel-size {args.tensor_parallel_size} cannot be combined with "
            f"--deterministic: pass {', '.join(map(str, PARTS[:-1]))} or {PARTS[-1]}"
        )
    if passes := enabled_passes(args, _SUMMING_PASSES):
        raise DeterminismRefused(
            f"--compilation-config with {passes[0]} cannot be combined with --deterministic: it "
            "sums over ranks in an order that the trainer does not follow; leave it out"
        )
    if args.dtype not in ("auto", "bfloat16"):
        raise DeterminismRefused(
            f"--dtype {args.dtype} cannot be combined with --deterministic: pass --dtype bfloat16"
        )


def _set_flags(args: argparse.Namespace) -> None:
    args.dtype = "bfloat16"
    args.block_size = PAGE
    args.attention_backend = "FLASH_ATTN"
    # A model's own generation_config.json would change the sampling of requests without parameters.
    args.generation_config = "vllm"


def check_sampling(params: Any) -> None:
    """Raise DeterminismRefused (a ValueError) if a request samples from anything but the model's
    own distribution.

    Args:
        params: vLLM's SamplingParams; anything else (pooling) is refused.
    """
    if not hasattr(params, "temperature"):
        raise DeterminismRefused(
            "this server is in deterministic mode, in which it samples and does nothing else"
        )
    for name, allowed in _SAMPLING.items():
        value = getattr(params, name, None)
        if value is not None and value not in allowed:
            raise DeterminismRefused(
                f"{name} {value!r} is refused in deterministic mode, because the trainer could not follow it: "
                f"pass {' or '.join(repr(v) for v in allowed)}, or start the server without --deterministic"
            )


async def verify(engine: Any) -> dict[str, Any]:
    """Have the worker test its kernels, and refuse from now on what cannot be deterministic.

    Args:
        engine: vLLM's client of the engine, ready.

    Returns:
        {"provenance", "rotary_table", "checks", "seconds"}, for a trainer that pairs with this
        server.

    Raises:
        DeterminismRefused: an operation depends on the batch on this machine.
    """
    check = DeterministicWorker.lockstep_deterministic_check.__name__
    report = joined_reports(await engine.collective_rpc(check, timeout=SELF_TEST_SECONDS))
    check_requests(engine, check_sampling)
    return report


def joined_reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of a server: rank 0's, with the checks of all ranks and the longest time.

    Args:
        reports: of all ranks, by rank.

    Raises:
        DeterminismRefused: a rank's self-test failed, or the ranks do not run the same kernels.
    """
    for rank, report in enumerate(reports):
        if report["failure"]:
            where = f" on rank {rank} of {len(reports)}" if len(reports) > 1 else ""
            raise DeterminismRefused(
                f"the self-test of deterministic mode failed{where}, so nothing is served: "
                f"{report['failure']}"
            )
    first = reports[0]
    for rank, report in enumerate(reports):
        ours, theirs = (
            {**one["provenance"], "rotary_table": one["rotary_table"]} for one in (first, report)
        )
        if difference := provenance_difference(ours, theirs):
            raise DeterminismRefused(
                f"rank 0 and rank {rank} of this server do not run the same kernels, so nothing is "
                f"served: {difference}; give it GPUs of one kind"
            )
    joined = {name: value for name, value in first.items() if name != "failure"}
    joined["checks"] = sum(report["checks"] for report in reports)
    joined["seconds"] = max(report["seconds"] for report in reports)
    return joined
