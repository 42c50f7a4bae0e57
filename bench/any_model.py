"""Measure the second tier of models against the first one: the same model through transformers'
class and through the decoder of ours.

    python bench/any_model.py --output DIR                       1 GPU, Qwen3-1.7B
    python bench/any_model.py --output DIR --parts training      without vLLM
    python bench/any_model.py --output DIR --tiny --device cpu   that the script runs, without a GPU

Training: passes and whole steps of packed random tokens, tokens a second and the most memory, each
case in a process of its own. Serving: vLLM and the trainer on one GPU. The trainer takes optimizer
steps and broadcasts each one's weights. It then recomputes the logprobs of what vLLM samples. The
server of the second tier does not find the model in the table of families, and learns its layout.
KL is from vLLM's distribution to the trainer's, in nats per token. Both tiers have the same random
weights. Prints tables and writes any_model.json after each measurement.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import inf
from typing import Any

from bench.gpu.processes import BenchError, Task, device_variables
from bench.gpu.runs import ASK_SECONDS, Sitting, common_options, figures, run_and_report
from bench.gpu.shapes import SHAPES
from bench.gpu.speed_worker import TRANSFORMERS, Case
from bench.gpu.summary import result_table, value_at
from bench.gpu.unlisted import server_variables
from bench.gpu.vllm_server import VllmServer
from bench.measured import Options, command_line
from bench.trainer_speed import GROUPS, tiny

PARTS = ("training", "serving")
TIERS = {1: "decoder of ours", 2: "transformers"}
ARITHMETIC: dict[int, Any] = {1: "ours", 2: TRANSFORMERS}
WORK: dict[str, dict[str, Any]] = {
    "512": {},
    "4k": {"length": 4096},
    "groups of 8": GROUPS,
}
"""Work of the cases. Tier 1 alone shares a group's prompt, as in a training run."""
CELL = {"concurrency": 64, "requests": 64, "prompts": (1, 17, 127, 300), "new": (128, 256)}
TINY_CELL = {"concurrency": 4, "requests": 6, "prompts": (1, 17, 40), "new": (4, 12)}
LOAD_SECONDS, START_SECONDS = 200.0, 60.0
"""The last: what is left if a part is to begin."""


def cases(shape: str) -> dict[str, dict[int, Case]]:
    """The training cases of each tier, by the name of their work."""
    return {
        name: {
            tier: Case(
                ARITHMETIC[tier],
                shape,
                **work | {"share": tier == 1 and work is GROUPS, "bins": 4, "repeats": 4},
            )
            for tier in TIERS
        }
        for name, work in WORK.items()
    }


class AnyModel(Sitting):
    """The cases, the server and the trainers of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, shape=args.shape)
        self.model, self.began = work / "model", time.monotonic()

    def run(self) -> None:
        """Measure the chosen parts, one tier after the other."""
        self.describe()
        if "training" in self.args.parts:
            self._training()
        if "serving" in self.args.parts:
            self._serving()
        self.results.put("ratios", value=ratios(self.results.data))

    def _training(self) -> None:
        for name, tiers in cases(self.args.shape).items():
            for tier in self.args.tiers:
                case = tiers[tier]
                if self._left < START_SECONDS:
                    self._leave_out("training", name, str(tier))
                    continue
                if self.args.tiny:
                    case = tiny(case, self.args.device)
                measured = partial(self._once, f"{name}, tier {tier}", asdict(case), case.seconds)
                self.results.measure("training", name, str(tier), run=measured)

    def _serving(self) -> None:
        if self._left < START_SECONDS:
            self._leave_out("serving")
            return
        if self.results.measure("checkpoint", run=self._write_checkpoint) is None:
            return
        unlisted = server_variables(SHAPES[self.args.shape]["architectures"][0])
        servers = {
            tier: self.server(
                f"vllm {tier}",
                self.model,
                load_format="auto",
                cache_gib=4,
                max_model_len=1024,
                environment=tuple(unlisted.items()) * (tier == 2),
            )
            for tier in self.args.tiers
        }
        self.results.put("ready_seconds", value=self.ready(*servers.values()))
        for tier, server in servers.items():
            measured = partial(self._served, tier, server)
            self.results.measure("serving", str(tier), run=measured)
        for server in servers.values():
            server.stop()

    def _served(self, tier: int, server: VllmServer) -> dict[str, Any]:
        """Return the figures of a tier's updates and its KL."""
        trainer = self.trainer(f"tier {tier}", "bench.gpu.tier_trainer", server.port)
        ask = partial(trainer.ask, timeout=LOAD_SECONDS)
        served = dict[str, Any](ask("load_tier", tier=tier, folder=str(self.model)))
        joined = ask("connect", kind="broadcast")
        if joined["params_mapped"] != joined["params_total"]:
            raise BenchError(f"tier {tier}: not every parameter was mapped: {joined}")
        served["connect_seconds"] = round(joined["seconds"], 3)
        rows = ask("sync_with_optimizer", count=self.args.updates)
        cell = CELL
        if self.args.tiny:
            cell = TINY_CELL
        compared = trainer.ask("cell", timeout=ASK_SECONDS, **cell)
        served |= {"update": figures(rows), "compared": compared, "memory": ask("memory")}
        ask("close")
        trainer.stop()
        return served

    def _write_checkpoint(self) -> dict[str, Any]:
        asked = {"shape": self.args.shape, "folder": str(self.model), "cap": 1024}
        return self._once("random checkpoint", asked, 180, "bench.gpu.random_checkpoint")

    def _once(
        self, name: str, asked: Mapping[str, Any], seconds: float, module: str = ""
    ) -> dict[str, Any]:
        """Return the answer of a task that has no GPU but the first one."""
        limit, environment = min(self._left, seconds), device_variables(not self.on_gpu, "0")
        module = module or "bench.gpu.speed_worker"
        task = Task(name, module, asked, self.args.output, limit, environment=environment)
        self.stack.callback(task.stop)
        try:
            return task.answer()
        finally:
            task.stop()

    def _leave_out(self, *keys: str) -> None:
        reason = f"--seconds {self.args.seconds:g} leave no time for it"
        self.results.put(*keys, value={"skipped": reason})

    @property
    def _left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.began)


COMPARED = {
    "tokens_per_second": "pass/sequence_tokens_per_second",
    "step_tokens_per_second": "step/sequence_tokens_per_second",
    "peak_bytes": "pass/peak_bytes",
}


def ratios(data: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures of the second tier over the same figures of the first one, by work."""
    relative: dict[str, dict[str, float]] = {}
    for name, tiers in data.get("training", {}).items():
        for figure, path in COMPARED.items():
            one, other = (value_at(tiers.get(str(tier), {}), path) for tier in TIERS)
            if one and other:
                relative.setdefault(name, {})[figure] = round(other / one, 3)
    return relative


TRAINING_COLUMNS = {
    "tokens/s": "pass/sequence_tokens_per_second",
    "whole steps": "step/sequence_tokens_per_second",
    "peak GB": "peak_gb",
    "attention": "attention",
    "way": "way",
}
SERVING_COLUMNS = {
    "update ms": "update/whole_update_ms/median",
    "GB/s": "update/gb_per_s",
    "KL": "kl",
    "largest difference": "difference",
    "tokens": "compared/tokens",
}


def report(data: dict[str, Any]) -> str:
    """The tables of a results file, and what is missing from them."""
    training, serving, notes = dict[str, Any](), dict[str, Any](), list[str]()
    rows = {f"{name}, {TIERS[int(tier)]}": row for name, tiers in data.get("training", {}).items()
            for tier, row in tiers.items() if tier.isdigit()}  # fmt: skip
    for name, row in rows.items():
        if "pass" in row:
            training[name] = row | {"peak_gb": row["pass"]["peak_bytes"] / 1e9}
        else:
            notes += [f"{name}: {row}"]
    for tier, row in data.get("serving", {}).items():
        if isinstance(row, dict) and "compared" in row:
            compared = row["compared"]
            shown = {"kl": f"{compared['kl']:.2e}", "difference": compared["max_difference"]}
            serving[TIERS[int(tier)]] = row | shown
        else:
            notes += [f"serving, {tier}: {row}"]
    tables = [
        *result_table(training, TRAINING_COLUMNS, "training"),
        *result_table(serving, SERVING_COLUMNS, "serving"),
    ]
    kept = [f"{name}, transformers over ours: {row}" for name, row in ratios(data).items()]
    return "\n".join([*tables, *kept, *notes])


OPTIONS: Options = {
    "--parts": {"nargs": "+", "choices": PARTS, "default": list(PARTS)},
    "--tiers": {"nargs": "+", "type": int, "choices": TIERS, "default": list(TIERS)},
    "--updates": {"type": int, "default": 10, "help": "of each tier"},
    "--seconds": {"type": float, "default": inf, "help": "time limit of all cases together"},
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("any_model", "qwen3-1.7b") | OPTIONS
    args = command_line(__doc__, options).parse_args(arguments)
    if args.tiny:
        args.shape, args.updates = "tiny", min(args.updates, 2)
    return run_and_report(args, AnyModel, report)


if __name__ == "__main__":
    raise SystemExit(main())
