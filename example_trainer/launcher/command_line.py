"""Values that several commands of the launcher read: numbers, a model, and the GPUs of this
machine.
"""

from __future__ import annotations

import argparse
import math
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from example_trainer.child_processes.files import disk_refusal
from example_trainer.child_processes.processes import ProcessError


class LauncherError(ProcessError):
    """The run cannot go on.

    The first line names the thing, its value and the remedy; what follows is log.
    """


ROOT = Path(__file__).resolve().parents[2]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LOCAL_OWNERS = ("assets", "runs")
"""Folders of this project that hold models. No owner of models on the hub is meant by them."""


def run_command(name: str, work: Callable[[], int]) -> int:
    """Run a command; returns its exit status, and 1 after an error that is printed in one line."""
    try:
        return work()
    except ProcessError as error:
        line: str | None = str(error)
    except BrokenPipeError:
        return 0  # the reader of the pipe has enough
    except PermissionError as error:
        user = pwd.getpwuid(os.geteuid()).pw_name
        line = f"{error.filename}: permission denied to {user}: call this as the run's own user"
    except OSError as error:
        line = disk_refusal(error)
        if line is None:
            raise
    print(f"{name}: {line}", file=sys.stderr)
    return 1


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def learning_rate(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def visible_gpus() -> tuple[int, ...]:
    """Indices of this machine's NVIDIA GPUs, CUDA_VISIBLE_DEVICES respected where it lists indices;
    empty if there are none.
    """
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    present = re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(present)).split(",")
    return tuple(int(index) for part in chosen if (index := part.strip()) in present)


def check_model(model: str) -> str:
    """The model as the processes shall get it: an absolute folder, or a hub name unchanged.

    Raises:
        LauncherError: a folder without a checkpoint, or neither a folder nor a name.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise LauncherError(
                f"--model {model}: this folder has no config.json, so it is not a Hugging Face "
                "checkpoint"
            )
        return str(folder.resolve())
    if model.split("/")[0] in LOCAL_OWNERS:
        beside = sorted(found.parent.name for found in folder.parent.glob("*/config.json"))
        raise LauncherError(
            f"--model {model}: no such folder (seen from {Path.cwd()}); "
            + (f"{folder.parent} has {', '.join(beside)}" if beside else "check the path")
        )
    if HUB_ID.fullmatch(model):
        return model
    raise LauncherError(
        f"--model {model}: no such folder, and no Hugging Face name (owner/name) either: check the path"
    )
