"""Does the memory plan say what a training takes? Real steps with random weights of real shapes; no vLLM, no network, no files.

    python bench/memory_plan.py --output DIR                    every configuration that the GPUs at hand suffice for
    python bench/memory_plan.py --output DIR --only lora_8b     some of them
    python bench/memory_plan.py --output DIR --device cpu       tiny models on the CPU, to try the script

Each configuration is a process of its own (under torchrun if it has several ranks). Measured is what torch's allocator has
given out (`torch.cuda.max_memory_allocated`; on a CPU tensors are counted one by one); the plan's workspace, which is
for what the allocator does not count, is left out. Prints
for each part of a step planned and measured GB, and writes memory_plan.json. Ends
with status 1 if the plan of a configuration is more than 10 % off, or one did not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.gpu.machine import describe
from bench.gpu.memory_worker import Configuration
from bench.gpu.processes import BenchError, Task, all_stopped, end_on_sigterm
from bench.gpu.summary import table
from bench.measured import measured

WITHIN = 0.10
SECONDS = 240
CONFIGURATIONS = [
    Configuration("full_1.7b", "qwen3-1.7b"),
    Configuration("checkpointing_1.7b", "qwen3-1.7b", batch=8, checkpointing=True),
    Configuration("reference_1.7b", "qwen3-1.7b", batch=2, reference=True, vllm_ranks=2),
    Configuration("float32_1.7b", "qwen3-1.7b", dtype="float32", batch=2),
    Configuration("full_4b", "qwen3-4b", batch=2),
    Configuration("offload_4b", "qwen3-4b", batch=2, offload=True),
    Configuration("lora_8b", "qwen3-8b", batch=2, lora_rank=16),
    Configuration("fsdp2_8b", "qwen3-8b", batch=2, checkpointing=True, ranks=2, vllm_ranks=2),
    Configuration("fsdp2_1.7b", "qwen3-1.7b", batch=2, ranks=2, vllm_ranks=1),
]


def on_cpu(asked: Configuration) -> Configuration:
    """The same, tiny."""
    return replace(asked, shape="tiny", batch=2, length=128, lora_rank=min(4, asked.lora_rank), device="cpu", offload=False)


def run(asked: Configuration, output: Path) -> dict[str, Any]:
    """Start the configuration's processes and wait for them. Returns the result, or an `error`."""
    task = Task(f"memory_plan-{asked.name}", "bench.gpu.memory_worker", asdict(asked), output, SECONDS, asked.ranks)
    with all_stopped(task):
        try:
            return task.answer() | {"measured": measured()}
        except BenchError as error:
            reason, *log = str(error).splitlines()
            return {"configuration": asdict(asked), "measured": measured(), "error": reason, "log": log}


def ratio(result: dict[str, Any]) -> float:
    """The plan's greatest moment, over what was measured."""
    return float(result["planned"]["greatest"] / result["allocated"]["greatest"])


def report(result: dict[str, Any]) -> str:
    """A table of one configuration."""
    name = result["configuration"]["name"]
    if "error" in result:
        return "\n".join([f"{name}: {result['error']}", *("    " + line for line in result["log"])])
    planned, allocated = result["planned"], result["allocated"]
    rows = [
        [part, *(f"{value / 1e9:.3f}" if value else "-" for value in (planned.get(part), seen)),
         f"{planned[part] / seen:.3f}" if part in planned and seen else "-"]
        for part, seen in allocated.items()
    ]  # fmt: skip
    items = ", ".join(f"{item} {size / 1e9:.2f}" for item, size in result["items"].items())
    head = table([name, "planned GB", "measured GB", "ratio"], rows)
    more = f"allocator held {result['reserved'] / 1e9:.2f} GB"
    if "device_used" in result:
        more += f", the device {result['device_used'] / 1e9:.2f} GB after the step"
    return f"{head}\n  planned: {items}\n  {more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of memory_plan.json and the logs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[one.name for one in CONFIGURATIONS])
    args = parser.parse_args()
    end_on_sigterm()
    args.output.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    results = []
    for asked in CONFIGURATIONS:
        if (args.only and asked.name not in args.only) or asked.ranks > gpus:
            continue
        results.append(run(on_cpu(asked) if args.device == "cpu" else asked, args.output))
        print(report(results[-1]) + "\n", flush=True)
    whole = [
        [r["configuration"]["name"], *(["-", "-", r["error"]] if "error" in r else
         [f"{r['planned']['greatest'] / 1e9:.2f}", f"{r['allocated']['greatest'] / 1e9:.2f}", f"{ratio(r):.3f}"])]
        for r in results
    ]  # fmt: skip
    print(table(["greatest moment", "planned GB", "measured GB", "ratio"], whole))
    answer = {"machine": describe(), "results": results}
    (args.output / "memory_plan.json").write_text(json.dumps(answer, indent=1), encoding="utf-8")
    return 0 if all("error" not in r and abs(ratio(r) - 1) <= WITHIN for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
