"""Which operations depend on the batch on this GPU, and what do they cost? One GPU, no server,
about a minute.

    python bench/gpu/determinism_probe.py --output DIR

Compares every operation of deterministic mode, and the ones that it replaces, alone and in batches,
in the shapes of Qwen3-0.6B and 1.7B; attention as prefill, in chunks, decoded, mixed and in a CUDA
graph. Prints a table and writes determinism_probe.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.probe_tools import batch_dependence, differing_rows, microseconds, time_linear
from bench.measured import measured
from vllm_patching.batch_invariant.settings import ENVIRONMENT

SHAPES = {
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
    "1.7b qkv": (4096, 2048),
    "1.7b o": (2048, 2048),
    "1.7b gate_up": (12288, 2048),
    "1.7b down": (2048, 6144),
    "1.7b head": (151936, 2048),
}
"""Weight [out, in] of each linear layer."""
SIZES = [
    *range(1, 34),
    40,
    48,
    63,
    64,
    65,
    96,
    100,
    127,
    128,
    129,
    192,
    200,
    255,
    256,
    257,
    320,
    384,
    500,
    512,
    513,
]
LARGE = [768, 1000, 1024, 1536, 2048, 3000, 4096, 6000]
TIMED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 8192)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """bf16 on the GPU, the same for the same seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


class Probe:
    """Runs the parts, each of which may fail without costing the others."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.results: dict[str, Any] = {"measured": measured()}
        output.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run one part, print it as a table and write everything so far."""
        begun = time.monotonic()
        try:
            rows = run()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a part runs into is its result
            rows = {
                "failed": f"{type(error).__name__}: {error}",
                "where": traceback.format_exc().splitlines()[-6:],
            }
        torch.cuda.empty_cache()
        self.results[name] = rows
        (self.output / "determinism_probe.json").write_text(json.dumps(self.results, indent=1))
        now = time.monotonic()
        print(f"\n== {name}  ({now - begun:.1f} s, {now - self.started:.0f} s in all)", flush=True)
        for key, value in rows.items():
            print(f"{key:34} {_short(value)}", flush=True)


def _short(value: Any) -> str:
    if isinstance(value, dict) and "differ" in value:
        rest = {
            k: v
            for k, v in value.items()
            if k not in ("differ", "rows", "batches") and v not in ([], None)
        }
        verdict = "same bits" if not value["differ"] else f"{value['differ']} DIFFER"
        return f"{verdict:>16} of {value['rows']} rows  {rest or ''}"
    return json.dumps(value)


def machine() -> dict[str, Any]:
    """What takes part, and which backward passes of attention are there."""
    import vllm.vllm_flash_attn.flash_attn_interface  # noqa: F401

    from bench.gpu.machine import describe
    from vllm_patching.batch_invariant import ops

    # Dispatched operators are loaded with the library; listing them tells whether it has a backward
    # pass.
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if "_vllm_fa" in name or "flash_attention_back" in name
    ]
    return {**describe(), **ops.provenance(), "attention operators": names}


def linear_bits() -> dict[str, Any]:
    """cuBLASLt as pinned: alone against in a batch, in a CUDA graph, and against Triton kernels."""
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    from bench.gpu.small_linear import CANDIDATES, small_linear
    from vllm_patching.batch_invariant import ops

    rows: dict[str, Any] = {}
    for name, (out, width) in SHAPES.items():
        head = out > 100_000
        total = 1024 if head else 8192
        x, weight = normal(total, width), normal(out, width, seed=1, scale=width**-0.5)
        sizes = SIZES if head else SIZES + LARGE
        rows[name] = batch_dependence(lambda s, x=x, w=weight: ops.linear(x[s], w), sizes, total)
        whole = ops.linear(x, weight)
        captured = _captured_difference(lambda n, x=x, w=weight: ops.linear(x[:n], w), whole)
        triton = {
            n: int(differing_rows(matmul_persistent(x[:n], weight.t()), whole[:n]))
            for n in (1, 8, 256, 1024)
        }
        rows[f"{name} others"] = {
            "rows differing in CUDA graph": captured,
            "of Triton persistent": triton,
            "of candidates, 16 rows": {
                label: int(differing_rows(small_linear(x[:16], weight, **options), whole[:16]))
                for label, options in CANDIDATES.items()
            },
        }
    x, weight, bias = (
        normal(512, 1536),
        normal(2048, 1536, seed=1, scale=0.03),
        normal(2048, seed=2),
    )
    rows["2.5-1.5b qkv with bias"] = batch_dependence(
        lambda s: ops.linear(x[s], weight, bias), SIZES[:-1], 512
    )
    rows["bias inside the product"] = batch_dependence(
        lambda s: torch.nn.functional.linear(x[s], weight, bias), SIZES[:-1], 512
    )
    return rows


def _captured_difference(
    call: Callable[[int], torch.Tensor], whole: torch.Tensor
) -> dict[int, int]:
    found = {}
    for size in (1, 8, 64, 256):
        call(size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(size)
        graph.replay()
        found[size] = int(differing_rows(out, whole[:size]))
    return found


def linear_speed(unpinned: dict[str, Any]) -> dict[str, Any]:
    """Microseconds for each number of rows: cuBLAS as it comes (from another process), as pinned,
    Triton, candidates.
    """
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    from bench.gpu.small_linear import CANDIDATES, small_linear
    from vllm_patching.batch_invariant import ops

    rows: dict[str, Any] = {}
    for name, (out, width) in SHAPES.items():
        if name == "0.6b head":
            continue
        sizes = [n for n in TIMED if n <= 256 or out < 100_000]
        rows[f"{name} as it comes"] = unpinned.get(name)
        rows[f"{name} pinned"] = {n: time_linear(ops.linear, out, width, n) for n in sizes}
        some = [n for n in (1, 8, 64, 256, 8192) if n in sizes]
        rows[f"{name} triton"] = {
            n: time_linear(lambda x, w: matmul_persistent(x, w.t()), out, width, n) for n in some
        }
        for label, options in CANDIDATES.items():
            rows[f"{name} {label}"] = {
                n: time_linear(lambda x, w, o=options: small_linear(x, w, **o), out, width, n)
                for n in (1, 8, 16)
            }
    return rows


def unpinned_speed() -> dict[str, Any]:
    """In a process without the settings: cuBLAS as it comes."""
    product = torch.nn.functional.linear
    return {
        name: {n: time_linear(product, out, width, n) for n in TIMED if n <= 256 or out < 100_000}
        for name, (out, width) in SHAPES.items()
        if name != "0.6b head"
    }


def norms() -> dict[str, Any]:
    """Ours alone and in a batch; vLLM's Triton norm, and its fused kernel across 256 tokens; speed."""
    import vllm._custom_ops as vllm_ops
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    from vllm_patching.batch_invariant import ops, reference

    def vllm_fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, r = x.clone(), residual.clone()
        vllm_ops.fused_add_rms_norm(y, r, weight, 1e-6)
        return y

    rows: dict[str, Any] = {}
    for width in (1024, 2048, 4096):
        x, residual, weight = (
            normal(2048, width),
            normal(2048, width, seed=1),
            normal(width, seed=2),
        )
        rows[f"rms_norm {width}"] = batch_dependence(
            lambda s, x=x, w=weight: ops.rms_norm(x[s], w, 1e-6), SIZES, 2048
        )
        rows[f"fused {width}"] = batch_dependence(
            lambda s, x=x, r=residual, w=weight: torch.cat(
                ops.fused_add_rms_norm(x[s], r[s], w, 1e-6), -1
            ),
            SIZES,
            2048,
        )
        rows[f"vLLM fused {width} (control)"] = batch_dependence(
            lambda s, x=x, r=residual, w=weight: vllm_fused(x[s], r[s], w), SIZES, 2048
        )
        total = ops.fused_add_rms_norm(x, residual, weight, 1e-6)[1]
        exact = reference.rms_norm(total.double(), weight.double(), 1e-6)
        rows[f"norms {width}: rows that differ"] = {
            "sum of ours and of torch": int(differing_rows(total, x + residual)),
            "fused and plain, ours": int(
                differing_rows(
                    ops.fused_add_rms_norm(x, residual, weight, 1e-6)[0],
                    ops.rms_norm(total, weight, 1e-6),
                )
            ),
            "ours and vLLM's Triton": int(
                differing_rows(
                    ops.rms_norm(x, weight, 1e-6), rms_norm_batch_invariant(x, weight, 1e-6)
                )
            ),
            "worst error": float((ops.rms_norm(total, weight, 1e-6).double() - exact).abs().max()),
        }
        for n in (1, 256, 8192):
            big, other = normal(n, width), normal(n, width, seed=1)
            rows[f"us {width} x {n}"] = {
                "ours": microseconds(
                    [lambda b=big, o=other, w=weight: ops.fused_add_rms_norm(b, o, w, 1e-6)] * 8
                ),
                "vLLM fused": microseconds(
                    [lambda b=big, o=other, w=weight: vllm_ops.fused_add_rms_norm(b, o, w, 1e-6)]
                    * 8
                ),
                "vLLM Triton": microseconds(
                    [lambda b=big, w=weight: rms_norm_batch_invariant(b, w, 1e-6)] * 8
                ),
            }
    qkv, weight = normal(2048, 4096), normal(128, seed=1)
    heads = qkv[:, 2048:3072].view(2048, 8, 128)
    rows["norm of heads"] = batch_dependence(
        lambda s: ops.rms_norm(heads[s], weight, 1e-6), SIZES, 2048
    )
    copied = ops.rms_norm(heads.contiguous(), weight, 1e-6)
    rows["norm of heads, view and copy"] = {
        "rows": 2048,
        "differ": int(differing_rows(ops.rms_norm(heads, weight, 1e-6), copied)),
    }
    return rows


def elementwise() -> dict[str, Any]:
    """silu_and_mul, rotary embedding, its table."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vllm_patching.batch_invariant import ops
    from vllm_patching.batch_invariant.provenance import table_hash

    x = normal(2048, 12288)
    device = torch.device("cuda")
    table = ops.rotary_table(128, 4096, 1e6, torch.bfloat16, device)
    q, k, positions = (
        normal(2048, 2048),
        normal(2048, 1024, seed=1),
        torch.arange(2048, device=device),
    )
    rows = {
        "silu_and_mul": batch_dependence(lambda s: ops.silu_and_mul(x[s]), SIZES, 2048),
        "rotary_embedding": batch_dependence(
            lambda s: torch.cat(ops.rotary_embedding(positions[s], q[s], k[s], 128, table), -1),
            SIZES,
            2048,
        ),
        "table, ours": table_hash(table),
    }
    with set_current_vllm_config(VllmConfig()), device:
        rope = get_rope(
            128,
            4096,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            dtype=torch.bfloat16,
        )
    rows["table, vLLM's"] = table_hash(rope.cos_sin_cache)
    return rows


def logprobs() -> dict[str, Any]:
    """Ours alone and in a batch, torch's, vLLM's of the V1 mode and of the V2 runner; the sampler's
    softmax.
    """
    from vllm.model_executor.layers.batch_invariant import log_softmax, softmax_batch_invariant

    from vllm_patching.batch_invariant import ops

    logits = normal(512, 151936, scale=4.0)
    ids = torch.randint(0, 151936, (512, 1), device="cuda")
    ours = ops.log_softmax(logits)
    exact = torch.log_softmax(logits[:64].double(), -1)
    rows = {
        "ours": batch_dependence(lambda s: ops.token_logprobs(logits[s], ids[s]), SIZES[:-1], 512),
        "ours, chosen and all": {
            "rows": 512,
            "differ": int(differing_rows(ours.gather(-1, ids), ops.token_logprobs(logits, ids))),
        },
        "torch": batch_dependence(
            lambda s: torch.log_softmax(logits[s].float(), -1).gather(-1, ids[s]), SIZES[:-1], 512
        ),
        "vLLM's mode": batch_dependence(
            lambda s: log_softmax(logits[s].float()).gather(-1, ids[s]), SIZES[:-1], 512
        ),
        "vLLM's softmax": batch_dependence(
            lambda s: softmax_batch_invariant(logits[s].float(), -1), SIZES[:-1], 512
        ),
        "worst error": {
            "ours": float((ours[:64] - exact).abs().max()),
            "vLLM": float((log_softmax(logits[:64].float()) - exact).abs().max()),
            "torch": float((torch.log_softmax(logits[:64].float(), -1) - exact).abs().max()),
        },
    }
    for n in (1, 256):
        part, some = logits[:n], ids[:n]
        rows[f"us {n} rows"] = {
            "ours, chosen": microseconds([lambda p=part, i=some: ops.token_logprobs(p, i)] * 4),
            "ours, all": microseconds([lambda p=part: ops.log_softmax(p)] * 4),
            "vLLM, all": microseconds([lambda p=part: log_softmax(p.float())] * 4),
            "torch, all": microseconds([lambda p=part: torch.log_softmax(p.float(), -1)] * 4),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "determinism_probe")
    parser.add_argument("--unpinned", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unpinned:
        print(json.dumps(unpinned_speed()))
        return
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    command = [sys.executable, __file__, "--unpinned"]
    other = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    lines = other.stdout.splitlines()
    unpinned = (
        json.loads(lines[-1])
        if other.returncode == 0 and lines
        else {"failed": other.stderr[-500:]}
    )
    from bench.gpu.attention_probe import attention, attention_speed
    from vllm_patching.batch_invariant.settings import enable_settings

    probe = Probe(args.output)
    probe.part("settings", enable_settings)
    probe.part("machine", machine)
    probe.part("attention, heads of 128", lambda: attention(16, 8, 128))
    probe.part("attention, heads of 64", lambda: attention(14, 2, 64))
    probe.part("norms", norms)
    probe.part("elementwise", elementwise)
    probe.part("logprobs", logprobs)
    probe.part("linear, bits", linear_bits)
    probe.part("attention, microseconds", lambda: attention_speed(16, 8, 128))
    probe.part("linear, microseconds", lambda: linear_speed(unpinned))


if __name__ == "__main__":
    main()
