"""python -m example_trainer.async_grpo --config FILE: one command for a whole run, on this machine
or on a Ray cluster.
"""

from __future__ import annotations

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()

import argparse
import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atroposlib.one_line_parser import OneLineParser
from example_trainer.api_keys import SECRETS
from example_trainer.async_grpo.cluster import RayCluster
from example_trainer.async_grpo.driver import Driver
from example_trainer.async_grpo.roles import Commands
from example_trainer.async_grpo.service import ServiceFleet, Silences
from example_trainer.async_grpo.settings import Settings, read_settings
from example_trainer.child_processes.files import private_files
from example_trainer.child_processes.processes import ProcessError
from example_trainer.child_processes.run_keys import make_keys
from example_trainer.errors import ConfigError
from example_trainer.prerequisites import require_vllm
from example_trainer.process import StopSignal, run

logger = logging.getLogger("example_trainer.async_grpo")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = OneLineParser(
        prog="python -m example_trainer.async_grpo",
        description="Start generators with their environments, reference workers, parameter "
        "servers, the rollout service and the trainer. They run on this machine or on "
        "the Ray cluster in RAY_ADDRESS, and end with the training. The same command "
        "again goes on where a run was.",
        allow_abbrev=False,
    )
    command_line.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="YAML file: docs/async.md lists its sections",
    )
    command_line.add_argument(
        "--folder", type=Path, help="the run's folder, instead of logging.folder"
    )
    command_line.add_argument(
        "--steps", type=int, help="optimizer steps, instead of orchestration.steps"
    )
    return command_line


def settings_of(given: argparse.Namespace) -> Settings:
    """The configuration, with what flags change."""
    settings = read_settings(given.config)
    if given.folder:
        settings = settings.model_copy(
            update={"logging": settings.logging.model_copy(update={"folder": given.folder})}
        )
    if given.steps is not None:
        if given.steps < 1:
            raise ConfigError(f"--steps {given.steps}: give 1 or more")
        orchestration = settings.orchestration.model_copy(update={"steps": given.steps})
        settings = settings.model_copy(update={"orchestration": orchestration})
    return settings


def orchestrate(
    given: argparse.Namespace, stop: StopSignal, commands: type[Commands] = Commands
) -> None:
    """The whole run."""
    settings = settings_of(given)
    if not os.environ.get("RAY_ADDRESS"):
        require_vllm()  # on a cluster the nodes need it, and not this machine
    with contextlib.ExitStack() as stack:
        folder = settings.folder
        stack.enter_context(
            private_files()
        )  # of a Ray that this process starts too, with its token
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".driver-lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"logging.folder {folder}: another driver is at work there; stop it, or give another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"logging.folder {folder} cannot be written: {error.strerror}; give another one"
            ) from error
        try:
            keys = make_keys(folder, os.environ, running=False)
        except ProcessError as error:
            raise ConfigError(str(error)) from error
        cluster = RayCluster(folder.name, settings.logging.dashboard)
        stop.install()  # Ray has put a handler of its own in place
        logger.info("[Async] logs of all roles: %s", folder / "logs")
        fleet = ServiceFleet(keys[SECRETS["atropos_api_key"]])
        silences = Silences(keys[SECRETS["atropos_api_key"]])
        driver = Driver(
            settings, cluster, keys, fleet, silences, stop.check, commands(settings, keys)
        )
        stop.defer()
        driver.run()


def main(arguments: Sequence[str], commands: type[Commands] = Commands) -> int:
    """See the module; the exit status is that of `run` in process.py."""
    given = parser().parse_args(arguments)
    return run(lambda stop: orchestrate(given, stop, commands))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
