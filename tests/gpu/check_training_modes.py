"""Does a whole training run work on GPUs, in each mode? Service, vLLM, environment, trainer are
real; the model is the starter.

    # every mode that the GPUs at hand suffice for
    python tests/gpu/check_training_modes.py --output DIR
    python tests/gpu/check_training_modes.py --output DIR --only single_copy lora  # some of them
    # on two GPUs
    python tests/gpu/check_training_modes.py --output DIR --steps 10 --eager --only single_copy_tp2 broadcast_fsdp2
    python tests/gpu/check_training_modes.py --output DIR --only deterministic_single_copy --steps 50 --repeat 2
    python tests/gpu/check_training_modes.py --output DIR --only deterministic_single_copy --steps 50 --repeat 2 --kill-after 25

Where there are no GPUs for the trainer beside vLLM's, it shares them. Each mode trains a few steps
on arithmetic. It passes if the trainer ends well, vLLM serves the last step's weights, and every
parameter was mapped. The trained policy must also be the sampling one (KL to the rollouts near 0;
in deterministic mode no token differs). With --repeat, other processes do the same beside it; in
deterministic mode the weights must then be the same, bit for bit, after each step. With
--kill-after, all four processes of the last run get SIGKILL after that step, and it is resumed. Its
weights must equal the undisturbed runs' weights. Prints a table and writes training_modes.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import json
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import torch

from bench.gpu.processes import BenchError, Child, among_visible, free_port, wait_all
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.shapes import STARTER
from bench.gpu.summary import table
from bench.gpu.training_stack import TrainingStack, answers, read_rows, wait_for_end
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer
from bench.measured import Options, command_line
from example_trainer.launcher import roles
from studies.starter_model import mixture

CACHE_GIB, MODEL_LENGTH = 4, 512
MOST_KL = 0.02
"""Nats per token between the policy that sampled and the trained one: bf16 kernels of two programs
differ that much.
"""


@dataclass(frozen=True)
class Mode:
    """Where the processes of a run are, and their flags.

    Attributes:
        vllm_gpus, trainer_gpus: numbers, separated by commas; a trainer with several GPUs starts a
            rank on each. vLLM's of several servers are separated by semicolons; the environment
            samples from the first.
        trainer, vllm: flags.
        own_server: the trainer starts vLLM itself.
        shared: vLLM shares its weights.
        ahead: batches that the environment may sample before a step has been taken.
        squeezed: the trainer's GPUs where there are vLLM's alone; empty: the run needs
            `trainer_gpus`.
        mixture: the model is a mixture of experts, made of the starter model.
        most_kl: see MOST_KL.
        parameter_server: the GPU of a server that hands the weights on, empty if it keeps them in
            the host's memory; None: the trainer sends them itself.
    """

    vllm_gpus: str
    trainer_gpus: str
    trainer: tuple[str, ...]
    vllm: tuple[str, ...] = ()
    own_server: bool = False
    shared: bool = True
    ahead: int = 1
    squeezed: str = ""
    mixture: bool = False
    most_kl: float = MOST_KL
    parameter_server: str | None = None

    def on(self, gpus: int) -> Mode:
        """The same where there are so many GPUs."""
        if gpus >= self.gpus_needed or not self.squeezed:
            return self
        return replace(self, trainer_gpus=self.squeezed)

    @property
    def servers(self) -> list[str]:
        """The GPUs of each server."""
        return self.vllm_gpus.split(";")

    @property
    def deterministic(self) -> bool:
        return "--deterministic" in self.trainer

    @property
    def replays(self) -> bool:
        """Report if tokens go through the experts that the sampler chose."""
        return "--router-replay" in self.trainer

    @property
    def on_policy(self) -> bool:
        """Report if each step is sampled by the weights that it trains, or by the weights of a step
        before.
        """
        return not self.own_server and self.parameter_server is None

    @property
    def gpus_needed(self) -> int:
        places = re.split(
            "[,;]", f"{self.vllm_gpus},{self.trainer_gpus},{self.parameter_server or 0}"
        )
        return 1 + max(int(gpu) for gpu in places)


_SHARED = ("--weight-bridge-mode", "shared_vllm")
_HANDED_ON = ("--weight-bridge-mode", "parameter_server", "--max-staleness", "2")
_DETERMINISTIC = ("--deterministic",)
_FLOAT16 = ("--dtype", "float16")
MODES = {
    "single_copy": Mode("0", "0", (*_SHARED, "--single-copy")),
    "lora": Mode(
        "0",
        "0",
        ("--weight-bridge-mode", "lora_only", "--lora-r", "16"),
        ("--enable-lora", "--max-lora-rank", "16"),
        shared=False,
    ),
    "broadcast_direct": Mode(
        "0", "1", (*_SHARED, "--use-shared-memory", "--weight-transfer", "direct"), squeezed="0"
    ),
    "broadcast_overlapped": Mode(
        "0", "1", (*_SHARED, "--use-shared-memory", "--weight-transfer", "overlapped"), squeezed="0"
    ),
    "restart": Mode(
        "0",
        "1",
        ("--weight-bridge-mode", "none", "--vllm-restart-interval", "3"),
        own_server=True,
        squeezed="0",
    ),
    "single_copy_tp2": Mode("0,1", "0,1", (*_SHARED, "--single-copy")),
    "chosen_tp2": Mode("0,1", "0,1", _SHARED),
    "broadcast_fsdp2": Mode("0", "1,2", (*_SHARED, "--use-shared-memory"), squeezed="0,1"),
    "broadcast_float16": Mode("0", "1", (*_SHARED, "--use-shared-memory"), _FLOAT16, squeezed="0"),
    "chosen_float16": Mode("0", "0", _SHARED, _FLOAT16),
    "lora_float16": Mode(
        "0",
        "0",
        ("--weight-bridge-mode", "lora_only", "--lora-r", "16"),
        ("--enable-lora", "--max-lora-rank", "16", *_FLOAT16),
        shared=False,
    ),
    "broadcast_tp2_fsdp2": Mode("0,1", "2,3", (*_SHARED, "--use-shared-memory"), squeezed="1,0"),
    "broadcast_two_servers": Mode("0;1", "2", (*_SHARED, "--use-shared-memory"), squeezed="1"),
    "broadcast_two_on_one_gpu": Mode("0;0", "1", (*_SHARED, "--use-shared-memory"), squeezed="0"),
    "parameter_server": Mode("0", "0", _HANDED_ON, parameter_server="1"),
    "parameter_server_one_gpu": Mode("0", "0", _HANDED_ON, parameter_server="0"),
    "parameter_server_host_memory": Mode("0", "0", _HANDED_ON, parameter_server=""),
    "deterministic_single_copy": Mode(
        "0", "0", (*_SHARED, "--single-copy", *_DETERMINISTIC), _DETERMINISTIC, ahead=0
    ),
    "deterministic_shared_prompts": Mode(
        "0",
        "0",
        (*_SHARED, "--single-copy", "--share-prefixes", *_DETERMINISTIC),
        _DETERMINISTIC,
        ahead=0,
    ),
    "deterministic_broadcast": Mode(
        "0",
        "1",
        (*_SHARED, "--use-shared-memory", *_DETERMINISTIC),
        _DETERMINISTIC,
        ahead=0,
        squeezed="0",
    ),
    # Some tokens go through other experts than the sampler's: how far apart the two sides are then
    # is measured, and only nonsense is an error.
    "mixture": Mode("0", "0", (*_SHARED, "--single-copy"), ahead=0, mixture=True, most_kl=0.5),
    "mixture_replay": Mode(
        "0",
        "0",
        (*_SHARED, "--single-copy", "--router-replay"),
        ("--enable-return-routed-experts",),
        ahead=0,
        mixture=True,
    ),
    "mixture_deterministic": Mode(
        "0",
        "0",
        (*_SHARED, "--single-copy", *_DETERMINISTIC),
        _DETERMINISTIC,
        ahead=0,
        mixture=True,
    ),
    "deterministic_single_copy_tp2": Mode(
        "0,1", "0,1", (*_SHARED, "--single-copy", *_DETERMINISTIC), _DETERMINISTIC, ahead=0
    ),
    "deterministic_broadcast_tp2": Mode(
        "0,1",
        "2",
        (*_SHARED, "--use-shared-memory", *_DETERMINISTIC),
        _DETERMINISTIC,
        ahead=0,
        squeezed="1",
    ),
    "deterministic_broadcast_tp2_fsdp2": Mode(
        "0,1",
        "2,3",
        (*_SHARED, "--use-shared-memory", *_DETERMINISTIC),
        _DETERMINISTIC,
        ahead=0,
        squeezed="0,1",
    ),
}


class Run:
    """One mode's processes and what came of them."""

    def __init__(
        self,
        name: str,
        mode: Mode,
        args: argparse.Namespace,
        stack: ExitStack,
        work: Path,
        kill_after: int = 0,
    ) -> None:
        """
        Args:
            kill_after: the step after which every process is killed and the run resumed; 0: it is
                left alone.
        """
        self.name, self.mode, self.args, self.stack, self.kill_after = (
            name,
            mode,
            args,
            stack,
            kill_after,
        )
        self.model = STARTER
        if mode.mixture:
            self.model = work / "mixture model"
            mixture.main(["--output", str(self.model)])
        self.processes = TrainingStack(name, args.output, work, stack, args.device == "cpu")
        servers = 1 if mode.own_server else len(mode.servers)
        self.ports = [free_port() for _ in range(servers)]
        self.handing_on = free_port() if mode.parameter_server is not None else 0

    def servers(self) -> list[VllmServer]:
        """Servers that the trainer does not start itself. The first one's folder is the trainer's,
        for a single copy's handles; each other has its own."""
        started = []
        for number, gpus in enumerate(self.mode.servers):
            name = f"{self.processes.name}-vllm{number or ''}"
            options = ServerOptions(
                gpus if self.args.device == "cuda" else "", tp=len(gpus.split(",")), shared=self.mode.shared,
                eager=self.args.eager, cache_gib=CACHE_GIB, max_model_len=MODEL_LENGTH, load_format="auto",
                flags=self.mode.vllm,
            )  # fmt: skip
            folder = self.processes.folder / name if number else self.processes.folder
            started.append(
                VllmServer(
                    name, self.model, self.args.output, options, self.ports[number], logs=folder
                )
            )
            self.stack.callback(started[-1].stop)
        return started

    def go(self) -> dict[str, Any]:
        """Train, and return what was seen.

        Raises:
            BenchError: a process failed, or took too long.
        """
        mode, args, begun = self.mode, self.args, time.monotonic()
        self.start()
        ready = time.monotonic()
        if self.kill_after:
            wait_for_end(self.trainer, args.seconds, lambda: len(self.learned()) >= self.kill_after)
            for child in (*self.others, self.trainer):
                child.kill()
            self.processes.name += "-resumed"
            self.start("--resume", "auto")
        wait_for_end(self.trainer, args.seconds)
        served = [] if mode.own_server else [self.served_by(port) for port in self.ports]
        self.others[-1].stop()
        rows = self.learned()
        found = {
            "steps": len(rows),
            "gpus": mode.gpus_needed if args.device == "cuda" else 0,
            "rewards": [round(row["reward_mean"], 3) for row in rows],
            "kl": [round(row["kl"], 6) for row in rows],
            "params": f"{rows[-1]['params_mapped']}/{rows[-1]['params_total']}",
            "bytes_moved": rows[-1]["bytes_moved"],
            "seconds_sync_ms": sorted(round(row["seconds_sync"] * 1e3, 2) for row in rows)[
                len(rows) // 2
            ],
            "served": served,
            "ranks": ranks_in(self.trainer.log_path),
            "compared_tokens": sum(row.get("compared_tokens", 0) for row in rows),
            "mismatched_tokens": sum(row.get("mismatched_tokens", 0) for row in rows),
            "rerouted_share": [
                row["rerouted_share"] for row in rows if row.get("rerouted_share") is not None
            ],
            "checksums": [row["checksum"] for row in rows],
            "seconds_to_vllm_ready": round(ready - begun, 1),
            "seconds_training": round(time.monotonic() - ready, 1),
        }
        self.judge(found, rows)
        return found

    def start(self, *resume: str) -> None:
        """Everything, in the order in which it is wanted; the trainer is `trainer`, the environment
        the last of `others`.
        """
        mode, exact = self.mode, bool(self.args.kill_after)
        service = self.processes.start_service(
            self.processes.folder / "rollouts.db" if exact else None
        )
        servers: list[Child] = [] if mode.own_server else [*self.servers()]
        wait_all({server.name: server.ready for server in servers}, READY_SECONDS)
        if self.handing_on:
            servers.append(self.start_parameter_server())
        self.trainer = self.processes.start_trainer(
            self.model, mode.trainer_gpus, None, [*mode.trainer, *resume], **self.trainer_options()
        )
        environment = self.processes.start_environment(
            "environments/arithmetic_server.py",
            f"http://localhost:{self.ports[0]}",
            max_token_length=96,
            group_size=16,
            max_batches_offpolicy=mode.ahead,
            seed_rollouts=mode.deterministic,
            exact_resume=exact,
            # Once the task is solved most groups are of equal scores: many would be sampled for
            # each that is trained on.
            ensure_scores_are_not_same=False,
        )
        self.others: list[Child] = [service, *servers, environment]

    def start_parameter_server(self) -> Child:
        """Once it listens; it holds nothing until the trainer has pushed."""
        command = roles.parameter_server(
            self.model,
            self.processes.service_url,
            [f"localhost:{port}" for port in self.ports],
            port=self.handing_on,
            bridge_timeout=60,
            log_dir=self.processes.folder / "handing_on",
        )
        child = self.processes.start("parameter-server", command, self.mode.parameter_server or "")
        wait_all(
            {
                "parameter server": lambda: answers(
                    f"http://localhost:{self.handing_on}/bridge/state"
                )
            },
            120,
        )
        return child

    def served_by(self, port: int) -> int:
        """The version that a server ends with.

        A parameter server hands the last one on when the trainer is through with it.
        """
        if self.handing_on:
            last = self.args.steps
            wait_all({f"version {last} at port {port}": lambda: _served(port) == last}, 60)
        return _served(port)

    def learned(self) -> list[dict[str, Any]]:
        """A row for each step, in their order; of a step that was done again, the later one."""
        # Not by weight version: where vLLM is restarted every few steps, that of the steps between
        # is the same.
        return list({row["step"]: row for row in read_rows(self.processes.metrics)}.values())

    def trainer_options(self) -> dict[str, roles.Value]:
        """Return the options of grpo.py in this mode, beside the mode's own flags."""
        mode, args = self.mode, self.args
        options: dict[str, roles.Value] = {
            "vllm_port": self.ports[0],
            "training_steps": args.steps,
            "lr": 3e-4,
            "batch_size": 16,
            "gradient_accumulation_steps": 8,
            "seq_len": MODEL_LENGTH,
            "bridge_timeout": 60,
            "batch_timeout": 200,
        }
        if len(self.ports) > 1:
            options["vllm_servers"] = ",".join(f"localhost:{port}" for port in self.ports)
        if self.handing_on:
            options["parameter_servers"] = f"localhost:{self.handing_on}"
        if args.kill_after:
            options |= {"checkpoint_interval": 1, "keep_checkpoints": 1, "max_staleness": 0}
        if mode.own_server:
            on_gpu = args.device == "cuda"
            sizes: dict[str, roles.Value] = {"max_model_len": MODEL_LENGTH, "max_num_seqs": 256}
            if on_gpu:
                # An exact size, so that other programs may use the GPU at the same time.
                sizes |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": CACHE_GIB << 30}
                options["vllm_gpus"] = among_visible(mode.vllm_gpus)
            flags = roles.vllm_flags("127.0.0.1", on_gpu, "auto", args.eager, **sizes)
            options["vllm_args"] = " ".join([*flags, *mode.vllm])
        return options

    def judge(self, found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Raise BenchError if the run is not what it should be."""
        steps, mapped = self.args.steps, found["params"].split("/")
        served = found["served"]
        if len(rows) != steps or any(version != steps for version in served):
            raise BenchError(f"{self.name}: {len(rows)} of {steps} steps, vLLM serves {served}")
        if mapped[0] != mapped[1]:
            raise BenchError(f"{self.name}: only {found['params']} parameters were mapped")
        if self.args.device == "cuda" and found["ranks"] != len(self.mode.trainer_gpus.split(",")):
            raise BenchError(
                f"{self.name}: the trainer started {found['ranks']} ranks on GPUs {self.mode.trainer_gpus}"
            )
        worst = max(abs(value) for value in found["kl"])
        if self.mode.replays and len(found["rerouted_share"]) != steps:
            raise BenchError(
                f"{self.name}: experts were replayed in {len(found['rerouted_share'])} of {steps} steps"
            )
        if self.mode.on_policy and worst > self.mode.most_kl:
            raise BenchError(f"{self.name}: KL to the rollouts' policy reached {worst}")
        if self.mode.deterministic and (
            not found["compared_tokens"] or found["mismatched_tokens"] or worst
        ):
            tokens = f"{found['mismatched_tokens']} of {found['compared_tokens']} tokens differ"
            raise BenchError(f"{self.name}: {tokens}, KL {worst}")


def ranks_in(log: Path) -> int:
    """Return the number of ranks that a trainer started, by its log; 1 if it stayed one process."""
    started = re.search(
        r"\[Ranks\] Starting (\d+) ranks", log.read_text(encoding="utf-8", errors="replace")
    )
    return int(started[1]) if started else 1


def first_difference(runs: list[dict[str, Any]]) -> int | None:
    """Return the first step, from 1, after which the weights of a run differ from the first one's;
    None if they never do.
    """
    for step, checksums in enumerate(
        zip(*(run["checksums"] for run in runs), strict=True), start=1
    ):
        if len(set(checksums)) > 1:
            return step
    return None


def repeated(name: str, mode: Mode, args: argparse.Namespace) -> dict[str, Any]:
    """Run a mode as often as asked, all at the same time. Returns the last run's figures, and how
    the runs compare.

    Raises:
        BenchError: a run failed, or two runs of a deterministic mode ended differently.
    """

    def one(label: str) -> dict[str, Any]:
        kill_after = args.kill_after if label == labels[-1] else 0
        with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
            found = Run(label, mode, args, stack, Path(work), kill_after).go()
        print(f"{label}: weights {found['checksums'][-1]}", flush=True)
        return found

    labels = (
        [f"{name}-{number}" for number in range(1, args.repeat + 1)] if args.repeat > 1 else [name]
    )
    with ThreadPoolExecutor(len(labels)) as pool:
        runs = list(pool.map(one, labels))
    found = runs[-1]
    if args.repeat > 1:
        step = first_difference(runs)
        found["runs"], found["first_step_that_differs"] = args.repeat, step
        if args.kill_after:
            found["killed_after_step"] = args.kill_after
        if mode.deterministic and step is not None:
            raise BenchError(
                f"{name}: after step {step} the weights of {args.repeat} runs are not the same"
            )
    return found


def _served(port: int) -> int:
    """Return the version that a server serves, of the whole weights or of an adapter."""
    answer = httpx.get(f"http://localhost:{port}/bridge/state", timeout=30)
    if answer.status_code != 200:
        answer = httpx.get(f"http://localhost:{port}/lora/status", timeout=30)
    version: int = answer.raise_for_status().json()["weight_version"]
    return version


class Benchmark(Sitting):
    """One mode after the other."""

    def run(self) -> None:
        """Measure the chosen ones that the GPUs suffice for."""
        self.describe(modes={})
        for name in self.args.only or MODES:
            gpus = torch.cuda.device_count()
            mode = MODES[name].on(gpus) if self.on_gpu else MODES[name]
            if self.on_gpu and gpus < mode.gpus_needed:
                self.results.put("modes", name, value={"skipped": f"needs {mode.gpus_needed} GPUs"})
                continue
            self.results.measure("modes", name, run=partial(repeated, name, mode, self.args))
            print(json.dumps(self.results.data["modes"][name]), flush=True)


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    rows = []
    for name, found in data["modes"].items():
        if "steps" in found:
            rewards = found["rewards"]
            kl = max(map(abs, found["kl"]))
            rerouted = found.get("rerouted_share")
            cells = [
                found["steps"],
                found.get("ranks", 1),
                found["params"],
                f"{rewards[0]} to {rewards[-1]}",
                f"{kl:.1e}",
                f"{statistics.mean(found['kl']):.1e}",
                f"{statistics.mean(rerouted):.2%}" if rerouted else None,
                found["seconds_sync_ms"],
            ]
            rows.append([name, *cells, found["seconds_training"]])
        else:
            rows.append([name, *found.values(), "", "", "", "", "", "", "", ""])
    heads = ["mode", "steps", "ranks", "parameters", "reward", "largest KL", "mean KL", "rerouted"]
    return table([*heads, "sync ms", "training s"], rows)


OPTIONS: Options = {
    "--only": {"nargs": "+", "choices": MODES},
    "--steps": {"type": int, "default": 8},
    "--repeat": {"type": int, "default": 1, "help": "runs of each mode, compared with each other"},
    "--kill-after": {
        "type": int,
        "default": 0,
        "metavar": "STEP",
        "help": "kill all of the last run, resume it",
    },
    "--seconds": {
        "type": float,
        "default": 300.0,
        "help": "for a training, which may start vLLM three times",
    },
    "--eager": {
        "action": "store_true",
        "help": "vLLM without compilation and CUDA graphs (starts faster)",
    },
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("training_modes") | OPTIONS
    return run_and_report(command_line(__doc__, options).parse_args(arguments), Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
