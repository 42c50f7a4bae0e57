"""The cost of each optimizer choice: step time and peak memory on one GPU, beside the memory plan.
Random weights, no network.

    python bench/optimizer_choices.py --output DIR                       every choice that fits this GPU and host
    python bench/optimizer_choices.py --output DIR --only "1.7B, adamw"  some of them
    python bench/optimizer_choices.py --output DIR --device cpu          a tiny shape on the CPU, to try the script

A choice is a process of its own. It trains real shapes with the trainer's own step and optimizer:
--optimizer adamw and adamw-8bit, with --optimizer-offload on and off. Measured are the seconds of
the gradient, of the update and of writing the weights (medians), and the peak of torch's allocator.
On a CPU tensors are counted one by one. Prints a table and writes optimizer_choices.json after each
choice. Ends with status 1 if a choice failed, or the plan of one is more than 10 % off on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from dataclasses import asdict, replace
from typing import Any

import torch

from bench.gpu.optimizer_worker import Choice
from bench.gpu.processes import BenchError, Task, all_stopped
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.summary import table
from bench.measured import Options, command_line, measured
from example_trainer.training.memory_plan import Room, free_memory, plan_memory

WITHIN = 0.10
LARGE: dict[str, Any] = {"batch": 1, "warm_up": 1, "steps": 3, "seconds": 300}
CHOICES = [
    Choice("1.7B, adamw", "qwen3-1.7b"),
    Choice("1.7B, adamw, offloaded", "qwen3-1.7b", offload=True),
    Choice("1.7B, adamw-8bit", "qwen3-1.7b", "adamw-8bit"),
    Choice("1.7B, adamw-8bit, offloaded", "qwen3-1.7b", "adamw-8bit", offload=True),
    Choice("1.7B, adamw, layers recomputed", "qwen3-1.7b", checkpointing=True),
    Choice("4B, adamw-8bit", "qwen3-4b", "adamw-8bit", **LARGE),
    Choice("8B, adamw, offloaded", "qwen3-8b", offload=True, **LARGE),
    Choice("8B, adamw-8bit, offloaded", "qwen3-8b", "adamw-8bit", offload=True, **LARGE),
    Choice("14B, adamw, offloaded", "qwen2.5-14b", offload=True, **LARGE),
    Choice("14B, adamw-8bit, offloaded", "qwen2.5-14b", "adamw-8bit", offload=True, **LARGE),
]


def on_cpu(choice: Choice) -> Choice:
    """The same choice, tiny."""
    return replace(choice, shape="tiny", batch=2, length=96, warm_up=1, steps=2, device="cpu")


def refusal(choice: Choice) -> str | None:
    """Why a choice does not fit here; None if it does."""
    device = torch.device(choice.device)
    free, total = free_memory(device)
    request = replace(choice.request(device), workspace=1 << 30)
    room = Room(device, free, total, free_memory(torch.device("cpu"))[0])
    if room.holds(request):
        return None
    needed = plan_memory(request).total, room.host_needed(request)
    on_device, on_host = (f"{size / 2**30:.1f} GiB" for size in needed)
    return (
        f"needs {on_device} on {device} and {on_host} of host memory; "
        f"{free / 2**30:.1f} and {room.host / 2**30:.1f} are free"
    )


def run(choice: Choice, output: Path) -> dict[str, Any]:
    """Start the choice's process and wait for it.

    Returns the result, or an `error`, or why it was `skipped`.
    """
    reason = refusal(choice)
    if reason is not None:
        return {"choice": asdict(choice), "measured": measured(), "skipped": reason}
    name = "optimizer-" + choice.name.replace(", ", "-").replace(" ", "-")
    task = Task(name, "bench.gpu.optimizer_worker", asdict(choice), output, choice.seconds)
    with all_stopped(task):
        try:
            return task.answer() | {"measured": measured()}
        except BenchError as error:
            reason, *log = str(error).splitlines()
            return {"choice": asdict(choice), "measured": measured(), "error": reason, "log": log}


def ratio(result: dict[str, Any]) -> float:
    """The planned peak over the measured one."""
    return float(result["bytes"]["planned"] / result["bytes"]["measured"])


class Benchmark(Sitting):
    """One choice after the other."""

    def run(self) -> None:
        """Measure the chosen ones."""
        self.describe()
        found: list[dict[str, Any]] = []
        for choice in CHOICES:
            if self.args.only and choice.name not in self.args.only:
                continue
            found.append(run(choice if self.on_gpu else on_cpu(choice), self.args.output))
            self.results.put("results", value=found)
            print(report({"results": found[-1:]}) + "\n", flush=True)
            # On a CPU nothing is staged, and a tiny model is small beside the buffers of an update:
            # the plan is of GPUs.
            if self.on_gpu and "bytes" in found[-1] and abs(ratio(found[-1]) - 1) > WITHIN:
                self.results.failures.append(
                    f"{choice.name}: the plan is {ratio(found[-1]):.3f} of what was measured"
                )
            if "error" in found[-1]:
                self.results.failures.append(f"{choice.name}: {found[-1]['error']}")


def report(data: dict[str, Any]) -> str:
    """The table of a results file, and what did not run."""
    rows, notes = [], []
    for result in data.get("results", []):
        name = result["choice"]["name"]
        if "bytes" not in result:
            notes.append(f"{name}: {result.get('skipped') or result['error']}")
            notes += [f"    {line}" for line in result.get("log", [])]
            continue
        device, host = (
            [f"{result[where][what] / 1e9:.2f}" for what in ("planned", "measured")]
            for where in ("bytes", "host_bytes")
        )
        seconds = [
            result["seconds"][part]["median"] for part in ("gradient", "update", "write_weights")
        ]
        rows.append(
            [name, *device, f"{ratio(result):.3f}", *host, *(f"{value:.3f}" for value in seconds),
             f"{result['first_update_seconds']:.2f}"]
        )  # fmt: skip
    heads = [
        "choice",
        "planned GB",
        "measured",
        "ratio",
        "host planned",
        "measured",
        "gradient s",
        "update",
        "write",
        "first update",
    ]
    return "\n".join([*([table(heads, rows)] if rows else []), *notes])


def main(arguments: list[str] | None = None) -> int:
    names = [one.name for one in CHOICES]
    only: Options = {"--only": {"nargs": "+", "metavar": "CHOICE", "choices": names}}
    options = common_options("optimizer_choices") | only
    args = command_line(__doc__, options).parse_args(arguments)
    return run_and_report(args, Benchmark, report)


if __name__ == "__main__":
    raise SystemExit(main())
