"""Train a language model with GRPO: fetch scored rollouts, take a step, hand the new weights to the
inference server.

python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --training-steps 100

`training/assembly.py` makes the parts of a training, and `training/loop.py` is the loop.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path: import from the repository, and never a sibling file by a bare name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from example_trainer.prerequisites import explain_missing_packages

    explain_missing_packages()
    from example_trainer.parallel.launched import end_with_launcher

    end_with_launcher()  # before the imports below, which take seconds

import contextlib
import logging
import os
from collections.abc import Sequence

from example_trainer.child_processes.processes import CHECK_ONLY
from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.parallel.launch import launch
from example_trainer.process import StopSignal, leave, run
from example_trainer.training.assembly import make_trainer
from example_trainer.training.loop import train as take_steps
from example_trainer.training.rank_plan import plan_ranks
from example_trainer.training.runs import require_save_path

logger = logging.getLogger("example_trainer.grpo")


def main(arguments: Sequence[str], stop: StopSignal) -> int:
    """Train in this process, or start one process for each rank and wait for all.

    Returns the exit status. With the variable CHECK_ONLY the options are checked, and nothing starts.
    """
    config = parse_config(arguments)
    if os.environ.get("RANK", "0") == "0":  # it alone makes the folder
        require_save_path(config.save_path)
    if os.environ.get(CHECK_ONLY) == "1":
        return 0
    plan = plan_ranks(config, stop)
    if plan.count == 1:
        train(plan.config, stop)
        return 0
    return launch(
        [sys.executable, "-u", str(Path(__file__).resolve()), *arguments, *plan.flags],
        plan.count,
        stop,
    )


def train(config: TrainerConfig, stop: StopSignal) -> None:
    """Train from the checkpoint that the run starts from to its last step."""
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(config, stop, stack)
        if trainer is None:
            return
        take_steps(trainer)
        trainer.batches.end_run()
        logger.info(
            "Training complete: %d steps, checkpoint %s",
            trainer.steps,
            trainer.checkpoints.path(trainer.steps),
        )


if __name__ == "__main__":
    leave(run(lambda stop: main(sys.argv[1:], stop)))
