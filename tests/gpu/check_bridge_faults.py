"""Faults in an update of the weights, and their outcome. Every fault is really done, to real
processes.

    # 2 GPUs: vLLM on 0, trainers on 1 (single copy: on 0)
    python tests/gpu/check_bridge_faults.py --output DIR
    # 1 GPU: all on it, the weights go by CUDA IPC
    python tests/gpu/check_bridge_faults.py --output DIR --beside
    # 3 GPUs or more: one tensor-parallel rank that is late
    python tests/gpu/check_bridge_faults.py --output DIR --tp 2 --only late
    # 2 GPUs: the same, a rank of the trainer on each
    python tests/gpu/check_bridge_faults.py --output DIR --tp 2 --only late --crossed
    python tests/gpu/check_bridge_faults.py --output DIR --tiny --device cpu  # without a GPU
    # a kind of fault, and rows by name
    python tests/gpu/check_bridge_faults.py --output DIR --only worker "trainer stopped direct"

After each: did the other side end the update within its deadline? Does its error name side, rank,
phase and version? Does the server serve the old version (by checksum and logprobs) or refuse to?
Does the next attempt work while the other side lives on? Prints a table, writes bridge_faults.json,
and ends with status 1 if any row is not good.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import write_model_folder
from bench.gpu.summary import table
from bench.measured import Options, command_line
from tests.gpu.bridge_fault_stage import Outcome, Stage, note_absence, stopped_for

MODES = ("direct", "overlapped", "single_copy")
MARGIN = 5.0
"""Seconds on top of the bridge's own deadline, for noticing and for reporting."""


def points(mode: str) -> tuple[str, ...]:
    """Where an update of this mode can be stopped."""
    return (
        ("begin", "write", "commit") if mode == "single_copy" else ("begin", "transfer", "commit")
    )


class Faults:
    """One method for each kind of fault; each returns an Outcome."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.limit = stage.timeout + MARGIN

    # -- faults of the trainer

    def trainer_killed(self, mode: str, point: str) -> Outcome:
        """kill -9 of the trainer; another one takes over."""
        stage = self.stage
        trainer = stage.joined(mode)
        before, mark = stage.snapshot(), stage.log_mark()
        stage.hold(trainer, point)
        trainer.signal(signal.SIGKILL)
        outcome = Outcome(f"trainer killed, {mode}, in {point}", self.limit)
        outcome.seconds = stage.settled(self.limit)
        return self._told_by_server(
            outcome, before, mark, partial(stage.attempt, stage.trainer(_kind(mode)), mode, True)
        )

    def trainer_stopped(self, mode: str, point: str) -> Outcome:
        """SIGSTOP of the trainer for longer than the deadline; it goes on, gets an error, and tries
        again.
        """
        stage = self.stage
        trainer = stage.joined(mode)
        before, mark, heard = stage.snapshot(), stage.log_mark(), trainer.log_path.stat().st_size
        stage.hold(trainer, point)
        outcome = Outcome(
            f"trainer stopped for longer than the deadline, {mode}, in {point}", self.limit
        )
        outcome.seconds = stopped_for(trainer.signal, 0, lambda: stage.settled(self.limit))
        verdict = stage.verdict(before)
        stage.release(trainer)
        message = trainer.message(self.limit + stage.timeout + 15, "the stopped update")
        told = re.search(
            rb"joining it again to send|doing the update to version \d+ again",
            trainer.log_path.read_bytes()[heard:],
        )
        if "error" not in message and not told:
            outcome.problems.append(f"the trainer was not told: {message}")
        if mode == "single_copy" and verdict != "unhealthy":
            outcome.problems.append(f"the trainer could still write, and the server was {verdict}")
        self._told_by_server(
            outcome, before, mark, partial(stage.attempt, trainer, mode, True), verdict
        )
        outcome.error += f"\ntrainer: {message.get('error', 'did the update anew')}"
        return outcome

    def not_finite(self, mode: str) -> Outcome:
        """A NaN among the weights: refused, and the next update is welcome."""
        stage = self.stage
        trainer = stage.joined(mode)
        before = stage.snapshot()
        version = before["version"] + 1
        started = time.monotonic()
        trainer.send("sync_nan")
        message = trainer.message(self.limit, "an update with NaN")
        outcome = Outcome(
            f"NaN in the weights, {mode}",
            self.limit,
            time.monotonic() - started,
            message.get("error", ""),
        )
        outcome.must_name = {
            "value": "NaN",
            "parameter": r"model\.\S+",
            "version": rf"version {version}\b",
        }
        outcome.server = stage.verdict(before)
        outcome.next_attempt = stage.attempt(trainer, mode, connect=False)
        outcome.judge(("old version",) if mode != "single_copy" else ("unhealthy",))
        return outcome

    def layout_differs(self, what: str) -> Outcome:
        """One parameter of another dtype, shape or name: refused by both sides before anything
        moves.
        """
        stage = self.stage
        trainer = stage.joined("direct")
        before = stage.snapshot()
        started = time.monotonic()
        told = trainer.ask("connect_wrong", timeout=60, what=what)
        seconds = time.monotonic() - started
        outcome = Outcome(f"layouts differ by one {what}", self.limit, seconds)
        outcome.error = f"trainer: {told['trainer']}\nserver: {told['server']}"
        name = re.escape(told["parameter"])
        outcome.must_name = {
            "parameter, by the trainer": rf"trainer: .*{name}",
            "parameter, by the server": rf"server: .*{name}",
            "rank": r"rank 0",
            "side": "the trainer.*vLLM",
        }
        outcome.server = stage.verdict(before)
        outcome.next_attempt = stage.attempt(trainer, "direct", connect=True)
        outcome.judge(("old version",))
        return outcome

    def port_taken(self) -> Outcome:
        """MASTER_PORT belongs to another program."""
        stage = self.stage
        trainer = stage.joined("direct")
        before = stage.snapshot()
        with socket.socket() as other:
            other.bind(("", 0))
            other.listen()
            port = other.getsockname()[1]
            started = time.monotonic()
            told = trainer.ask("connect_at_port", timeout=60, master_port=port)["error"]
            seconds = time.monotonic() - started
        outcome = Outcome("MASTER_PORT is taken", self.limit, seconds, told)
        outcome.must_name = {"port": str(port), "variable": "MASTER_PORT"}
        outcome.server = stage.verdict(before)
        outcome.next_attempt = stage.attempt(trainer, "direct", connect=True)
        outcome.judge(("old version",))
        return outcome

    def second_trainer_during_update(self) -> Outcome:
        """A second trainer while the first one's update is under way: refused after its deadline,
        and the first is not disturbed.
        """
        stage = self.stage
        first, second = stage.joined("direct"), stage.trainer()
        before = stage.snapshot()
        stage.hold(first, "transfer")
        started = time.monotonic()
        try:
            options = {"kind": "broadcast", "transfer": "direct"}
            second.ask("connect_impatiently", timeout=self.limit, **options)
            told = ""
        except BenchError as error:
            told = str(error)
        outcome = Outcome(
            "second trainer joins during an update", self.limit, time.monotonic() - started, told
        )
        version = rf"in an update to version {before['version'] + 1}\b"
        outcome.must_name = {"other trainer": r"trainer \S+:\d+ \(epoch \d+\)", "version": version}
        stage.release(first)
        message = first.message(self.limit, "the first trainer's update")
        if "error" in message:
            outcome.problems.append(f"the first trainer was disturbed: {message['error']}")
        outcome.server = stage.verdict(before)
        outcome.next_attempt = stage.attempt(first, "direct", connect=False)
        outcome.judge(("new version",))
        return outcome

    def second_trainer_between_updates(self) -> Outcome:
        """A second trainer takes over between two updates, and the first gets an error."""
        stage = self.stage
        first, second = stage.joined("direct"), stage.trainer()
        before = stage.snapshot()
        stage.connect(second, "direct")
        started = time.monotonic()
        first.send("sync", count=1)
        message = first.message(self.limit, "the first trainer's update")
        seconds, error = time.monotonic() - started, message.get("error", "")
        outcome = Outcome("second trainer takes over between updates", self.limit, seconds, error)
        outcome.must_name = {
            "other trainer": r"trainer \S+:\d+ \(epoch \d+\) has taken it over",
            "remedy": "start the trainer again",
        }
        outcome.next_attempt = stage.attempt(second, "direct", connect=False)
        same = stage.snapshot()["checksums"] == before["checksums"]
        outcome.server = "the first's weights" if same else "the second's weights"
        outcome.judge(("the second's weights",))
        return outcome

    # -- faults of the server

    def worker_killed(self, mode: str, point: str) -> Outcome:
        """kill -9 of vLLM's engine; the trainer lives, waits for another server in its place, and
        goes on there.
        """
        stage = self.stage
        trainer = stage.joined(mode)
        version = stage.snapshot()["version"] + 1
        stage.hold(trainer, point)
        mark = trainer.log_path.stat().st_size
        stage.server.worker_process(0).kill()
        stage.release(trainer)
        outcome = Outcome(f"vLLM worker killed, {mode}, in {point}", self.limit)
        note_absence(outcome, trainer, mark)
        outcome.must_name = {
            "side": "vLLM|server",
            "version": rf"version {version}\b",
            "phase": "begin|transfer|commit",
        }
        outcome.server = (
            "gone" if stage.server.health() != 200 else "healthy though its engine is dead"
        )
        outcome.next_attempt = self._restart_and_go_on(trainer)
        outcome.judge(("gone",))
        return outcome

    def server_restarted(self, mode: str) -> Outcome:
        """The whole server killed and started again between two updates, under a trainer that
        lives.
        """
        stage = self.stage
        trainer = stage.joined(mode)
        mark = trainer.log_path.stat().st_size
        stage.server.kill()
        outcome = Outcome(f"server killed and started again between updates, {mode}", self.limit)
        trainer.send("sync", count=1)
        note_absence(outcome, trainer, mark)
        outcome.must_name = {"side": "vLLM|server"}
        outcome.server = "gone" if stage.server.health() != 200 else "answers though it was killed"
        outcome.next_attempt = self._restart_and_go_on(trainer)
        outcome.judge(("gone",))
        return outcome

    def worker_stopped(self, mode: str, tp_rank: int) -> Outcome:
        """SIGSTOP of one of vLLM's ranks during the transfer: its server is left out until it moves
        again.
        """
        stage = self.stage
        trainer = stage.joined(mode)
        before, mark, heard = stage.snapshot(), stage.log_mark(), trainer.log_path.stat().st_size
        version = before["version"] + 1
        who = "vLLM worker" if stage.tp == 1 else f"vLLM rank {tp_rank}"
        # Noticed at the latest when the check of what it received has taken as long as an update
        # may.
        outcome = Outcome(
            f"{who} stopped for longer than the deadline, {mode}, in transfer",
            2 * stage.timeout + 2 * MARGIN,
        )
        stage.hold(trainer, "transfer")
        pid = stage.server.worker_process(tp_rank).pid

        def meanwhile() -> None:
            stage.release(trainer)
            note_absence(outcome, trainer, heard)

        stopped_for(lambda number: os.kill(pid, number), stage.timeout + 1, meanwhile)
        message = trainer.message(
            self.limit + stage.timeout + 30, "the update of a server that moves again"
        )
        outcome.error += f"\nserver: {stage.said(mark)}"
        outcome.must_name = {
            "server": rf":{stage.server.port}\b",
            "version": rf"version {version}\b",
            "phase": "transfer|commit|sending|receiv",
            "end of the wait": r"until \d\d:\d\d:\d\d",
        }
        if "error" in message:
            outcome.problems.append(
                f"the trainer did not bring the server up again: {message['error']}"
            )
        stage.settled(2 * self.limit)
        outcome.server = stage.verdict(before)
        outcome.next_attempt = stage.attempt(trainer, mode, connect=False)
        outcome.judge(("new version",))
        return outcome

    # -- parts of the above

    def _told_by_server(
        self,
        outcome: Outcome,
        before: dict[str, Any],
        mark: int,
        attempt: Callable[[], str],
        verdict: str = "",
    ) -> Outcome:
        """The end of a row in which the server reports the fault."""
        outcome.server = verdict or self.stage.verdict(before)
        outcome.error = f"server: {self.stage.said(mark)}"
        outcome.must_name = {
            "side": "trainer",
            "phase": "begin|transfer|[Uu]pdate to version",
            "version": rf"version {before['version'] + 1}\b",
        }
        outcome.next_attempt = attempt()
        outcome.judge(("old version", "unhealthy"))
        return outcome

    def _restart_and_go_on(self, trainer: Worker) -> str:
        """Start another server in the killed one's place; the trainer's update must arrive there by
        itself.
        """
        stage = self.stage
        stage.server.kill()
        stage.restart_server()
        message = trainer.message(240, "the update after the server's restart")
        stage.wait()
        if "error" in message:
            return f"the trainer did not find the new server: {message['error']}"
        try:
            found = trainer.ask("check", timeout=60)
        except BenchError as error:
            return str(error).splitlines()[0]
        if not (found["checksums_equal"] and found["new_not_old"]):
            return f"not the weights that were sent: {found}"
        stage.keep(trainer)
        return "ok"


def _kind(mode: str) -> str:
    return "single_copy" if mode == "single_copy" else "broadcast"


def rows(args: argparse.Namespace, faults: Faults) -> list[tuple[str, str, Callable[[], Outcome]]]:
    """Return (group, name, function), rows last that cost a server's start.

    Raises BenchError if nothing has a name in --only.
    """
    plan: list[tuple[str, str, Callable[[], Outcome]]] = []

    def add(group: str, method: Callable[..., Outcome], *arguments: Any) -> None:
        name = " ".join([method.__name__.replace("_", " "), *map(str, arguments)])
        plan.append((group, name, partial(method, *arguments)))

    broadcast = [mode for mode in args.modes if mode != "single_copy"]
    if args.tp > 1:
        for mode in broadcast:
            add("late", faults.worker_stopped, mode, args.tp - 1)
    for what in ("dtype", "shape", "name"):
        add("layout", faults.layout_differs, what)
    add("port", faults.port_taken)
    add("second", faults.second_trainer_during_update)
    add("second", faults.second_trainer_between_updates)
    modes = args.modes if args.tp == 1 else broadcast
    for mode in modes:
        add("nan", faults.not_finite, mode)
    for mode in modes:
        for point in points(mode):
            add("trainer", faults.trainer_killed, mode, point)
    for mode in modes:
        for point in points(mode)[1:-1]:
            add("stop", faults.trainer_stopped, mode, point)
    for mode in broadcast:
        if args.tp == 1:
            add("stop", faults.worker_stopped, mode, 0)
    # Each costs a start of vLLM, so that only the first mode is tried at every point.
    for mode in modes:
        for point in points(mode) if mode == modes[0] else points(mode)[1:2]:
            add("worker", faults.worker_killed, mode, point)
    for mode in [*broadcast[-1:], *(m for m in modes if m == "single_copy")]:
        add("restart", faults.server_restarted, mode)
    chosen = []
    for wanted in args.only or [""]:
        found = [row for row in plan if row[0] == wanted] or [
            row for row in plan if wanted in row[1]
        ]
        if not found:
            raise BenchError(
                f"--only {wanted}: none of these rows: {'; '.join(f'{kind}: {name}' for kind, name, _ in plan)}"
            )
        chosen += found
    return [row for row in plan if row in chosen]


class Benchmark(Sitting):
    """One fault after the other, on one stage."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        model = write_model_folder(work / "model", args.shape)
        places = {"crossed": args.crossed, "beside": args.beside}
        self.stage = Stage(
            args.shape, model, args.output, args.device, args.tp, args.bridge_timeout, **places
        )
        stack.callback(self.stage.close)

    def run(self) -> None:
        """Every row that was asked for."""
        args, stage, told = self.args, self.stage, list[dict[str, Any]]()
        self.describe(
            shape=args.shape,
            tensor_parallel_size=args.tp,
            bridge_timeout_s=args.bridge_timeout,
            beside=args.beside,
        )
        stage.wait()
        for _, name, run in rows(args, Faults(stage)):
            started = time.monotonic()
            try:
                outcome = run()
            except (BenchError, OSError, ValueError, KeyError) as error:
                outcome = Outcome(name, problems=[f"could not be judged: {error}"])
                if not stage.usable():
                    stage.server.kill()
                    stage.restart_server()
                    stage.wait()
            stage.end_row()
            told.append(outcome.to_json())
            self.results.put("faults", value=told)
            self.results.failures += [f"{outcome.fault}: {problem}" for problem in outcome.problems]
            mark = "good" if not outcome.problems else "NOT GOOD: " + "; ".join(outcome.problems)
            print(f"{time.monotonic() - started:6.1f} s  {outcome.fault}: {mark}", flush=True)


def report(data: dict[str, Any]) -> str:
    """Return the table, and the messages of failed rows."""
    found = data.get("faults", [])
    cells = [
        [
            o["fault"],
            f"{o['seconds']:.1f}",
            f"{o['limit']:g}",
            o["server"],
            o["next_attempt"][:40],
            o["good"],
        ]
        for o in found
    ]
    said = [
        f"NOT GOOD  {o['fault']}\n          it said: {o['error'][:600]}"
        for o in found
        if not o["good"]
    ]
    return "\n".join(
        [
            table(
                ["fault", "ended after s", "limit s", "server then", "next attempt", "good"], cells
            ),
            *said,
        ]
    )


OPTIONS: Options = {
    "--tp": {"type": int, "default": 1},
    "--crossed": {
        "action": "store_true",
        "help": "a rank of the trainer for each of vLLM's, on another's GPU",
    },
    "--beside": {
        "action": "store_true",
        "help": "the trainer's copy of the weights is on vLLM's GPU",
    },
    "--modes": {"nargs": "+", "choices": MODES, "default": list(MODES)},
    "--only": {
        "nargs": "+",
        "metavar": "WHAT",
        "help": "kinds of fault, or parts of rows' names; ? lists them",
    },
    "--bridge-timeout": {
        "type": float,
        "default": 8.0,
        "help": "seconds; short, because it is waited for",
    },
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, common_options("bridge_faults", "qwen3-1.7b") | OPTIONS)
    args = shrink_if_tiny(parser.parse_args(arguments))
    if args.crossed and (args.tp < 2 or args.only != ["late"]):
        parser.error("--crossed needs --tp 2 or more and --only late")
    return run_and_report(args, Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
