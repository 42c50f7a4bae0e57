"""A whole training run on two GPUs, vLLM on one and the trainer on the other, or on more. It is run
by ours, and by TRL's asynchronous GRPO beside it.

    python bench/whole_run.py --output DIR --questions train.jsonl              ours, then TRL, in the same sitting
    python bench/whole_run.py --output DIR --questions train.jsonl --parts ours deterministic
    python bench/whole_run.py --output DIR --questions train.jsonl --parts ours deterministic --shape qwen3-8b \
        --tensor-parallel 2 --trainer-ranks 2 --cache-gib 20 --sequences 128    four GPUs of 80 GB
    python bench/whole_run.py --output DIR --dry-run                            the starter model on the CPU: that it runs

Questions of GSM8K, groups of 8. TRL has 512 answers in flight; ours has as many groups as may still
be trained on. About a half of their answers has ended while the longest goes on, and at most 512
are sampled at the same time. Random weights of the shape of Qwen3-1.7B, several hundred of whose
tokens end an answer, so that lengths are geometric under a cap. An optimizer step has 256
sequences; staleness is at most 2. The first steps are left out, which wait for the first answers
and compile. Figures are over the wall clock between the rows of the steps that are counted. A
client that streams one answer at a time beside the load sees the longest gap between two tokens.
Samples thrown away were sampled and not trained on. Prints a table and writes whole_run.json after
each part.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import importlib.metadata
import json
import os
import time
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from typing import Any

import torch

from bench.gpu.machine import describe
from bench.gpu.processes import (
    BenchError,
    Child,
    Task,
    Worker,
    device_variables,
    free_port,
    wait_all,
)
from bench.gpu.random_checkpoint import end_tokens
from bench.gpu.runs import Results, run_and_report
from bench.gpu.shapes import PEAK_FLOPS, SHAPES, active_parameters, model_bytes, tiny_of
from bench.gpu.summary import gaps_of, table
from bench.gpu.training_stack import Row, RowsAsTheyCome, TrainingStack, answers, wait_for_end
from bench.gpu.vllm_server import ServerOptions, VllmServer
from bench.measured import Options, command_line
from example_trainer.launcher import roles
from studies.starter_model import mixture

PARTS = ("ours", "trl", "deterministic")
STARTER = ROOT / "assets" / "starter_model"
SHIM = ROOT / "bench" / "gpu" / "trl_shim"
TRL_TOKENS = 131072
"""Tokens of a step of TRL's, which counts no sequences, in passes of its token budget: about as
many as ours has in one.
"""
PROMPT_ROOM = 1024


def summarise(rows: list[tuple[float, Row]], leave_out: int) -> dict[str, Any]:
    """Figures of the steps after the first `leave_out`.

    Args:
        rows: of each step, with the time when it was over; seconds_* are its phases.

    Raises:
        BenchError: no step is left to count.
    """
    if len(rows) <= leave_out or leave_out < 1:
        raise BenchError(
            f"{len(rows)} steps are too few, with {leave_out} left out; at least one must be"
        )
    seconds = rows[-1][0] - rows[leave_out - 1][0]
    counted = [row for _, row in rows[leave_out:]]
    names = list(
        dict.fromkeys(name for row in counted for name in row if name.startswith("seconds_"))
    )
    phases = {
        name.removeprefix("seconds_"): sum(row[name] or 0.0 for row in counted) for name in names
    }
    sums = {name: sum(row[name] for row in counted) for name in ("tokens", "sequences")}
    # Others than ours forward all.
    forwarded: list[Any] = [row.get("forwarded_targets", row["tokens"]) for row in counted]
    trained = sum(forwarded)
    found = {
        "steps": len(counted),
        "seconds": round(seconds, 2),
        "trained_tokens": trained,
        "sequences": sums["sequences"],
        "mean_length": round(sums["tokens"] / max(1, sums["sequences"]), 1),
        "trained_tokens_per_second": round(trained / seconds, 1),
        "waiting_share": round(phases["wait"] / seconds, 4),
        "seconds_by_phase": {name: round(value, 2) for name, value in phases.items()},
    }
    for name in ("forwarded_tokens", "flops"):
        if all(row.get(name) for row in counted):
            found[f"{name}_per_second_of_training"] = round(
                sum(row[name] for row in counted) / phases["train"], 1
            )
    ages = [row["age_mean"] for row in counted if row.get("age_mean") is not None]
    if ages:
        found["age_mean"] = round(sum(ages) / len(ages), 3)
    return found


def per_gpu(figures: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Return the figures of `summarise` for each of the trainer's GPUs.

    mfu is the share of PEAK_FLOPS in the time of forward, backward and optimizer. The arithmetic of
    a mixture counts the experts that a token goes to.
    """
    found = {
        "trainer_gpus": gpus,
        "trained_tokens_per_second_and_gpu": round(figures["trained_tokens_per_second"] / gpus, 1),
        "update_seconds": round(figures["seconds_by_phase"]["sync"] / figures["steps"], 4),
    }
    if "flops_per_second_of_training" in figures:
        rate = figures["flops_per_second_of_training"] / gpus
        found["mfu"] = round(rate / PEAK_FLOPS, 4)
    return found


def longest_gap(streams: list[list[float]], since: float) -> float | None:
    """Return the most seconds between two tokens of a stream that came after a moment; None if none
    did.
    """
    gaps = [after - before for before, after in gaps_of(streams) if before >= since]
    if not gaps:
        return None
    return round(max(gaps), 4)


class WholeRun:
    """The parts of one sitting."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.work, self.stack, self.began = args, work, stack, time.monotonic()
        self.model = (args.checkpoint or work / "model").resolve()
        if args.dry_run:
            self.model = STARTER
        if args.dry_run and args.shape == "tiny-mixture":
            self.model = work / "mixture"
            mixture.main(["--output", str(self.model)])
        self.results = Results(args.output / f"{args.name}.json", settings=self._settings())
        self.servers: dict[str, VllmServer | TrlServer] = {}

    def _settings(self) -> dict[str, Any]:
        shown = [
            "shape",
            "steps",
            "leave_out",
            "sequences",
            "group",
            "in_flight",
            "cap",
            "staleness",
            "ahead",
        ]
        shown += ["cache_gib", "dry_run", "tensor_parallel", "trainer_ranks", "trainer_flags"]
        settings = {name: getattr(self.args, name) for name in shown}
        return settings | {
            "model_bytes": model_bytes(self.args.shape),
            "active_parameters": active_parameters(self.args.shape),
            "end_tokens": len(end_tokens(SHAPES[self.args.shape]["vocab_size"], self.args.cap)),
        }

    def run(self) -> None:
        """One part after the other.

        Their servers start at the same time, which is most of the waiting.
        """
        self.results.put("machine", value=describe())
        todo = []
        for part in self.args.parts:
            reason = self._refusal(part)
            if reason:
                self.results.put("parts", part, value={"skipped": reason})
            else:
                todo.append(part)
        if todo and not self.args.dry_run and not (self.model / "generation_config.json").exists():
            asked = {"shape": self.args.shape, "folder": str(self.model), "cap": self.args.cap}
            task = Task(
                "random checkpoint",
                "bench.gpu.random_checkpoint",
                asked,
                self.args.output,
                240,
                environment=self._gpus(self.args.tensor_parallel),
            )
            self.stack.callback(task.stop)
            self.results.put("checkpoint", value=task.answer())
        for part in todo[: 1 if self.args.dry_run else None]:
            self._start_server(part)
        self._wait_for_servers()
        for part in todo:
            if (
                self.results.measure("parts", part, run=partial(self._measure, part)) is None
                and part in self.servers
            ):
                self.servers[part].stop()

    def _wait_for_servers(self) -> None:
        """Until none is starting any more and takes time from another's training.

        The part of a failed server reports the failure.
        """
        deadline, starting = time.monotonic() + self.args.ready_seconds, list(self.servers.values())
        while starting and time.monotonic() < deadline:
            for server in list(starting):
                with suppress(BenchError):
                    if not server.ready():
                        continue
                starting.remove(server)
            time.sleep(0.5)

    def _refusal(self, part: str) -> str | None:
        if not self.args.questions.exists():
            return f"there is no {self.args.questions}; give GSM8K's train.jsonl with --questions"
        needed, here = (
            self.args.tensor_parallel + self.args.trainer_ranks,
            torch.cuda.device_count(),
        )
        if not self.args.dry_run and here < needed:
            return f"it needs {needed} GPUs, and {here} are here"
        if part == "trl":
            if needed > 2:
                return "it has one GPU for vLLM and one for the trainer"
            missing = [name for name in ("trl", "accelerate", "datasets") if not _version(name)]
            if missing:
                return f"not installed: {', '.join(missing)}"
        if self.args.dry_run and part != "ours":
            return "it needs a GPU"
        return None

    def _gpus(self, *numbers: int) -> dict[str, str]:
        return device_variables(self.args.dry_run, ",".join(map(str, numbers)))

    def _start_server(self, part: str) -> None:
        most = self.args.cap + PROMPT_ROOM
        if part == "trl":
            self.servers[part] = TrlServer(
                self.model, self.args.output, most, self.args.in_flight, self.args.cache_gib
            )
        else:
            ranks = self.args.tensor_parallel
            options = ServerOptions(
                "" if self.args.dry_run else ",".join(map(str, range(ranks))), tp=ranks,
                cache_gib=self.args.cache_gib, max_model_len=most, max_num_seqs=self.args.in_flight, load_format="auto",
                flags=("--deterministic",) if part == "deterministic" else (),
            )  # fmt: skip
            self.servers[part] = VllmServer(
                f"vllm {part}",
                self.model,
                self.args.output,
                options,
                logs=self.work / f"vllm-{part}",
            )
        self.stack.callback(self.servers[part].stop)

    def _measure(self, part: str) -> dict[str, Any]:
        if part not in self.servers:
            self._start_server(part)
        server = self.servers[part]
        wait_all({server.name: server.ready}, self.args.ready_seconds)
        seconds = min(
            self.args.training_seconds, self.args.seconds - (time.monotonic() - self.began) - 10
        )
        if seconds < 30:
            raise BenchError(f"--seconds {self.args.seconds:g} leave no time for it")
        client = Worker("client", "bench.gpu.load", [], self.args.output / f"client-{part}.log", {})
        self.stack.callback(client.stop)
        client.ask(
            "start", timeout=60, port=server.port, model=str(self.model), concurrency=1, observers=1,
            vocab=SHAPES[self.args.shape]["vocab_size"] if not self.args.dry_run else 1000, min_tokens=self.args.cap // 2,
            max_tokens=self.args.cap // 2,
        )  # fmt: skip
        if isinstance(server, TrlServer):
            rows, found = self._train_trl(server, seconds)
        else:
            rows, found = self._train_ours(part, server, seconds)
        seen = client.ask("stop", timeout=60)
        client.stop()
        server.stop()
        figures = summarise(rows, self.args.leave_out)
        if part != "trl":
            figures |= per_gpu(figures, self.args.trainer_ranks)
        gap = longest_gap(seen["streams"], rows[self.args.leave_out - 1][0])
        return figures | found | {"longest_gap_seconds": gap, "client_failures": seen["failures"]}

    def _train_ours(
        self, part: str, server: VllmServer, seconds: float
    ) -> tuple[list[tuple[float, Row]], dict[str, Any]]:
        args = self.args
        stack = TrainingStack(part, args.output, self.work, self.stack, args.dry_run)
        stack.start_service()
        micro, first = min(16, args.sequences), args.tensor_parallel
        trainer = stack.start_trainer(
            self.model,
            ",".join(str(first + rank) for rank in range(args.trainer_ranks)),
            "broadcast",
            args.trainer_flags.split(),
            vllm_port=server.port,
            training_steps=args.steps,
            batch_size=micro,
            gradient_accumulation_steps=args.sequences // micro,
            lr=1e-6,
            max_staleness=args.staleness,
            seq_len=args.cap + PROMPT_ROOM,
            ranks=args.trainer_ranks,
            deterministic=part == "deterministic",
        )
        environment = stack.start_environment(
            "bench/gpu/length_env.py",
            f"{server.url}/v1",
            questions=args.questions.resolve(),
            group_size=args.group,
            max_token_length=args.cap,
            max_num_workers=(args.staleness + 1) * args.sequences // args.group,
            max_batches_offpolicy=args.ahead,
            ensure_scores_are_not_same=False,
        )
        rows = RowsAsTheyCome(stack.metrics)
        self._wait(trainer, seconds, rows)
        dropped = stack.dropped_groups()
        environment.stop()
        trainer.stop()
        invalid = sum(row["groups_invalid"] for row in rows)
        thrown = args.group * (invalid + sum(dropped.values()))
        found = {
            "samples_thrown_away": thrown,
            "groups_dropped_by_service": dropped,
            "groups_invalid": invalid,
        }
        if part == "deterministic":
            counts = ("compared_tokens", "mismatched_tokens", "older_tokens")
            found |= {name: sum(row[name] for row in rows) for name in counts}
        return rows.rows, found | {"ahead": args.ahead}

    def _wait(self, trainer: Child, seconds: float, rows: RowsAsTheyCome) -> None:
        """Wait for a trainer's last step, or its end. If time runs out first, the steps that it has
        taken by then are counted. Nothing waits for a checkpoint after the last step.

        Raises:
            BenchError: it failed, or has taken too few steps.
        """
        deadline, enough = time.monotonic() + seconds - 2, self.args.leave_out + 3

        def all_there() -> bool:
            rows.look()
            if time.monotonic() > deadline:
                return len(rows.rows) >= enough
            return len(rows.rows) >= self.args.steps

        wait_for_end(trainer, seconds, all_there)

    def _train_trl(
        self, server: TrlServer, seconds: float
    ) -> tuple[list[tuple[float, Row]], dict[str, Any]]:
        args = self.args
        settings, file = self.work / "trl.json", self.work / "trl_rows.jsonl"
        config = {
            "max_steps": args.steps, "num_generations": args.group, "max_completion_length": args.cap,
            "max_staleness": args.staleness, "token_budget": args.trl_token_budget,
            "gradient_accumulation_steps": TRL_TOKENS // args.trl_token_budget,
            "max_inflight_tasks": args.in_flight, "queue_maxsize": 1024, "learning_rate": 1e-6, "dtype": args.trl_dtype,
            "vllm_server_base_url": server.url,
        }  # fmt: skip
        asked = {
            "model": str(self.model),
            "questions": str(args.questions),
            "folder": str(self.work / "trl"),
            "config": config,
        }
        settings.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-u", "-m", "bench.gpu.trl_trainer", str(settings), str(file)]
        paths = os.pathsep.join(
            [str(SHIM), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        variables = self._gpus(1) | {
            "PYTHONPATH": paths,
            "TRL_EXPERIMENTAL_SILENCE": "1",
            **OFFLINE,
        }
        trainer = Child("trainer", command, args.output / "trl-trainer.log_path", variables)
        self.stack.callback(trainer.stop)
        rows = RowsAsTheyCome(file)
        self._wait(trainer, seconds, rows)
        trainer.stop()
        thrown = rows.rows[-1][1]["thrown_away"] if rows.rows else 0
        versions = {name: _version(name) for name in ("trl", "transformers", "accelerate")}
        return rows.rows, {"samples_thrown_away": thrown, "versions": versions, "config": config}


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


class TrlServer(Child):
    """vLLM's own server, as TRL wants it."""

    def __init__(
        self, model: Path, output: Path, max_model_len: int, max_num_seqs: int, cache_gib: int
    ) -> None:
        self.port = free_port()
        self.url = f"http://localhost:{self.port}"
        command = [sys.executable, "-u", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += roles.flags(
            port=self.port,
            dtype="bfloat16",
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=cache_gib << 30,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            logprobs_mode="processed_logprobs",
            weight_transfer_config='{"backend":"nccl"}',
        )
        variables = {
            "CUDA_VISIBLE_DEVICES": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": "",
            **OFFLINE,
        }
        super().__init__("vllm trl", command, output / "vllm-trl.log", variables)

    def ready(self) -> bool:
        """Report if it answers. Raises BenchError if it has ended."""
        if self.poll() is not None:
            raise BenchError(
                f"{self.name} ended with status {self.poll()}; see {self.log_path.name}"
            )
        return answers(f"{self.url}/health")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def percent(share: float | None) -> str:
    """Return a share as a table shows it; `-` if there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def report(data: dict[str, Any]) -> str:
    """A table of the parts, and why others are missing."""
    rows, notes = [], []
    for part, found in data.get("parts", {}).items():
        if "trained_tokens_per_second" not in found:
            notes += [
                f"{part}: {key}: {found[key]}" for key in ("skipped", "failed") if key in found
            ]
            continue
        phases = ", ".join(
            f"{name} {value / found['steps']:.2f}"
            for name, value in found["seconds_by_phase"].items()
        )
        rows.append(
            [part, found["steps"], round(found["trained_tokens_per_second"]), f"{100 * found['waiting_share']:.1f} %",
             percent(found.get("mfu")), found["mean_length"], found["samples_thrown_away"],
             found["longest_gap_seconds"], phases]
        )  # fmt: skip
    heads = [
        "",
        "steps",
        "trained tokens/s",
        "waits",
        "mfu",
        "length",
        "thrown away",
        "longest gap s",
        "seconds a step",
    ]
    return "\n".join([table(heads, rows), *notes])


OPTIONS: Options = {
    "--output": {"type": Path, "required": True, "help": "folder of the results and the logs"},
    "--name": {"default": "whole_run", "help": "of the results file, without .json"},
    "--parts": {"nargs": "+", "choices": PARTS, "default": ["ours", "trl"]},
    "--shape": {"choices": SHAPES, "default": "qwen3-1.7b"},
    "--checkpoint": {
        "type": Path,
        "help": "folder for the random weights, used again if it has some",
    },
    "--tensor-parallel": {"type": int, "default": 1, "help": "GPUs of vLLM, the first ones"},
    "--trainer-ranks": {"type": int, "default": 1, "help": "GPUs of our trainer, by FSDP2"},
    "--steps": {"type": int, "default": 14},
    "--leave-out": {"type": int, "default": 3, "help": "first steps that are not counted"},
    "--sequences": {"type": int, "default": 256, "help": "of an optimizer step"},
    "--group": {"type": int, "default": 8, "help": "answers to a question"},
    "--in-flight": {
        "type": int,
        "default": 512,
        "help": "answers that are sampled at the same time, at most",
    },
    "--cap": {"type": int, "default": 1024, "help": "most tokens of an answer"},
    "--staleness": {"type": int, "default": 2, "help": "weight versions that an answer may be old"},
    "--ahead": {
        "type": int,
        "default": 3,
        "help": "batches that our environment may have queued or in work",
    },
    "--trainer-flags": {"default": "", "help": "more flags for grpo.py"},
    "--trl-dtype": {"default": "float32", "help": "of TRL's weights; float32 is its default"},
    "--ready-seconds": {"type": float, "default": 400.0, "help": "that a server may take to start"},
    "--training-seconds": {"type": float, "default": 240.0, "help": "time limit of each training"},
    "--seconds": {"type": float, "default": inf, "help": "time limit of everything"},
    "--dry-run": {"action": "store_true", "help": "starter model, few and short answers, no GPU"},
    "--questions": {
        "type": Path,
        "default": ROOT.parent / "shared" / "gsm8k" / "train.jsonl",
        "help": "GSM8K's training questions, JSON lines",
    },
    "--cache-gib": {
        "type": int,
        "default": 34,
        "help": "keys and values of each server; all are on one GPU, and one computes while the others wait",
    },
    "--trl-token-budget": {
        "type": int,
        "default": 16384,
        "help": "tokens of a pass of TRL's; a smaller one takes less memory, in more passes (default: %(default)s)",
    },
}


def main(arguments: list[str] | None = None) -> int:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    if args.dry_run:
        small = {
            "shape": tiny_of(args.shape),
            "steps": 3,
            "leave_out": 1,
            "sequences": 16,
            "group": 4,
            "in_flight": 16,
            "cap": 24,
        }
        vars(args).update(small)
    return run_and_report(args, WholeRun, report)


if __name__ == "__main__":
    raise SystemExit(main())
