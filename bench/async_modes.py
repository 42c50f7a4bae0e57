"""Generating and training in turns, overlapped, and off-policy by 1, 2 and 4: speed, reward, age,
and who works when.

    python bench/async_modes.py --output DIR --device cpu          the starter model on this machine's processor
    python bench/async_modes.py --output DIR --model FOLDER        two GPUs: vLLM on the first, the trainer on the second; they
                                                                   share one where there is only one

One vLLM server for all. Each regime has a service, an environment and a trainer of its own. The
trainer begins with the checkpoint's weights and takes the same number of steps. The first steps are
left out: they wait for the first answers.

    turns           --max-staleness 0: nothing is sampled while the trainer trains; every token is of the weights that it trains
    overlapped      --max-staleness 1, one batch ahead: the next batch is sampled while one is trained on, and no more than that
    off_policy_N    --max-staleness N, as much ahead as the service lets: the server is never left without work

A trainer takes its batch whole, so that what is overlapped is one step old; only turns are
on-policy. Writes async_modes.json, timeline.svg and a trace, and prints a table. With --into FILE
it puts the figures into a results file under `modes`, or under `modes_gpu` if a GPU was used.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import os
import re
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu.processes import BenchError
from bench.gpu.runs import INTO, Sitting, common_options, run_and_report
from bench.gpu.shapes import STARTER
from bench.gpu.summary import table
from bench.gpu.training_stack import Row, RowsAsTheyCome, TrainingStack, wait_for_end
from bench.gpu.vllm_server import ServerOptions, VllmServer
from bench.measured import Options, command_line
from bench.timeline_spans import Process, read_folder, shares
from bench.timelines import Panel, draw, save, write_trace
from bench.whole_run import summarise
from vllm_patching.protocol.timeline import VARIABLE, unix_ns

PICTURE_STEPS = 4
"""Steps of the slowest regime in the picture."""


@dataclass(frozen=True)
class Regime:
    """The lead that sampling may have over training.

    Attributes:
        title: in the picture.
        staleness: weight versions that data may be old.
        ahead: batches that may be queued or in work; -1: as many as the service wants.
    """

    title: str
    staleness: int
    ahead: int


REGIMES = {
    "turns": Regime("In turns", 0, 0),
    "overlapped": Regime("Overlapped: the next batch is sampled meanwhile", 1, 1),
    **{f"off_policy_{n}": Regime(f"Off-policy by {n} at most", n, -1) for n in (1, 2, 4)},
}


def found_in(rows: list[tuple[float, Row]], leave_out: int) -> dict[str, Any]:
    """Figures of a regime's steps, see whole_run.summarise; also ages, and rewards at the beginning
    and the end.
    """
    found = summarise(rows, leave_out)
    rewards = [row["reward_mean"] for _, row in rows]
    few = max(1, len(rows) // 5)
    ages = [row["age_max"] for _, row in rows[leave_out:] if row.get("age_max") is not None]
    return found | {
        "sampled_tokens_per_second": round(
            sum(row["tokens"] for _, row in rows[leave_out:]) / found["seconds"], 1
        ),
        "seconds_a_step": round(found["seconds"] / found["steps"], 3),
        "age_max": max(ages, default=None),
        "reward_first": round(statistics.fmean(rewards[:few]), 4),
        "reward_last": round(statistics.fmean(rewards[-few:]), 4),
        "rewards": [round(reward, 4) for reward in rewards],
    }


def work_of(processes: list[Process], begin: int, end: int) -> dict[str, dict[str, float]]:
    """Share of the time between two moments that each role was at each kind of work, the mean over
    its processes.
    """
    by_role: dict[str, list[dict[str, float]]] = {}
    for process in processes:
        by_role.setdefault(process.role, []).append(shares(process, begin, end))
    return {
        role: {
            what: round(statistics.fmean(share.get(what, 0.0) for share in each), 4)
            for what in sorted({what for share in each for what in share})
        }
        for role, each in by_role.items()
    }


class Benchmark(Sitting):
    """One regime after the other, on one server."""

    def run(self) -> None:
        """Measure the chosen regimes; then draw the picture."""
        args = self.args
        if self.on_gpu and not torch.cuda.device_count():
            raise BenchError("it needs a GPU, and there is none (--device cpu does without)")
        self.trainer_gpu = str(int(torch.cuda.device_count() > 1))
        self.folder = args.output / "timeline"
        for old in self.folder.glob("timeline-*.jsonl"):
            old.unlink()
        os.environ[VARIABLE] = str(self.folder)  # the children's too
        shown = ("steps", "leave_out", "sequences", "group", "cap", "lr", "device")
        settings = {name: getattr(args, name) for name in shown} | {"model": args.model.name}
        self.describe(settings=settings, load_average_before=os.getloadavg())
        # A cache that no regime fills: what is in flight at most, with room for prompts.
        cache = {"cache_gib": args.cache_gib} if self.on_gpu else {}
        options = ServerOptions(
            "0" if self.on_gpu else "",
            max_model_len=args.seq_len,
            load_format="auto",
            eager=args.eager,
            **cache,
        )
        self.vllm = VllmServer("vllm", args.model, args.output, options, logs=self.work / "vllm")
        self.stack.callback(self.vllm.stop)
        self.ready(self.vllm)
        self.windows: dict[str, tuple[int, int]] = {}
        for name in args.only or REGIMES:
            self.results.measure("regimes", name, run=partial(self._regime, name))
        self._picture()

    def _regime(self, name: str) -> dict[str, Any]:
        args, regime = self.args, REGIMES[name]
        with ExitStack() as stack:
            processes = TrainingStack(name, args.output, self.work, stack, not self.on_gpu)
            processes.start_service()
            micro = min(16, args.sequences)
            trainer = processes.start_trainer(
                args.model,
                self.trainer_gpu,
                "broadcast",
                args.trainer_flags.split(),
                vllm_port=self.vllm.port,
                training_steps=args.steps,
                batch_size=micro,
                gradient_accumulation_steps=args.sequences // micro,
                lr=args.lr,
                seq_len=args.seq_len,
                max_staleness=regime.staleness,
                bridge_timeout=60,
                batch_timeout=200,
            )
            environment = processes.start_environment(
                args.environment,
                f"{self.vllm.url}/v1",
                args.environment_flags.split(),
                group_size=args.group,
                max_token_length=args.cap,
                max_num_workers=args.in_flight // args.group,
                max_batches_offpolicy=regime.ahead,
            )
            rows = RowsAsTheyCome(processes.metrics)
            wait_for_end(trainer, args.seconds, rows.look)
            dropped = processes.dropped_groups()
            environment.stop()
        found = found_in(rows.rows, args.leave_out)
        begin, end = unix_ns(rows.rows[args.leave_out - 1][0]), unix_ns(rows.rows[-1][0])
        self.windows[name] = (begin, end)
        found["share_of_time"] = work_of(read_folder(self.folder)[0], begin, end)
        invalid = sum(row["groups_invalid"] for row in rows)
        return found | {
            "groups_dropped_by_service": dropped,
            "groups_invalid": invalid,
            "max_staleness": regime.staleness,
        }

    def _picture(self) -> None:
        if not self.windows:
            return
        regimes = self.results.data["regimes"]
        length = int(
            PICTURE_STEPS * max(regimes[name]["seconds_a_step"] for name in self.windows) * 1e9
        )
        processes, _ = read_folder(self.folder)
        plain = [Process(re.sub("^generator$", "vLLM", p.role), "", p.spans) for p in processes]
        panels: list[Panel] = [
            (REGIMES[name].title, plain, begin, min(end, begin + length))
            for name, (begin, end) in self.windows.items()
        ]
        save(draw(panels), self.args.output / "timeline.svg")
        write_trace(processes, self.args.output / "trace.json")


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    rows: list[list[object]] = []
    for name, found in data.get("regimes", {}).items():
        if "steps" not in found:
            rows.append([name, next(iter(found.values())), *[""] * 7])
            continue
        work = found["share_of_time"]
        trainer, server = work.get("trainer", {}), work.get("generator", {})
        speed = [found["seconds_a_step"], round(found["sampled_tokens_per_second"])]
        of_time = [
            f"{trainer.get('train', 0):.0%}",
            f"{trainer.get('wait', 0):.0%}",
            f"{server.get('generating', 0):.0%}",
        ]
        rewards = f"{found['reward_first']:.2f} to {found['reward_last']:.2f}"
        rows.append([name, *speed, *of_time, found.get("age_mean"), found["age_max"], rewards])
    head = [
        "",
        "s a step",
        "tokens/s",
        "trainer trains",
        "waits",
        "vLLM generates",
        "age mean",
        "max",
        "reward",
    ]
    return table(head, rows)


OPTIONS: Options = {
    "--only": {"nargs": "+", "choices": REGIMES},
    "--model": {
        "type": Path,
        "default": STARTER,
        "help": "folder of a checkpoint (default: the starter model)",
    },
    "--environment": {
        "default": "environments/arithmetic_server.py",
        "help": "script (default: %(default)s)",
    },
    "--trainer-flags": {"default": "", "help": "more flags for grpo.py"},
    "--steps": {"type": int, "default": 20},
    "--leave-out": {"type": int, "default": 4, "help": "first steps that are not counted"},
    "--sequences": {"type": int, "default": 64, "help": "of an optimizer step"},
    "--group": {"type": int, "default": 8, "help": "answers to a question"},
    "--in-flight": {
        "type": int,
        "default": 128,
        "help": "answers that are sampled at the same time, at most",
    },
    "--cap": {"type": int, "default": 96, "help": "most tokens of an answer"},
    "--seq-len": {"type": int, "default": 512, "help": "most tokens of prompt and answer"},
    "--lr": {"type": float, "default": 3e-4},
    "--cache-gib": {"type": int, "default": 16, "help": "of keys and values, on a GPU"},
    "--eager": {
        "action": "store_true",
        "help": "vLLM without compilation and CUDA graphs (starts faster)",
    },
    "--seconds": {"type": float, "default": 200.0, "help": "for the training of one regime"},
    # Else ever more answers are sampled for a batch, the better they become.
    "--environment-flags": {
        "default": "--env.ensure_scores_are_not_same false",
        "help": "more flags for it (default: %(default)s)",
    },
    **INTO,
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("async_modes") | OPTIONS
    args = command_line(__doc__, options).parse_args(arguments)
    args.model = args.model.resolve()
    section = "modes"
    if args.device == "cuda":
        section = "modes_gpu"
    return run_and_report(args, Benchmark, report, section)


if __name__ == "__main__":
    sys.exit(main())
