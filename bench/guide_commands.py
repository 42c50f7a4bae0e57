"""The commands of the user's guide, typed into a shell on a machine with GPUs, until the trainer
has taken some steps.

    python bench/guide_commands.py headline --output DIR       14B: vLLM on the first GPUs, the trainer on the last one
    python bench/guide_commands.py single-copy --output DIR    14B: trainer and vLLM on the same two GPUs
    python bench/guide_commands.py multi-gpu --output DIR      14B: a trainer that sees two GPUs
    python bench/guide_commands.py multi-gpu --shape qwen2.5-72b --server-gpus 2 --kill-server --output DIR
                                                               72B: on eight GPUs; then vLLM is killed, and started again
    python bench/guide_commands.py legacy --output DIR         3B: checkpoints, and two restarts of vLLM
    CUDA_VISIBLE_DEVICES=0 python bench/guide_commands.py legacy --output DIR --trainer-flags "--vllm-gpus 1"   on two GPUs
    python bench/guide_commands.py headline --output DIR --dry-run    the starter model on the CPU: that it runs

Nothing is replaced but the model's name (by a folder of random weights of the same shape) and lists
of devices. The environment is bench/gpu/length_env.py, since random weights solve no problem of
GSM8K. At the end everything is killed by the guide's command. Prints a table and writes
guide_NAME.json. It has the seconds until the first step and for each step, and the highest memory
of GPUs and host. The trainer's memory plan and the promised log lines that came are there too. If a
command fails, the ends of all logs are in that file as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.gpu.guide import COMMANDS, END_SECONDS, RENDEZVOUS, SERVICE, VLLM, TypedShell
from bench.gpu.machine import describe
from bench.gpu.memory_peaks import MemoryPeaks, gpu_memory, wait_until_free
from bench.gpu.processes import NO_MULTICAST, BenchError, Task, tail
from bench.gpu.runs import Results, run_and_report
from bench.gpu.shapes import SHAPES, STARTER
from bench.gpu.summary import table
from bench.gpu.training_stack import RowsAsTheyCome
from bench.measured import Options, command_line
from example_trainer.child_processes.guard import descendants, send
from example_trainer.child_processes.ports import PortReservations

HTTP_SECONDS = 30.0
GIGABYTE = 1e9
_SERVES = re.compile(r"\[Bridge\] vLLM serves weight version (\d+) after ([\d.]+) s")
_PLACE = re.compile(r"\[Bridge\] vLLM will run on .*")
_TIME = re.compile(r"^(?:\w+ )?(\d\d):(\d\d):(\d\d) (.*)$")


def legacy_figures(
    log: str, rows: Iterable[Mapping[str, Any]], checkpoints: Path
) -> dict[str, Any]:
    """Measure the restarts of a run.

    Args:
        log: the trainer's.
        rows: of metrics.jsonl.
        checkpoints: its --save-path.

    Returns:
        `server`: the logged choice of vLLM's GPUs and share. `starts`: seconds of each start by
        version, the first included. `seconds_of_restarts`: of each restart by phase.
        `seconds_from_weights_to_state`: by checkpoint, how long after its weights the optimizer's
        state was whole. `checkpoints`: gigabytes by checkpoint.
    """
    place = _PLACE.search(log)
    restarts = [
        {"step": row["step"], "stop": row["sync/stop"], "start": row["sync/start"]}
        for row in rows
        if row.get("sync/start") is not None
    ]
    return {
        "server": place[0] if place else None,
        "starts": [
            {"version": int(version), "seconds": float(seconds)}
            for version, seconds in _SERVES.findall(log)
        ],
        "seconds_of_restarts": [
            {name: round(value, 2) for name, value in restart.items()} for restart in restarts
        ],
        "seconds_from_weights_to_state": _states_after_weights(log),
        "checkpoints": {
            path.name: _sizes(path) for path in sorted(checkpoints.glob("step_*"), key=_step)
        },
    }


def legacy_table(found: Mapping[str, Any]) -> str:
    """Tables of `legacy_figures`."""
    starts = [["start at version", *(start["version"] for start in found["starts"])]]
    starts += [["seconds", *(start["seconds"] for start in found["starts"])]]
    heads = ["checkpoint", "weights GB", "state GB", "state after weights s"]
    late = found["seconds_from_weights_to_state"]
    sizes = [
        [name, size["weights_gb"], size["state_gb"], late.get(name, "")]
        for name, size in found["checkpoints"].items()
    ]
    return "\n".join(
        [str(found["server"]), table([""] * len(starts[0]), starts), table(heads, sizes)]
    )


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _sizes(path: Path) -> dict[str, float]:
    state = sum(file.stat().st_size for file in path.glob("trainer_state/*"))
    weights = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
    return {"weights_gb": round(weights / GIGABYTE, 3), "state_gb": round(state / GIGABYTE, 3)}


def _states_after_weights(log: str) -> dict[str, int]:
    """Seconds between the two log lines of a checkpoint, by its name; the log's clock has whole
    seconds.
    """
    written: dict[str, int] = {}
    found: dict[str, int] = {}
    for line in log.splitlines():
        match = _TIME.match(line)
        if match is None:
            continue
        hours, minutes, seconds, text = match.groups()
        now = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        if weights := re.match(r"Saved the weights of (\S+) for vLLM", text):
            written[Path(weights[1]).name] = now
        elif (whole := re.match(r"Saved checkpoint (\S+)", text)) and Path(
            whole[1]
        ).name in written:
            found[Path(whole[1]).name] = (now - written[Path(whole[1]).name]) % 86400
    return found


OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
LOGS = ("api.log", "gsm8k.log", "vllm.log", "trainer.log_path", "shell.log")
SERVER_LINES = (
    "[vLLM Patch] ✓ Shared memory setup complete!",
    "[vLLM Patch] ✓ Exported ",
    "(name: WeightUpdater_TP0)",
)
TRAINER_LINES = ("[Bridge] Mapped ", "Step 1/")
BROADCAST_LINES = (
    "[Bridge] ✓ Gloo group created",
    "[Bridge] ✓ NCCL group created",
    "[Bridge] ✓ All ranks synchronized and ready",
)
SMALLER_SHARE = r"--gpu-memory-utilization (0\.\d+) or less"
"""The log line of a trainer on vLLM's GPUs if too little of their memory is left."""
SERVES = "[Bridge] vLLM serves weight version "
"""The line of a trainer whose own server is ready after a start or restart."""
PROGRESS_SECONDS = 15.0
GPU_SECONDS = 30.0
"""After the clean-up, for the kernel to give back what killed processes had on the GPUs."""
QUESTIONS = 2000


@dataclass(frozen=True)
class Guide:
    """A part of the guide.

    Attributes:
        vllm, trainer: names in COMMANDS; no `vllm` where the trainer starts the server.
        shape: of the model.
        gpus: GPUs that it needs at least.
        steps: after which it ends.
        lines: that the logs must have.
        restarts: of vLLM by the trainer that must have been seen.
    """

    vllm: str
    trainer: str
    shape: str
    gpus: int
    steps: int
    lines: tuple[str, ...]
    restarts: int = 0

    def devices(self, gpus: int, servers: int = 0) -> tuple[str, str]:
        """The GPUs of vLLM and of the trainer; the trainer's are the last ones.

        Args:
            gpus: of the machine.
            servers: GPUs of vLLM, where the trainer has all others; 0: the part decides.
        """
        if self.trainer == "single copy trainer":
            return "0,1", "0,1"
        if not self.vllm:
            return "0", "0"
        number = [str(gpu) for gpu in range(gpus)]
        if servers:
            return ",".join(number[:servers]), ",".join(number[servers:])
        trainers = 1 + (self.trainer == "multi-gpu trainer")
        servers = 1 + (gpus - trainers >= 2)
        return ",".join(number[:servers]), ",".join(number[gpus - trainers :])


PARTS = {
    "headline": Guide(
        "vllm", "trainer", "qwen2.5-14b", 2, 10, (*SERVER_LINES, *TRAINER_LINES, *BROADCAST_LINES)
    ),
    "single-copy": Guide(
        "single copy vllm",
        "single copy trainer",
        "qwen2.5-14b",
        2,
        10,
        (*SERVER_LINES, *TRAINER_LINES),
    ),
    "multi-gpu": Guide(
        "multi-gpu vllm",
        "multi-gpu trainer",
        "qwen2.5-14b",
        3,
        10,
        (*SERVER_LINES, *TRAINER_LINES, *BROADCAST_LINES),
    ),
    "legacy": Guide("", "legacy trainer", "qwen2.5-3b", 1, 20, ("Step 1/",), restarts=2),
}


def on_devices(command: str, devices: str, tp: int) -> str:
    """The command with other GPUs, and as many ranks of vLLM."""
    command = re.sub(r"CUDA_VISIBLE_DEVICES=[\d,]+", f"CUDA_VISIBLE_DEVICES={devices}", command)
    return re.sub(r"--tensor-parallel-size \d+", f"--tensor-parallel-size {tp}", command)


def write_questions(file: Path) -> Path:
    """Sums in GSM8K's format, about as long as its questions."""
    rows = []
    for number in range(QUESTIONS):
        first, second = 100 + 7 * number % 900, 100 + 13 * number % 900
        text = (
            f"Box {number} holds {first} nails and a second box {second}. " * 4
            + "How many nails do both boxes hold?"
        )
        rows.append(
            json.dumps({"question": text, "answer": f"{first} + {second}\n#### {first + second}"})
        )
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


class GuideCommands:
    """One part, from the checkpoint to the guide's clean-up."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.work, self.stack, self.began = args, work, stack, time.monotonic()
        guide = PARTS[args.part]
        self.guide = replace(
            guide, steps=args.steps or guide.steps, shape=args.shape or guide.shape
        )
        gpus = 0 if args.dry_run else torch.cuda.device_count()
        self.vllm_gpus, self.trainer_gpus = self.guide.devices(gpus or guide.gpus, args.server_gpus)
        shown = ("part", "max_tokens", "group", "vllm_flags", "trainer_flags", "dry_run", "seconds")
        settings = {name: getattr(args, name) for name in shown} | {
            "shape": self.guide.shape,
            "steps": self.guide.steps,
        }
        settings |= {"vllm_gpus": self.vllm_gpus, "trainer_gpus": self.trainer_gpus}
        name = args.name or f"guide_{args.part.replace('-', '_')}"
        self.results = Results(args.output / f"{name}.json", settings=settings)
        self.found: dict[str, Any] = {}
        self.vllm_flags: str = args.vllm_flags
        self.peaks = MemoryPeaks()
        self.next_progress = 0.0

    def run(self) -> None:
        self.results.put("machine", value=describe())
        gpus = torch.cuda.device_count()
        if not self.args.dry_run and gpus < PARTS[self.args.part].gpus:
            raise BenchError(
                f"{self.args.part} needs {PARTS[self.args.part].gpus} GPUs, and {gpus} are here"
            )
        model = STARTER if self.args.dry_run else self._checkpoint()
        self.shell = self._shell()
        try:
            self.results.measure("run", run=lambda: self._typed(model))
        finally:
            self.results.put("clean_up", value=self._clean_up())

    def _checkpoint(self) -> Path:
        folder: Path = (self.args.checkpoint or self.work / "model").resolve()
        if not (folder / "generation_config.json").exists():
            asked = {"shape": self.guide.shape, "folder": str(folder), "cap": self.args.max_tokens}
            task = Task(
                "random checkpoint",
                "bench.gpu.random_checkpoint",
                asked,
                self.args.output,
                self._left(),
            )
            self.stack.callback(task.stop)
            self.results.put("checkpoint", value=task.answer() | {"seconds": self._since_start()})
            self._say("checkpoint written")
        return folder

    def _shell(self) -> TypedShell:
        folder = self.work / "checkout"
        folder.mkdir()
        reserved = self.stack.enter_context(PortReservations())
        ports = {
            port: port if reserved.take(port) else reserved.pick()
            for port in (SERVICE, VLLM, RENDEZVOUS)
        }
        no_multicast = {name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()}
        variables = {**no_multicast, **OFFLINE, "VLLM_API_KEY": None, "ROLLOUT_API_KEY": None}
        shell = TypedShell(
            folder, variables | ({"OMP_NUM_THREADS": "1"} if self.args.dry_run else {}), ports
        )
        self.stack.callback(shell.process.stop)
        return shell

    def _typed(self, model: Path) -> dict[str, Any]:
        """Type everything.

        If the trainer refuses vLLM's share of the memory and names another, do it again with that
        one.
        """
        questions = write_questions(self.work / "questions.jsonl")
        flags = f"--env.questions {questions} --env.group_size {self.args.group} --env.max_token_length {self.args.max_tokens}"
        flags += " --env.steps_per_eval 0 --openai.server_type vllm"
        try:
            self._type_services(flags)
            self._type_training(model)
        except BenchError:
            trainer = self.shell.read("trainer.log_path")
            if not (share := re.search(SMALLER_SHARE, trainer)) or self.vllm_flags:
                raise
            self.found["refused_share_of_vllm"] = next(
                line for line in trainer.splitlines() if share[0] in line
            )
            self._say(f"again with a smaller share: {self.found['refused_share_of_vllm']}")
            self.shell.kill()
            self._type_services(flags)
            self.vllm_flags = f"--gpu-memory-utilization {share[1]}"
            self._type_training(model)
        rows = self._steps()
        self._say(f"{len(rows.rows)} steps")
        self._figures(rows)
        if self.args.kill_server:
            self.found["killed_server"] = self._heal(model, rows)
        if missing := self.found["missing_lines"]:
            raise BenchError(f"the logs lack {missing}")
        return self.found

    def _type_services(self, flags: str) -> None:
        for name in ("folder", "old files", "variables", "service"):
            self.shell.type(COMMANDS[name])
        environment = f"bench/gpu/length_env.py serve {flags}"
        self.shell.type(
            COMMANDS["environment"].replace("environments/gsm8k_server.py", environment)
        )

    def _type_training(self, model: Path) -> None:
        if self.guide.vllm:
            self.found["seconds_to_vllm"] = self._type_server(model)
        self._type_trainer(model)

    def _type_server(self, model: Path) -> float:
        """Type vLLM's command; return the seconds until it answers."""
        ranks = len(self.vllm_gpus.split(","))
        if self.args.dry_run and self.guide.vllm != "single copy vllm":
            ranks = 1
        command = self._with_model(
            on_devices(COMMANDS[self.guide.vllm], self.vllm_gpus, ranks), model
        )
        command = command.replace(
            "vllm_api_server.py", f"vllm_api_server.py {self.vllm_flags}".rstrip()
        )
        self.shell.type(command)
        self._say(f"typed: {command}")
        ready = f"Uvicorn running on http://0.0.0.0:{self.shell.ports[VLLM]}"
        return round(self._wait("vllm.log", ready, "vllm_api_server.py"), 1)

    def _type_trainer(self, model: Path) -> None:
        command = self._with_model(
            on_devices(COMMANDS[self.guide.trainer], self.trainer_gpus, 1), model
        )
        command = command.replace("grpo.py", f"grpo.py {self.args.trainer_flags}".rstrip())
        if "trainer.log_path" not in command:  # where the guide leaves its lines on the terminal
            command += " 2>&1 | tee trainer.log_path"
        self.shell.type(f"{command} > /dev/null &")
        self._say(f"typed: {command}")
        self.found["commands"] = self.shell.at_its_ports(command)
        self.found["seconds_to_first_step"] = round(
            self._wait("trainer.log_path", "Step 1/", "grpo.py"), 1
        )

    def _with_model(self, command: str, model: Path) -> str:
        return re.sub(r"Qwen/Qwen2\.5-\w+-Instruct", str(model), command)

    def _steps(self) -> RowsAsTheyCome:
        """The rows of the steps, when there are enough of them and vLLM has been restarted often
        enough.

        Raises:
            BenchError: the trainer ended before, or the time is over.
        """
        rows = RowsAsTheyCome(self.shell.folder / "runs" / "grpo" / "metrics.jsonl")
        while len(rows.rows) < self.guide.steps or self._restarts() < self.guide.restarts:
            if not self.shell.pids_of("grpo.py"):
                rows.look()
                if len(rows.rows) >= self.guide.steps and self._restarts() >= self.guide.restarts:
                    break
                raise BenchError(
                    f"the trainer ended after {len(rows.rows)} steps:\n{tail(self.shell.folder / 'trainer.log_path')}"
                )
            if self._left() <= 0:
                self._figures(rows)
                raise BenchError(
                    f"only {len(rows.rows)} steps and {self._restarts()} restarts in {self.args.seconds:g} s"
                )
            self._idle()
            rows.look()
            time.sleep(0.1)
        return rows

    def _heal(self, model: Path, rows: RowsAsTheyCome) -> dict[str, Any]:
        """Kill vLLM with all its processes, type its command again, and wait for two more steps.

        Returns:
            `seconds_to_vllm`: until it answers. `seconds_to_weights`: from then until it has the
            weights of a step. `seconds_to_step`: from the kill until the first step is done whose
            answers the new server may have sampled.

        Raises:
            BenchError: the trainer ended, or the time is over.
        """
        began, steps = time.monotonic(), len(rows.rows)
        self._kill_server()
        self.shell.answer("rm vllm.log", max(1.0, self._left()))  # or its old lines would count
        found = {"seconds_to_vllm": self._type_server(model)}
        ready = time.monotonic()
        self._wait_until("the new server has no weights", self._server_has_weights)
        found["seconds_to_weights"] = round(time.monotonic() - ready, 1)
        self._wait_until("no two steps came", lambda: self._new_rows(rows) >= steps + 2)
        return found | {
            "seconds_to_step": round(rows.rows[steps + 1][0] - began, 1),
            "steps": len(rows.rows),
        }

    def _kill_server(self) -> None:
        """Kill the server's first process; the others must end by themselves.

        Raises:
            BenchError: one did not, in END_SECONDS.
        """
        first = self.shell.pids_of("vllm_api_server.py")
        others = {pid for one in first for pid in descendants(one)}
        for pid in first:
            send(pid, signal.SIGKILL)
        end = time.monotonic() + END_SECONDS
        while left := (others | set(first)) & self.shell.pids().keys():
            if time.monotonic() > end:
                raise BenchError(f"{END_SECONDS:g} s after the kill of vLLM these run: {left}")
            time.sleep(0.1)

    def _server_has_weights(self) -> bool:
        state = httpx.get(
            f"http://127.0.0.1:{self.shell.ports[VLLM]}/bridge/state", timeout=HTTP_SECONDS
        )
        return bool(state.raise_for_status().json()["weight_version"])

    @staticmethod
    def _new_rows(rows: RowsAsTheyCome) -> int:
        rows.look()
        return len(rows.rows)

    def _wait_until(self, lacking: str, there: Callable[[], bool]) -> None:
        while not there():
            if not self.shell.pids_of("grpo.py") or self._left() <= 0:
                raise BenchError(
                    f"{lacking}, after the kill of vLLM; the trainer's log ends with:\n"
                    f"{tail(self.shell.folder / 'trainer.log_path')}"
                )
            self._idle()
            time.sleep(0.1)

    def _restarts(self) -> int:
        return max(0, self.shell.read("trainer.log_path").count(SERVES) - 1)

    def _figures(self, rows: RowsAsTheyCome) -> None:
        trainer, everything = (
            self.shell.read("trainer.log_path"),
            "".join(map(self.shell.read, LOGS)),
        )
        moments = [moment for moment, _ in rows.rows]
        gaps = [after - before for before, after in pairwise(moments)]
        plan = re.search(r"Memory plan: .*", trainer)
        self.found |= {
            "steps": len(rows.rows),
            "restarts": self._restarts(),
            "seconds_per_step": round(statistics.median(gaps), 2) if gaps else None,
            "seconds_of_steps": [round(gap, 2) for gap in gaps],
            "sequences_per_step": rows.rows[-1][1].get("sequences") if rows.rows else None,
            "seconds_by_phase": self._phases(rows),
            "memory": self.peaks.found(self.trainer_gpus, self.vllm_gpus),
            "plan": plan[0] if plan else None,
            "missing_lines": [line for line in self.guide.lines if line not in everything],
        }

        if self.guide.restarts:
            self.found |= legacy_figures(
                trainer, rows, self.shell.folder / "trained_model_checkpoints"
            )

    @staticmethod
    def _phases(rows: RowsAsTheyCome) -> dict[str, float]:
        names = (
            [name for name in rows.rows[-1][1] if name.startswith("seconds_")] if rows.rows else []
        )
        return {
            n.removeprefix("seconds_"): round(statistics.median(row[n] or 0.0 for row in rows), 3)
            for n in names
        }

    def _clean_up(self) -> dict[str, Any]:
        """Kill everything as the guide does.

        Keeps the logs, and their ends in the results if something failed.
        """
        try:
            found: dict[str, Any] = {"seconds_until_nothing_was_left": round(self.shell.kill(), 2)}
            found |= wait_until_free(GPU_SECONDS)
        except BenchError as error:
            self.results.failures.append(str(error))
            found = {"failed": str(error), "gpus_gib": gpu_memory()}
        if self.results.failures:
            self.results.put(
                "logs",
                value={name: tail(self.shell.folder / name, 60).splitlines() for name in LOGS},
            )
            self.results.put("so_far", value=self.found)
        for name in LOGS:
            (self.args.output / name).write_text(self.shell.read(name)[-500_000:], encoding="utf-8")
        return found

    def _wait(self, log: str, text: str, program: str) -> float:
        return self.shell.wait_for(log, text, max(1.0, self._left()), program, self._idle)

    def _left(self) -> float:
        return float(self.args.seconds) - (time.monotonic() - self.began)

    def _since_start(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def _idle(self) -> None:
        self.peaks.sample(self.shell.pids())
        if time.monotonic() >= self.next_progress:
            self.next_progress = time.monotonic() + PROGRESS_SECONDS
            last = {
                name: tail(self.shell.folder / name, 1)[:150]
                for name in ("vllm.log", "trainer.log_path")
            }
            self._say(" | ".join(f"{name}: {line}" for name, line in last.items() if line))

    def _say(self, text: str) -> None:
        print(f"{self._since_start():6.1f} s  {text}", flush=True)


def report(data: dict[str, Any]) -> str:
    """A table of what was measured."""
    found = data.get("run") or {}
    if "steps" not in found:
        return f"no steps: {found.get('failed', 'nothing was typed')}"
    memory = found["memory"]
    heads = [
        "",
        "steps",
        "first step s",
        "s/step",
        "trainer GPU GiB",
        "vLLM GPU GiB",
        "host GiB",
        "clean-up s",
    ]
    row = [
        data["settings"]["part"],
        found["steps"],
        found["seconds_to_first_step"],
        found["seconds_per_step"],
    ]
    row += [memory["trainer_gpu_gib"], memory["vllm_gpu_gib"], memory["host_gib"]]
    row += [data.get("clean_up", {}).get("seconds_until_nothing_was_left")]
    more = [legacy_table(found)] if "starts" in found else []
    if healed := found.get("killed_server"):
        more.append(
            "vLLM killed: answers after {seconds_to_vllm} s, has weights {seconds_to_weights} s later; a step with "
            "its answers {seconds_to_step} s after the kill".format_map(healed)
        )
    return "\n".join([table(heads, [row]), str(found["plan"]), *more])


OPTIONS: Options = {
    "part": {"choices": PARTS},
    "--output": {
        "type": Path,
        "default": os.environ.get("OUT"),
        "required": "OUT" not in os.environ,
        "help": "folder of the results and the logs",
    },
    "--checkpoint": {
        "type": Path,
        "help": "folder for the random weights, used again if it has some",
    },
    "--shape": {"choices": SHAPES, "help": "another shape than the guide's"},
    "--name": {"help": "of the results file (default: guide_PART)"},
    "--server-gpus": {
        "type": int,
        "default": 0,
        "help": "GPUs of vLLM where the trainer has all others (multi-gpu; default: at most two)",
    },
    "--kill-server": {
        "action": "store_true",
        "help": "kill vLLM after the steps, type its command again, and wait for two more steps",
    },
    "--steps": {
        "type": int,
        "default": 0,
        "help": "steps to wait for (default: 10; 20 for legacy)",
    },
    "--group": {"type": int, "default": 8, "help": "answers to a question"},
    "--max-tokens": {"type": int, "default": 128, "help": "most tokens of an answer"},
    "--vllm-flags": {
        "default": "",
        "help": "more flags for vLLM, such as --gpu-memory-utilization=0.5",
    },
    "--trainer-flags": {"default": "", "help": "more flags for the trainer"},
    "--seconds": {
        "type": float,
        "default": 480.0,
        "help": "time limit of everything but the clean-up",
    },
    "--dry-run": {"action": "store_true", "help": "starter model on the CPU, at free ports"},
}


def main(arguments: list[str] | None = None) -> int:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    if args.dry_run:
        args.shape, args.max_tokens, args.steps = "tiny", 16, args.steps or 3
    args.output = Path(args.output)
    return run_and_report(args, GuideCommands, report)


if __name__ == "__main__":
    raise SystemExit(main())
