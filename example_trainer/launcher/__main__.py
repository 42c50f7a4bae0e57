"""`scripts/start.sh` and its like (COMMANDS): run by path, from any folder, the command as first
argument.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

if not __package__:
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # run by path: import from the repository

from atroposlib.one_line_parser import OneLineParser
from example_trainer.launcher import logs, status
from example_trainer.launcher.command_line import ROOT, positive_int, run_command
from example_trainer.launcher.control import Starter, stop_parts
from example_trainer.launcher.options import add_run_option, parse
from example_trainer.launcher.records import KEYS_FILE, PARTS, SERVERS, SERVICE, Records, chosen
from example_trainer.launcher.rolling import restart_servers
from example_trainer.launcher.stack import Stack


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def report(text: str) -> None:
    """One line about work that goes on without a reader: the reader of the pipe has ended, or
    the terminal is closed.
    """
    try:
        say(text)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def interrupted(number: int, _: object) -> None:
    """Signal handler: unwinds, so that a start that is interrupted stops what it started."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def parser(name: str, description: str) -> OneLineParser:
    """A command line with --run and parts."""
    made = OneLineParser(prog=f"scripts/{name}.sh", description=description, allow_abbrev=False)
    made.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"some of {', '.join(PARTS)}, vllm-2, …, {SERVERS} (default: all)",
    )
    add_run_option(made)
    return made


def run_on_ray(arguments: list[str]) -> NoReturn:
    """Replace this process by the driver on Ray, in the foreground.

    Every other word is for the driver (docs/async.md).
    """
    words = [word for word in arguments if word != "--ray"]
    if not any(word.startswith("--config") for word in words):
        words = [
            "--config",
            str(ROOT / "example_trainer" / "configs" / "arithmetic_async_cpu.yaml"),
            *words,
        ]
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "example_trainer.async_grpo", *words]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": search})


def start(arguments: list[str]) -> int:
    """Start the stack in the background."""
    if "--ray" in arguments:
        run_on_ray(arguments)
    options = parse(arguments)
    stack = Stack(options)
    Starter(stack, report).run()
    report(
        f"running in {options.run}: scripts/status.sh, scripts/logs.sh and scripts/stop.sh look at it, follow it and end it"
    )
    report(
        f"see the run at {stack.service_url}/ui; it asks for {SERVICE} of {options.run / KEYS_FILE}"
    )
    return 0


def show_status(arguments: list[str]) -> int:
    """Print the table; 0 if everything is up, else 1."""
    made = OneLineParser(
        prog="scripts/status.sh",
        description="Show whether the stack is up and moves.",
        allow_abbrev=False,
    )
    add_run_option(made)
    made.add_argument("--json", action="store_true", help="for scripts")
    given = made.parse_args(arguments)
    run = given.run.expanduser().absolute()
    state = status.collect(run)
    if given.json:
        say(json.dumps(state.to_json(), indent=1))
    else:
        say(status.table(state, run, time.time()))
    return int(not state.good)


def stop(arguments: list[str]) -> int:
    """Stop the stack: environment, trainer, vLLM, service."""
    given = parser(
        "stop",
        "Stop the stack, or some parts of it: environment, trainer, vLLM, service, in this order.",
    ).parse_args(arguments)
    run = given.run.expanduser().absolute()
    return int(not stop_parts(run, chosen(given.parts, Records(run).parts()), report))


def restart(arguments: list[str]) -> int:
    """Restart the vLLM servers one by one."""
    made = parser(
        "restart",
        "Restart the vLLM servers one by one, or the named ones: each only when the one before it "
        "serves the trainer's "
        "present weights again. Training goes on with the others. A server that does not come back ends it.",
    )
    made.add_argument(
        "--wait",
        type=positive_int,
        help="seconds that each may take to be back (default: as for start.sh)",
    )
    given = made.parse_args(arguments)
    restart_servers(given.run.expanduser().absolute(), given.parts, given.wait, report)
    return 0


def follow(arguments: list[str]) -> int:
    """Follow the logs until Ctrl-C."""
    made = parser("logs", "Follow the logs of the stack; Ctrl-C ends that, and nothing else.")
    made.add_argument(
        "--lines",
        type=positive_int,
        default=10,
        help="old lines of each log (default: %(default)s)",
    )
    made.add_argument("--no-follow", action="store_true", help="print those and end")
    given = made.parse_args(arguments)
    run = given.run.expanduser().absolute()
    if not run.is_dir():
        say(f"nothing was started in {run}: pass --run with the folder of a run")
        return 1
    logs.show(
        run, chosen(given.parts, logs.parts_with_logs(run)), given.lines, not given.no_follow, say
    )
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "start": start,
    "status": show_status,
    "stop": stop,
    "restart": restart,
    "logs": follow,
}


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    name, *rest = arguments or ("",)
    if name not in COMMANDS:
        print(f"launcher: {name!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, interrupted)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, interrupted)
    try:
        return run_command(name, lambda: COMMANDS[name](rest))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
