"""Compare the memory plan with the memory of real steps. Real steps with random weights of real
shapes; no vLLM, no network, no files.

    python tests/gpu/check_memory_plan.py --output DIR                    every configuration that the GPUs at hand suffice for
    python tests/gpu/check_memory_plan.py --output DIR --only lora_8b     some of them
    python tests/gpu/check_memory_plan.py --output DIR --device cpu       tiny models on the CPU, to try the script

Each configuration is a process of its own (under torchrun if it has several ranks). Measured is
what torch's allocator has given out (`torch.cuda.max_memory_allocated`; on a CPU tensors are
counted one by one). The plan's workspace, which is for what the allocator does not count, is left
out. Prints for each part of a step planned and measured GB, and writes memory_plan.json. Ends with
status 1 if the plan of a configuration is more than 10 % off, or one did not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from dataclasses import asdict, replace
from typing import Any

import torch

from bench.gpu.processes import BenchError, Task, all_stopped
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.summary import table
from bench.measured import Options, command_line, measured
from tests.gpu.memory_worker import Configuration

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
    return replace(
        asked,
        shape="tiny",
        batch=2,
        length=128,
        lora_rank=min(4, asked.lora_rank),
        device="cpu",
        offload=False,
    )


def run(asked: Configuration, output: Path) -> dict[str, Any]:
    """Start the configuration's processes and wait for them. Returns the result, or an `error`."""
    task = Task(
        f"memory_plan-{asked.name}",
        "tests.gpu.memory_worker",
        asdict(asked),
        output,
        SECONDS,
        asked.ranks,
    )
    with all_stopped(task):
        try:
            return task.answer() | {"measured": measured()}
        except BenchError as error:
            reason, *log = str(error).splitlines()
            return {
                "configuration": asdict(asked),
                "measured": measured(),
                "error": reason,
                "log": log,
            }


def ratio(result: dict[str, Any]) -> float:
    """The plan's greatest moment, over what was measured."""
    return float(result["planned"]["greatest"] / result["allocated"]["greatest"])


def report_of_one(result: dict[str, Any]) -> str:
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


class Benchmark(Sitting):
    """One configuration after the other."""

    def run(self) -> None:
        """Measure the chosen ones that the GPUs suffice for."""
        self.describe()
        gpus = torch.cuda.device_count() if self.on_gpu else 2
        found: list[dict[str, Any]] = []
        for asked in CONFIGURATIONS:
            if (self.args.only and asked.name not in self.args.only) or asked.ranks > gpus:
                continue
            found.append(run(asked if self.on_gpu else on_cpu(asked), self.args.output))
            self.results.put("results", value=found)
            print(report_of_one(found[-1]) + "\n", flush=True)
            if "error" in found[-1] or abs(ratio(found[-1]) - 1) > WITHIN:
                self.results.failures.append(
                    f"{asked.name}: {found[-1].get('error', 'the plan is too far off')}"
                )


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    whole = [
        [r["configuration"]["name"], *(["-", "-", r["error"]] if "error" in r else
         [f"{r['planned']['greatest'] / 1e9:.2f}", f"{r['allocated']['greatest'] / 1e9:.2f}", f"{ratio(r):.3f}"])]
        for r in data.get("results", [])
    ]  # fmt: skip
    return table(["greatest moment", "planned GB", "measured GB", "ratio"], whole)


def main(arguments: list[str] | None = None) -> int:
    names = [one.name for one in CONFIGURATIONS]
    only: Options = {"--only": {"nargs": "+", "metavar": "NAME", "choices": names}}
    options = common_options("memory_plan") | only
    return run_and_report(command_line(__doc__, options).parse_args(arguments), Benchmark, report)


if __name__ == "__main__":
    raise SystemExit(main())
