"""The options of the quick start, checked before anything starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.one_line_parser import OneLineParser
from example_trainer.launcher.command_line import (
    ROOT,
    LauncherError,
    check_model,
    learning_rate,
    positive_int,
    visible_gpus,
)
from example_trainer.launcher.starter_models import LEARNING_RATES, MODELS, STEPS

MOST_EVAL_PROBLEMS = 1000
BRIDGES = ("broadcast", "single-copy")
LEVELS = {"arithmetic": 3, "calculator": 4}
"""The environments that there are, and the highest level of difficulty of each; the lowest is 1."""


@dataclass(frozen=True)
class Options:
    """One run of the quick start.

    Attributes:
        bridge: how the weights travel: `broadcast` or `single-copy`.
        steps: optimizer steps.
        model: folder of a Hugging Face checkpoint, or a model's name on the Hugging Face hub.
        gpus: indices of the GPUs to use; empty for CPU.
        lr: peak learning rate.
        seed: seed of the problems, of the sampling and of the trainer.
        difficulty: levels of the generated problems; empty for the environment's own choice.
        eval_size: held-out problems per evaluation.
        output: folder that gets the summary, the plot and all logs.
        keep_running: leave service and vLLM up after the summary until Ctrl-C.
        seconds_setup: how long scripts/setup.sh took before.
        environment: one of `LEVELS`.
    """

    bridge: str
    steps: int
    model: str
    gpus: tuple[int, ...]
    lr: float
    seed: int
    difficulty: tuple[int, ...]
    eval_size: int
    output: Path
    keep_running: bool
    seconds_setup: float
    environment: str

    @property
    def device(self) -> str:
        """`gpu` or `cpu`."""
        return "gpu" if self.gpus else "cpu"


def eval_number(text: str) -> int:
    """An integer from 1 to MOST_EVAL_PROBLEMS."""
    value = positive_int(text)
    if value > MOST_EVAL_PROBLEMS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than the {MOST_EVAL_PROBLEMS} held-out problems that there are"
        )
    return value


def seed_number(text: str) -> int:
    """An integer from 0 to 2**31 - 1, which every random generator of the stack takes."""
    if not re.fullmatch(r"\d+", text) or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**31 - 1}")
    return int(text)


def levels(text: str) -> tuple[int, ...]:
    """Difficulty levels such as `2` or `1,2,3`."""
    if not re.fullmatch(r"[1-9](,[1-9])*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no levels: give 1, 2, 3, or several such as 1,2,3"
        )
    return tuple(sorted({int(part) for part in text.split(",")}))


def per_environment(defaults: Mapping[str, float]) -> str:
    """Return the default of each environment as text for --help:
    `50 for arithmetic, 40 for calculator`.
    """
    return ", ".join(f"{value:g} for {environment}" for environment, value in defaults.items())


def options_with_values() -> dict[str, dict[str, Any]]:
    """Return how `add_argument` takes each option that has a value."""
    steps, rates = per_environment(STEPS), per_environment(LEARNING_RATES)
    return {
        "environment": {
            "choices": tuple(LEVELS),
            "default": "arithmetic",
            "help": "what to learn: short sums, or longer ones and a calculator to ask (default: %(default)s)",
        },
        "bridge": {
            "choices": BRIDGES,
            "help": "how weights reach vLLM (default: broadcast; single-copy on one GPU)",
        },
        "steps": {"type": positive_int, "help": f"optimizer steps (default: {steps})"},
        "model": {
            "help": "checkpoint folder or Hugging Face name (default: one of two in assets/)"
        },
        "lr": {
            "type": learning_rate,
            "help": f"peak learning rate; with 0 the model does not learn (default: {rates})",
        },
        "seed": {
            "type": seed_number,
            "default": 0,
            "help": "seed of problems, sampling and trainer (default: %(default)s)",
        },
        "difficulty": {
            "type": levels,
            "default": (),
            "help": "levels of the problems, such as 1 or 1,2,3 (default: the environment's own)",
        },
        "eval-size": {
            "type": eval_number,
            "default": 256,
            "help": "held-out problems per evaluation (default: %(default)s)",
        },
        "output": {
            "type": Path,
            "help": "folder for summary, plot and logs (default: runs/quickstart, or runs/calculator)",
        },
    }


def parser() -> OneLineParser:
    """The command line. Relative paths count from the folder in which the command was typed."""
    made = OneLineParser(
        prog="scripts/quickstart.sh",
        description="Set up, start rollout service, vLLM, environment and trainer on this machine, train, show the gain.",
        allow_abbrev=False,
    )
    for name, settings in options_with_values().items():
        made.add_argument(f"--{name}", **settings)
    device = made.add_mutually_exclusive_group()
    device.add_argument("--gpu", action="store_true", help="train and sample on NVIDIA GPUs")
    device.add_argument(
        "--cpu",
        action="store_true",
        help="train and sample on the CPU (default where nvidia-smi finds no GPU)",
    )
    made.add_argument(
        "--keep-running",
        action="store_true",
        help="leave service and vLLM running at the end, until Ctrl-C",
    )
    return made


def choose_bridge(asked: str | None, gpus: tuple[int, ...]) -> str:
    """The bridge to use: what was asked for if these GPUs can do it.

    Raises:
        LauncherError: they cannot.
    """
    if len(gpus) == 1 and asked == "broadcast":
        raise LauncherError(
            "--bridge broadcast needs two GPUs and this machine shows one: use --bridge single-copy, or --cpu"
        )
    return asked or ("single-copy" if len(gpus) == 1 else "broadcast")


def parse(arguments: Sequence[str]) -> Options:
    """Read and check the command line.

    Raises:
        LauncherError: something cannot work.
        SystemExit: `--help`, or a line that does not parse (status 2).
    """
    given = parser().parse_args(arguments)
    gpus = () if given.cpu else visible_gpus()
    if given.gpu and not gpus:
        raise LauncherError(
            "--gpu: nvidia-smi lists no GPU that may be used (see CUDA_VISIBLE_DEVICES): leave it out, or use --cpu"
        )
    highest = LEVELS[given.environment]
    if given.difficulty and max(given.difficulty) > highest:
        raise LauncherError(
            f"--difficulty {','.join(map(str, given.difficulty))}: the levels of --environment {given.environment} "
            f"are 1 to {highest}"
        )
    folder = {"arithmetic": "quickstart"}.get(given.environment, given.environment)
    output = (given.output or ROOT / "runs" / folder).expanduser().absolute()
    lr = given.lr
    if lr is None:
        lr = LEARNING_RATES[given.environment]
    return Options(
        bridge=choose_bridge(given.bridge, gpus),
        steps=given.steps or STEPS[given.environment],
        model=check_model(given.model or str(MODELS[given.environment])),
        gpus=gpus,
        lr=lr,
        seed=given.seed,
        difficulty=given.difficulty,
        eval_size=given.eval_size,
        output=output,
        keep_running=given.keep_running,
        seconds_setup=float(os.environ.get("LOCKSTEP_SECONDS_SETUP", "0")),
        environment=given.environment,
    )
