"""The main job: start the stack, evaluate, train, evaluate again, report, stop."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from example_trainer.child_processes.files import cannot_write, private_files, write_whole
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import ManagedProcess, Supervisor
from example_trainer.child_processes.run_keys import SERVICE, VLLM
from example_trainer.launcher.command_line import ROOT, LauncherError
from example_trainer.launcher.quickstart.display import (
    SHARE,
    TOOL_USE,
    MetricsFile,
    TrainingDisplay,
    sampled,
)
from example_trainer.launcher.quickstart.options import Options
from example_trainer.launcher.quickstart.plan import Plan, Ports
from example_trainer.launcher.quickstart.report import (
    Evaluation,
    Phases,
    changed_answer,
    print_closing_table,
    print_example,
    span,
    subtitle,
    summarise,
    write_summary,
)
from example_trainer.launcher.roles import Command

SERVICE_SECONDS = 60.0
VLLM_SECONDS = 600.0
"""The first start after an installation reads gigabytes of libraries from the disk; a large model
loads for minutes."""
EVALUATION_SECONDS = 900.0
STALL_SECONDS = 300.0
"""Longest time without a training step, the trainer's own start included."""
FINISH_SECONDS = 180.0
"""Limit for the trainer to write the checkpoint after its last step."""

LOCK = ".quickstart-lock"
MADE_HERE = (
    "logs",
    "trainer",
    "environment",
    "checkpoints",
    "observed",
    "summary.json",
    "reward.png",
    "commands.sh",
)
"""Files that a run puts into its output folder. The next run in the same folder removes them
first."""


class Interrupted(BaseException):
    """A person or a program asked the run to end: Ctrl-C, or a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_interrupted(number: int, _: object) -> None:
    """Signal handler: unwinds the run, which stops every process on the way."""
    raise Interrupted(number)


def open_output(folder: Path) -> IO[str]:
    """Make the output folder, claim it for this run, and clear what an earlier run left there.

    Returns:
        The open lock file: the folder is claimed for as long as it stays open.

    Raises:
        LauncherError: the folder cannot be written, is in use, or holds files of others.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(
            entry.name for entry in folder.iterdir() if entry.name not in (*MADE_HERE, LOCK)
        )
        if foreign and not (folder / LOCK).exists():
            raise LauncherError(
                f"--output {folder} holds other files ({foreign[0]}): give an empty or a new folder"
            )
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise LauncherError(
            f"--output {folder} cannot be written: {error.strerror}: give another folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise LauncherError(
            f"--output {folder} is in use by another quick start (process {owner}): give another folder, or wait"
        ) from None
    for name in MADE_HERE:  # which makes room, too
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    try:
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    except OSError as error:
        lock.close()
        raise LauncherError(
            f"{cannot_write(folder / LOCK, error)}; make room there, or give another --output"
        ) from error
    return lock


class Quickstart:
    """One run.

    Args:
        options: what was asked for.
        console: prints the run's progress.
        make_plan: which commands to run; the tests put small ones in their place.
    """

    def __init__(
        self, options: Options, console: Console, make_plan: Callable[[Options, Ports], Plan] = Plan
    ) -> None:
        self.options, self.console, self.make_plan = options, console, make_plan
        self.phases = Phases()
        self.metrics = MetricsFile(Path())
        self.environment_metrics = MetricsFile(Path())
        self.supervisor = Supervisor()

    def say(self, text: str) -> None:
        """One line of progress."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def start(self, command: Command) -> ManagedProcess:
        """Start one command from the repository's root, its log in the run's log folder."""
        log = self.plan.logs / command.log
        return self.supervisor.start(
            command.name,
            command.arguments,
            log,
            command.variables,
            ROOT,
            command.grace,
            command.may_finish,
        )

    def run(self) -> dict[str, Any]:
        """Do it all; returns the summary.

        Raises:
            LauncherError: something went wrong; every process has been stopped.
            Interrupted: Ctrl-C, SIGTERM or SIGHUP; every process has been stopped.
        """
        with ExitStack() as stack:
            stack.enter_context(
                private_files(wanted=any(os.environ.get(name) for name in (SERVICE, VLLM)))
            )
            stack.enter_context(open_output(self.options.output))
            ports = stack.enter_context(PortReservations())
            self.plan = self.make_plan(
                self.options,
                Ports(service=ports.pick(), vllm=ports.pick(), rendezvous=ports.pick()),
            )
            write_whole(self.options.output / "commands.sh", self.plan.script().encode())
            self.metrics = MetricsFile(self.plan.trainer_folder / "metrics.jsonl")
            self.environment_metrics = MetricsFile(self.plan.environment_metrics)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                stack.callback(signal.signal, number, signal.signal(number, raise_interrupted))
            try:
                summary = self.run_stack()
            finally:
                # From here on the end is near anyway: another Ctrl-C must not leave anything
                # behind.
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                with self.phases.measure("stop"):
                    self.supervisor.stop_all()
            return summary

    def run_stack(self) -> dict[str, Any]:
        """Start, evaluate, train, evaluate, report."""
        self.say(
            f"{self.options.steps} steps on the {self.options.device.upper()}, weights to vLLM by {self.options.bridge}; "
            f"logs in {self.plan.logs}"
        )
        model = fingerprint(self.options.model)
        with self.phases.measure("start"):
            self.start_servers()
        before = self.evaluate("before")
        with self.phases.measure("train"):
            self.train()
        if fingerprint(self.options.model) != model:
            # The evaluation would read another tokenizer than the served model's.
            raise LauncherError(
                f"the files in {self.options.model} changed while the run used them: start it again"
            )
        after = self.evaluate("after")
        if after.weight_version != self.options.steps:
            # Weights that never arrived would look like a model that learned nothing.
            raise LauncherError(
                f"the evaluation after training was answered by weight version {after.weight_version}, and the trainer is at "
                f"{self.options.steps}: see {self.plan.logs / 'vllm.log'} and {self.plan.logs / 'trainer.log'}"
            )
        summary = summarise(self.options, self.metrics, before, after, self.phases)
        self.report(summary)
        if self.options.keep_running:
            self.keep_running()
        return summary

    def start_servers(self) -> None:
        """Rollout service and vLLM, side by side; returns when both answer."""
        service, vllm = self.start(self.plan.service()), self.start(self.plan.vllm())
        wait = self.supervisor.wait_for_http
        seconds = wait(service, f"{self.plan.service_url}/", SERVICE_SECONDS)
        self.say(f"rollout service  ready after {span(seconds)}  {self.plan.service_url}")
        self.say(f"                 see the run, down to the token: {self.plan.page_url}")
        self.say("vLLM             loading the model")
        seconds += wait(vllm, f"{self.plan.vllm_url}/health", VLLM_SECONDS)
        # Healthy is not enough: it must have generated a token.
        seconds += wait(vllm, f"{self.plan.vllm_url}/health_generate", VLLM_SECONDS)
        self.say(f"vLLM             ready after {span(seconds)}  {self.plan.vllm_url}")

    def evaluate(self, which: str) -> Evaluation:
        """Let the environment evaluate the model as vLLM serves it now."""
        result = self.plan.logs / f"evaluation-{which}.json"
        start = time.monotonic()
        with self.phases.measure(f"evaluate {which}"):
            self.supervisor.finish(
                self.start(self.plan.evaluation(which, result)), EVALUATION_SECONDS
            )
        evaluation = read_evaluation(result)
        length = ""
        if evaluation.response_length is not None:
            length = f", {evaluation.response_length:.1f} tokens per answer"
        if evaluation.tool_use is not None:
            length += f", the tool used for {evaluation.tool_use:.1%}"
        self.say(
            f"{which} training  {evaluation.accuracy:.1%} of {evaluation.problems} held-out problems solved{length} "
            f"({span(time.monotonic() - start)})"
        )
        return evaluation

    def train(self) -> None:
        """Start environment and trainer, show every step, and return when the trainer has ended
        well.
        """
        environment = self.start(self.plan.environment())
        trainer = self.start(self.plan.trainer())
        last_news = time.monotonic()
        with TrainingDisplay(
            self.console, self.options.steps, tools=self.options.environment == "calculator"
        ) as display:

            def show() -> None:
                nonlocal last_news
                new = self.metrics.read_new()
                if new:
                    last_news = time.monotonic()
                    self.environment_metrics.read_new()
                    known = [line for line in self.environment_metrics.steps if SHARE in line]
                    last = known[-1] if known else {}
                    display.add(
                        [
                            step | {"solved": last.get(SHARE), "used": last.get(TOOL_USE)}
                            for step in new
                        ]
                    )
                limit = STALL_SECONDS
                if len(self.metrics.steps) >= self.options.steps:
                    limit = FINISH_SECONDS
                if time.monotonic() - last_news > limit:
                    raise self.stalled(limit, [trainer, environment])

            self.supervisor.finish(trainer, float("inf"), show)
            show()
        self.supervisor.stop(environment)
        done = len(self.metrics.steps)
        if done != self.options.steps:
            raise LauncherError(
                f"the trainer ended after {done} of {self.options.steps} steps; log: {trainer.log_path}"
            )

    def stalled(self, seconds: float, processes: list[ManagedProcess]) -> LauncherError:
        """The error for a training that no longer moves, with the last log lines of the processes
        that it may be waiting for.
        """
        lines = [
            f"no news from the trainer for {seconds:.0f} s after step {len(self.metrics.steps)}; logs in {self.plan.logs}"
        ]
        for process in processes:
            lines += [f"  {process.name}:", *(f"    {line}" for line in process.tail(4))]
        return LauncherError("\n".join(lines))

    def report(self, summary: dict[str, Any]) -> None:
        """Write summary and plot, print the closing table."""
        from example_trainer.launcher.quickstart.plot import (
            draw,
        )  # slow to import, and only needed now

        output = self.options.output
        write_summary(output / "summary.json", summary)
        plot = output / "reward.png"
        problems = summary["eval_problems"]
        self.environment_metrics.read_new()
        curves = sampled(self.environment_metrics.steps) or self.metrics.steps
        draw(
            plot, curves, summary["eval_before"], summary["eval_after"], problems, subtitle(summary)
        )
        paths: dict[str, Path | str] = {
            "reward plot": plot,
            "summary": output / "summary.json",
            "TensorBoard": self.plan.trainer_folder / "tensorboard",
            "process logs": self.plan.logs,
            "commands": output / "commands.sh",
            "rollouts to read": f"view-run {output}",
        }
        example = changed_answer(self.plan.logs)
        if example:
            print_example(self.console, *example)
        print_closing_table(self.console, summary, paths)

    def keep_running(self) -> None:
        """Leave service and vLLM up until an interrupt."""
        self.say(
            f"still running: vLLM {self.plan.vllm_url}, rollout service {self.plan.service_url} (the run's page: "
            f"{self.plan.page_url}); Ctrl-C stops them"
        )
        try:
            while True:
                self.supervisor.check()
                time.sleep(0.5)
        except Interrupted:
            return


def fingerprint(model: str) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file of a checkpoint folder; nothing for a model's name."""
    if not Path(model).is_dir():
        return {}
    files = [path for path in sorted(Path(model).iterdir()) if path.is_file()]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def read_evaluation(path: Path) -> Evaluation:
    """The result file of an evaluation.

    Raises:
        LauncherError: the file is missing or lacks what is needed.
    """
    try:
        result = json.loads(path.read_text())
        return Evaluation(
            accuracy=result["correct"] / result["num_problems"],
            problems=result["num_problems"],
            response_length=result["mean_response_tokens"],
            weight_version=result["weight_version"],
            tool_use=result.get("tool_use"),
        )
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise LauncherError(
            f"the evaluation's result {path} cannot be used: {type(error).__name__}: {error}"
        ) from error
