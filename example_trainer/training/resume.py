"""Where a trainer begins: anew, or from a checkpoint of the run that it continues."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.batch.client import TrainedBatch
from example_trainer.errors import CheckpointError, ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.runs import (
    PREFIX,
    STATE_FOLDER,
    TRAINER_FILE,
    Run,
    SavedStep,
    has_record,
    has_state,
    marked_run,
    model_identity,
    new_run,
    next_epoch,
    same_model,
    saved_steps,
    steps_in,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a trainer begins.

    Attributes:
        run: what it trains, with its own life.
        saved: the checkpoint that it goes on from; None for the model as it was at first.
    """

    run: Run
    saved: SavedStep | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint."""
        if self.saved is None:
            return None
        return self.saved.path

    @property
    def batch(self) -> TrainedBatch | None:
        """The last batch in the weights."""
        if self.saved is None:
            return None
        return self.saved.batch

    @property
    def learned(self) -> list[TrainedBatch]:
        """Batches in the weights that the rollout service may not know of."""
        if self.saved is None:
            return []
        return [batch for batch in (*self.saved.unacknowledged, self.saved.batch) if batch]

    @property
    def positions(self) -> dict[str, int] | None:
        """Where the data of these weights goes on; None if that is unknown."""
        if self.saved is None:
            return {}
        return self.saved.positions


def agreed_start(
    ranks: Ranks,
    resume: str | None,
    folder: Path,
    model_name: str,
    now_ms: int,
    prefix: str = PREFIX,
) -> Start:
    """What `choose_start` finds on rank 0, on every rank. Collective."""

    def choose() -> tuple[dict[str, Any], str | None]:
        start = choose_start(resume, folder, model_name, now_ms, prefix)
        return start.run.record(), str(start.checkpoint) if start.checkpoint else None

    def read() -> Start:
        return Start(Run.from_record(run), SavedStep.read(Path(checkpoint)) if checkpoint else None)

    run, checkpoint = ranks.on_main("choosing where to start", choose)
    return ranks.together("reading where to start", read)


def is_complete(
    resume: str | None, folder: Path, model_name: str, now_ms: int, prefix: str, training_steps: int
) -> bool:
    """Whether the run to continue has taken all of `training_steps`. Logs nothing.

    The other arguments and the errors are those of choose_start.
    """
    if resume is None:
        return False
    logger.disabled = True
    try:
        start = choose_start(resume, folder, model_name, now_ms, prefix)
    finally:
        logger.disabled = False
    return start.saved is not None and start.saved.step >= training_steps


def choose_start(
    resume: str | None, folder: Path, model_name: str, now_ms: int, prefix: str = PREFIX
) -> Start:
    """Where to begin.

    Args:
        resume: None to begin a new run; "auto" to continue the run that began or went on in
            `folder` last, from its newest checkpoint that has its optimizer state, else from its
            newest one without, or from the model if it has none; or a checkpoint's path.
        folder: where checkpoints are saved.
        model_name: what is trained.
        now_ms: Unix milliseconds.
        prefix: what the checkpoints' names begin with.

    Raises:
        ConfigError: the run that would be continued trains another model.
        CheckpointError: the path is not a checkpoint of a trainer, or one of adapters without its
            optimizer state; or a file of a checkpoint is damaged.
    """
    if resume is None:
        return _anew(folder, model_name, now_ms, prefix)
    if resume == "auto":
        return _newest_run(folder, model_name, now_ms, prefix)
    path = Path(resume).expanduser()
    if not has_record(path):
        what = "does not exist"
        if path.is_dir():
            what = f"has no {STATE_FOLDER}/{TRAINER_FILE} and no {TRAINER_FILE}"
        raise CheckpointError(
            f"--resume {resume}: the folder {what}; give a {prefix}N folder of a trainer, or 'auto'"
        )
    saved = SavedStep.read(path)
    _require_state(resume, saved, prefix)
    _require_model(resume, saved.run, model_name, folder)
    return Start(saved.run.lived_on(saved.step, next_epoch(folder, prefix, now_ms)), saved)


def _anew(folder: Path, model_name: str, now_ms: int, prefix: str) -> Start:
    run = new_run(model_name, folder, prefix, now_ms)
    if present := steps_in(folder, prefix):
        with_state = saved_steps(folder, prefix, skip_damaged=True)
        logger.warning(
            "%s holds checkpoints up to step %d%s: %s starts anew and replaces equal steps (--resume auto continues); "
            "it leaves the others as they are, optimizer states included",
            folder, max(present), f" ({_list(with_state)})" if with_state else "", run,
        )  # fmt: skip
    return Start(run)


def _newest_run(folder: Path, model_name: str, now_ms: int, prefix: str) -> Start:
    saved = saved_steps(folder, prefix, without_state=True)
    current = marked_run(folder, prefix)
    if current is None and saved:
        name = max(saved, key=lambda one: one.run.begun).run.name
        current = max((one for one in saved if one.run.name == name), key=lambda one: one.order).run
    if current is None:
        logger.info("No checkpoint in %s to go on from: starting anew", folder)
        return Start(new_run(model_name, folder, prefix, now_ms))
    _require_model("auto", current, model_name, folder)
    line = [one for one in saved if current.holds(one.run, one.step)]
    others = [one for one in saved if one not in line]
    beside = ""
    if others:
        beside = f"; {folder} also holds {_list(others)}, which --resume PATH would continue"
    if not line:
        logger.warning(
            "%s began in %s and has no checkpoint to go on from: starting it anew%s",
            current,
            folder,
            beside,
        )
        return Start(current.lived_on(0, next_epoch(folder, prefix, now_ms)))
    newest = max(line, key=lambda one: (has_state(one.path), *one.order))
    _require_state("auto", newest, prefix)
    logger.info(
        "%s goes on from %s, its newest checkpoint in %s%s",
        current,
        newest.path.name,
        folder,
        beside,
    )
    # Above every other's, not the checkpoint's alone: a life that saved nothing may have served
    # weights all the same.
    return Start(newest.run.lived_on(newest.step, next_epoch(folder, prefix, now_ms)), newest)


def _require_state(resume: str, saved: SavedStep, prefix: str) -> None:
    if prefix != PREFIX and not has_state(saved.path):
        raise CheckpointError(
            f"--resume {resume}: {saved.path} keeps no optimizer state, from which adapters are continued; resume from a "
            "checkpoint that keeps it, or begin a new run without --resume (--keep-optimizer-states 1 keeps the newest)"
        )


def _require_model(resume: str, run: Run, model_name: str, folder: Path) -> None:
    if not same_model(run.model, model_identity(model_name)):
        raise ConfigError(
            f"--resume {resume}: {run} in {folder} trains {run.model}, and --model-name is {model_name}; give "
            f"--model-name {run.model} to go on with it, or another --save-path, or no --resume, to begin a run of {model_name}"
        )


def _list(saved: Sequence[SavedStep]) -> str:
    """`step_40 of run A, step_7 of run B`: the newest of each run."""
    newest: dict[str, SavedStep] = {}
    for one in sorted(saved, key=lambda one: one.order):
        newest[one.run.name] = one
    return ", ".join(f"{one.path.name} of {one.run}" for one in newest.values())
