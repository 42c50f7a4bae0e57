"""Which kernels a process runs in deterministic mode: both sides must name the same, or they refuse
to pair.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_patching.batch_invariant.flash_attention import flash_attention_version
from vllm_patching.batch_invariant.plan import ENTRY, SumPlan
from vllm_patching.batch_invariant.settings import pinned

_REFERENCE = "reference in torch"
OPERATIONS = (
    "linear",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "attention_varlen",
    "chosen_logprobs",
    "add_parts",
    "route",
    "experts",
)


def provenance(plan: SumPlan | None = None) -> dict[str, str]:
    """Operation -> kernel with version and settings, and what they share (`machine`, `torch`,
    `sum_plan`).

    Two processes that return equal dictionaries run the same code with the same settings on the
    same kind of GPU. It does not prove that the kernels are right; that is what the self-test and
    the comparison of every token are for.

    Args:
        plan: of the row-parallel sums; not given: one part.
    """
    shared = {
        "torch": f"{torch.__version__} cuda {torch.version.cuda}",
        ENTRY: str(plan or SumPlan()),
    }
    if not torch.cuda.is_available():
        return {
            **{name: _REFERENCE for name in OPERATIONS},
            **shared,
            "machine": "cpu",
            "reference": _source_hash("reference.py"),
        }
    vllm = f"vllm {importlib.import_module('vllm').__version__}"
    triton = f"triton {importlib.import_module('triton').__version__}"
    ours = f"lockstep {_source_hash('kernels.py')} {triton}"
    flags = " ".join(f"{name}={value}" for name, value in sorted(pinned().items()))
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "linear": f"cublaslt {_cublas_version()} {flags}{_replaced_linear(device.major)}",
        "rms_norm": ours,
        "fused_add_rms_norm": ours,
        "rotary_embedding": f"{vllm} _C.rotary_embedding",
        "silu_and_mul": f"{vllm} _C.silu_and_mul",
        "attention_varlen": f"{vllm} flash_attn {flash_attention_version(device.major)} num_splits=1 page=16",
        "chosen_logprobs": ours,
        "add_parts": ours,
        "route": ours,
        "experts": f"torch grouped_mm, {ours}, {_source_hash('expert_kernels.py')}",
        **shared,
        "machine": f"{device.name} sm_{device.major}{device.minor} {device.multi_processor_count} SMs",
    }


def provenance_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first entry in which two provenances differ, as "name: ours ... theirs ..."; empty if
    they are equal.
    """
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return (
                f"{name}: {ours.get(name, 'missing')!r} here, {theirs.get(name, 'missing')!r} there"
            )
    return ""


def table_hash(table: torch.Tensor) -> str:
    """Hash a rotary table's shape, dtype and bits: with it both sides find out that they rotate by
    the same angles.
    """
    raw = table.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(f"{tuple(table.shape)} {table.dtype} ".encode() + raw).hexdigest()[:16]


def _replaced_linear(major: int) -> str:
    """Name vLLM's replacement of torch's product, which its mode installs on some GPUs older than
    Hopper.
    """
    replaced = major < 9 and torch._C._dispatch_has_kernel_for_dispatch_key("aten::linear", "CUDA")
    return " replaced by vLLM's Triton kernel" if replaced else ""


def _cublas_version() -> str:
    """Return the version of the library that torch has loaded; "unknown" if it has another name."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcublasLt.so.{major}", "libcublasLt.so"):
        try:
            get_version = ctypes.CDLL(name).cublasLtGetVersion
        except (OSError, AttributeError):
            continue
        get_version.restype = ctypes.c_size_t
        return str(get_version())
    return "unknown"


def _source_hash(name: str) -> str:
    """Hash of a file: two sides with the same hash and the same Triton run the same kernels."""
    return hashlib.sha256((Path(__file__).parent / name).read_bytes()).hexdigest()[:12]
