"""The model, the problems and the sizes that simple_rl.py trains with where its command line leaves
them open.

The guide's run is Qwen3-1.7B on GSM8K with a reward for correct answers. It needs a GPU and the
Hugging Face hub, or what was downloaded from it before. Elsewhere the starter model learns sums, on
a CPU with ordinary kernels.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from example_trainer.batch.problems import GSM8K, find_task
from example_trainer.errors import ConfigError, ModelError
from example_trainer.models.hf_checkpoint import find_checkpoint

logger = logging.getLogger(__name__)

STARTER_MODEL = str(Path(__file__).resolve().parents[1] / "assets" / "starter_model")
GUIDE_BYTES = 64 * 2**30
"""GPU memory that the guide's run needs, by estimate. It is 31 GB of weights, masters, moments and
gradient sums, 16 GB of activations of a pass, and 0.3 of the GPU for vLLM.
"""


@dataclass(frozen=True)
class Defaults:
    """Values of options that were not given; see `simple_rl.py --help` for each."""

    model: str
    problems: str | None
    digits: int
    max_tokens: int
    micro_batch: int
    lr: float
    gpu_memory: float
    batch_invariant: bool
    thinking: bool | None


STARTER_RUN = Defaults(STARTER_MODEL, None, 2, 96, 32, 3e-4, 0.45, True, None)
GUIDE_RUN = Defaults("Qwen/Qwen3-1.7B", GSM8K, 2, 512, 8, 1e-6, 0.3, True, False)
OPEN = tuple(field.name for field in fields(Defaults))


def fill(options: argparse.Namespace, defaults: Defaults) -> None:
    """Set every option of OPEN that was not given, in place; `options.given` names the given ones."""
    for name in OPEN:
        if name not in options.given:
            setattr(options, name, getattr(defaults, name))


def mark_given(options: argparse.Namespace) -> None:
    """Note in `options.given` which options of OPEN were given, and fill the others for the starter
    model, in place.
    """
    options.given = frozenset(name for name in OPEN if getattr(options, name) is not None)
    fill(options, STARTER_RUN)


def on_gpu(options: argparse.Namespace) -> bool:
    """Return whether the run is on a GPU."""
    return bool(options.device != "cpu" and torch.cuda.is_available())


def choose_kernels(options: argparse.Namespace) -> None:
    """Leave equal bits to machines with a GPU, unless they were asked for.

    Raises:
        ConfigError: they, or the sampler's experts, were asked for without a GPU.
    """
    if on_gpu(options):
        return
    if getattr(options, "router_replay", False):
        raise ConfigError(
            "--router-replay needs an NVIDIA GPU, since vLLM's CPU build does not return the experts "
            "of tokens: leave it out"
        )
    if "batch_invariant" in options.given and options.batch_invariant:
        raise ConfigError(
            "--batch-invariant needs an NVIDIA GPU, where vLLM has such kernels; give --no-batch-invariant here"
        )
    options.batch_invariant = False


def choose_run(options: argparse.Namespace) -> str | None:
    """Take the guide's model and problems if nothing else was asked for and they can be had.

    Call it when the settings of the GPU are pinned, because it looks at the GPU's memory.

    Returns:
        One line for the log on what is trained instead and why; None if the command line or the
        guide decided.
    """
    chosen = bool(options.given & {"model", "problems", "digits"})
    if chosen and (on_gpu(options) or "batch_invariant" in options.given):
        return None
    reason = _without_gpu(options) if chosen else _obstacle(options)
    if reason is None:
        fill(options, GUIDE_RUN)
        return None
    kernels = ""
    if not options.batch_invariant:
        kernels = " with ordinary kernels, whose bits differ between vLLM and trainer"
    if chosen:
        return f"Training{kernels}: {reason}"
    return (
        f"Training the starter model on sums{kernels}, not {GUIDE_RUN.model} on {GSM8K}: {reason}. "
        "--model and --problems choose others"
    )


def _without_gpu(options: argparse.Namespace) -> str | None:
    if on_gpu(options):
        return None
    if options.device == "cpu":
        return "--device is cpu"
    return "there is no GPU here"


def _obstacle(options: argparse.Namespace) -> str | None:
    """Why the guide's run is not possible here; None if it is.

    Downloads its model and its problems.
    """
    if (reason := _without_gpu(options)) is not None:
        return reason
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if memory < GUIDE_BYTES:
        return f"the GPU has {memory / 2**30:.0f} GiB, and {GUIDE_RUN.model} needs {GUIDE_BYTES / 2**30:.0f}"
    logger.info("Looking for %s and %s on the Hugging Face hub", GUIDE_RUN.model, GSM8K)
    try:
        find_checkpoint(GUIDE_RUN.model)
        find_task(GSM8K)
    except (ConfigError, ModelError) as error:
        return str(error)
    return None
