r"""Measure the cost of deterministic mode: vLLM without it, in its own batch-invariant mode and in
ours; and the trainer's step.

    python bench/deterministic_cost.py --output DIR                           1 GPU, Qwen3-1.7B
    python bench/deterministic_cost.py --output DIR --shape qwen3-0.6b
    python bench/deterministic_cost.py --output DIR --parts rollout --tp 2    2 GPUs, each engine over both of them
    python bench/deterministic_cost.py --output DIR --parts rollout --shape qwen3-30b-a3b --one-at-a-time \
        --loads "32 sequences" "256 sequences" --new-tokens 256               1 GPU of 80 GB, a mixture of experts
    python bench/deterministic_cost.py --output DIR --parts rollout --modes off --tiny --device cpu   vLLM as it comes, on a CPU
    python bench/deterministic_cost.py --output DIR --parts step --tiny --device cpu   that the script runs, without a GPU

All engines are started together and measured one after the other, in rounds (--rounds), on the same
GPU; then the GPU's kernels are timed. With --one-at-a-time the rounds of an engine follow each other.
With --tp each engine splits its weights over several GPUs. Prints tables and writes
deterministic_cost_SHAPE.json. Ratios are mode on ÷ off: 1 costs nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from bench.gpu.processes import Worker
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import (
    SHAPES,
    active_parameters,
    cache_gib,
    model_bytes,
    write_model_folder,
)
from bench.gpu.summary import table
from bench.measured import Options, command_line

PARTS = ("rollout", "step")
MODES = ("off", "vllm", "ours")
LOAD_SECONDS, ASK_SECONDS = 300.0, 180.0
LOADS: dict[str, dict[str, Any]] = {
    "1 sequence": {"count": 1, "new_tokens": 512, "prompt_tokens": 32, "seeded": False},
    "1 sequence, seeded": {"count": 1, "new_tokens": 512, "prompt_tokens": 32, "seeded": True},
    "32 sequences": {"count": 32, "new_tokens": 512, "prompt_tokens": 32, "seeded": False},
    "256 sequences": {"count": 256, "new_tokens": 512, "prompt_tokens": 32, "seeded": False},
    "256 sequences, seeded": {"count": 256, "new_tokens": 512, "prompt_tokens": 32, "seeded": True},
    "256 sequences, long prompts": {
        "count": 256,
        "new_tokens": 128,
        "prompt_tokens": 800,
        "seeded": False,
    },
}
SHARED_CACHE_GIB = 20
SEATS = 256
PAGES_ROOM = 64
"""Tokens of the cache beside a sequence's own: its last page, and one for what is in flight."""
PROFILED = {"1 sequence": 64, "32 sequences": 48, "256 sequences": 32}
"""Load -> tokens of each sequence while the GPU's kernels are timed; after the measurements, which
this would slow down."""
STEPS: dict[str, dict[str, Any]] = {
    "16 x 512 to 1024": {"sequences": 16, "lengths": [512, 1024], "tokens": 8192, "count": 8},
    "4 x 3000 to 4000": {"sequences": 4, "lengths": [3000, 4000], "tokens": 4096, "count": 6},
}
TINY_STEPS: dict[str, dict[str, Any]] = {
    "4 x 8 to 16": {"sequences": 4, "lengths": [8, 16], "tokens": 32, "count": 4}
}


class Cost(Sitting):
    """The processes and the figures of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, shape=args.shape)
        self.model = write_model_folder(work / "model", args.shape)
        self.vocab: int = SHAPES[args.shape]["vocab_size"]
        self.loads = {name: dict(LOADS[name]) for name in args.loads}
        for load in self.loads.values() if args.new_tokens else ():
            load["new_tokens"] = args.new_tokens

    def run(self) -> None:
        """The parts that were asked for."""
        self.describe(
            tp=self.args.tp,
            loads=self.loads,
            model_bytes=model_bytes(self.args.shape),
            active_parameters=active_parameters(self.args.shape),
        )
        try:
            if "rollout" in self.args.parts:
                self._rollout()
            if "step" in self.args.parts:
                self._step()
        finally:
            self.results.put("ratios", value=ratios(self.results.data))

    def _rollout(self) -> None:
        modes = [mode for mode in MODES if mode in self.args.modes]
        if not self.args.one_at_a_time:
            self._together(modes)
            return
        for mode in modes:
            self._together([mode])

    def _together(self, modes: list[str]) -> None:
        """Measure these engines, all started at the same time."""
        engines = {
            mode: self.worker(
                f"rollout {mode}",
                "bench.gpu.rollout_worker",
                ["--mode", mode, "--model", str(self.model), "--tp", str(self.args.tp)],
                gpus=",".join(map(str, range(self.args.tp))),
            )
            for mode in modes
        }
        cache = self._cache_gib(len(modes)) << 30
        for engine in engines.values():
            engine.send("load", max_model_len=2048, max_num_seqs=SEATS, cache_bytes=cache)
        ready = {
            mode: engine
            for mode, engine in engines.items()
            if self.results.measure(
                "rollout", mode, "load", run=partial(engine.answer, LOAD_SECONDS, "load")
            )
            is not None
        }
        self._sample(ready)
        if self.on_gpu:
            self._time_kernels(ready)
        for engine in engines.values():
            engine.stop()

    def _sample(self, ready: dict[str, Worker]) -> None:
        # Round 0 compiles what the engines have left until now.
        for attempt in range(self.args.rounds + 1):
            for name, load in self.loads.items():
                for mode, engine in ready.items():
                    options = {**load, "vocab": self.vocab, "seed": 1000 * attempt}
                    if self.args.tiny:
                        options |= {"count": min(2, load["count"]), "new_tokens": 8}
                    if attempt == 0:
                        options["new_tokens"] = 4
                    ask = partial(engine.ask, "generate", timeout=ASK_SECONDS, **options)
                    self.results.measure("rollout", mode, name, f"round {attempt}", run=ask)

    def _time_kernels(self, ready: dict[str, Worker]) -> None:
        for name, tokens in PROFILED.items():
            if name not in self.loads:
                continue
            load = {key: self.loads[name][key] for key in ("count", "prompt_tokens")}
            for mode, engine in ready.items():
                ask = partial(
                    engine.ask,
                    "kernels",
                    timeout=ASK_SECONDS,
                    vocab=self.vocab,
                    new_tokens=tokens,
                    **load,
                )
                self.results.measure("kernels", name, mode, run=ask)

    def _cache_gib(self, engines: int) -> int:
        """Return what an engine keeps for keys and values, in GiB: room for the longest load, but
        three engines share a GPU of 80 GB.
        """
        if not self.on_gpu:
            return 1
        needed = cache_gib(self.args.shape, most_tokens(self.loads), self.args.tp)
        total = torch.cuda.get_device_properties(0).total_memory >> 30
        if engines == 1 or total > 120:
            return needed
        return min(needed, SHARED_CACHE_GIB)

    def _step(self) -> None:
        steps = TINY_STEPS if self.args.tiny else STEPS
        for mode in ("off", "ours"):
            arguments = ["--mode", mode, "--shape", self.args.shape, "--device", self.args.device]
            worker = self.worker(f"step {mode}", "bench.gpu.step_worker", arguments)
            self.results.measure(
                "step", mode, "load", run=partial(worker.ask, "load", timeout=LOAD_SECONDS)
            )
            for name, batch in steps.items():
                ask = partial(worker.ask, "steps", timeout=ASK_SECONDS, **batch)
                self.results.measure("step", mode, name, run=ask)
            worker.stop()


def most_tokens(loads: dict[str, dict[str, Any]]) -> int:
    """Return the tokens that are in the cache at once at most, so that no sequence is preempted."""
    return max(
        load["count"] * (load["prompt_tokens"] + load["new_tokens"] + PAGES_ROOM)
        for load in loads.values()
    )


def speed(data: dict[str, Any], part: str, mode: str, name: str) -> float | None:
    """Median tokens per second of the rounds that count; None if there is none. The first round can
    be slow.
    """
    found = data.get(part, {}).get(mode, {}).get(name)
    if found is None:
        return None
    counted = [found[name] for name in found if name.startswith("round ") and name != "round 0"]
    rounds = [found] if part == "step" else counted
    speeds = [row["tokens_per_second"] for row in rounds if "tokens_per_second" in row]
    return round(statistics.median(speeds), 1) if speeds else None


def measured_names(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Part and name of everything that any mode was measured at."""
    names = [*LOADS, *STEPS, *TINY_STEPS]
    return [
        (part, name)
        for part in PARTS
        for name in names
        if any(name in mode for mode in data.get(part, {}).values())
    ]


def ratios(data: dict[str, Any]) -> dict[str, Any]:
    """Speed of each mode over that of `off`, by part and name."""
    found: dict[str, Any] = {}
    for part, name in measured_names(data):
        off, others = (
            speed(data, part, "off", name),
            {mode: speed(data, part, mode, name) for mode in MODES[1:]},
        )
        found.setdefault(part, {})[name] = {
            mode: round(s / off, 3) if s and off else None for mode, s in others.items()
        }
    return found


def report(data: dict[str, Any]) -> str:
    """The tables of a results file."""
    kernels = [
        f"{name}, {mode}: {kernels_text(found)}"
        for name, modes in data.get("kernels", {}).items()
        for mode, found in modes.items()
        if "kernels" in found
    ]
    rows, relative = [], ratios(data)
    for part, name in measured_names(data):
        found = relative[part][name]
        rows.append(
            [
                f"{part}: {name}",
                *(speed(data, part, mode, name) for mode in MODES),
                *(str(ratio or "-") for ratio in found.values()),
            ]
        )
    return "\n".join(
        [
            *kernels,
            table(
                ["tokens per second", "off", "vLLM's own", "ours", "vLLM's ÷ off", "ours ÷ off"],
                rows,
            ),
        ]
    )


def kernels_text(found: dict[str, Any]) -> str:
    """One line on where a step's time goes: microseconds and launches of the longest kernels."""
    steps = found["steps"]
    longest = [
        f"{name[:40]} {1e6 * seconds / steps:.0f} x{count / steps:.0f}"
        for name, count, seconds in found["kernels"][:12]
    ]
    whole, busy = (1e6 * found[key] / steps for key in ("seconds", "busy_seconds"))
    return f"a step takes {whole:.0f} us, its kernels {busy:.0f}: {', '.join(longest)}"


OPTIONS: Options = {
    "--name": {"help": "of the results file, without .json"},
    "--parts": {"nargs": "+", "choices": PARTS, "default": list(PARTS)},
    "--tp": {"type": int, "default": 1, "help": "GPUs that each vLLM engine is split over"},
    "--modes": {"nargs": "+", "choices": MODES, "default": list(MODES), "help": "of vLLM"},
    "--loads": {"nargs": "+", "choices": LOADS, "default": list(LOADS), "metavar": "LOAD"},
    "--rounds": {"type": int, "default": 3, "help": "that count; their median is taken"},
    "--new-tokens": {
        "type": int,
        "default": 0,
        "help": "of each sequence, instead of a load's own",
    },
    "--one-at-a-time": {
        "action": "store_true",
        "help": "start an engine when the one before has ended: for models that do not fit several times",
    },
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("", "qwen3-1.7b") | OPTIONS
    args = shrink_if_tiny(command_line(__doc__, options).parse_args(arguments))
    layout = f"_tp{args.tp}" * (args.tp > 1)
    args.name = args.name or f"deterministic_cost_{args.shape}{layout}"
    return run_and_report(args, Cost, report)


if __name__ == "__main__":
    raise SystemExit(main())
