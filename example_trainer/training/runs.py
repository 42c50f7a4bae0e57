"""Which run a checkpoint belongs to, and where a trainer begins.

A *run* is one training, from its first step over every resume to its last. Its name is in each of
its checkpoints, and in `run.json` of the folder that it saves into, from the moment that it serves
weights. So several runs may share a folder.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atroposlib.utils.files import cannot_write, remedy, require_writable, write_whole
from atroposlib.wire import TrainerSession
from example_trainer.batch.client import LastRun, TrainedBatch
from example_trainer.errors import CheckpointError, ConfigError
from example_trainer.parallel.ranks import Ranks

STATE_FOLDER, TRAINER_FILE = "trainer_state", "trainer.json"
PREFIX = "step_"
RUN_FILE = "run.json"


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: unique, and readable: when it began.
        model: value of --model-name, a folder's path made absolute; empty if it is not known.
        lives: its trainer processes, the present one last; those whose every step was lost are left
            out.
    """

    name: str
    model: str
    lives: tuple[TrainerSession, ...]

    @property
    def epoch(self) -> int:
        """The weight epoch of its newest session."""
        return self.lives[-1].epoch

    @property
    def begun(self) -> int:
        """The weight epoch of its first session."""
        return self.lives[0].epoch

    def lived_on(self, step: int, epoch: int) -> Run:
        """The run with one more life, which starts from the checkpoint of `step`.

        Its epoch is at least one above the last.
        """
        return replace(self, lives=(*self.lives, TrainerSession(max(epoch, self.epoch + 1), step)))

    def with_epoch(self, epoch: int) -> Run:
        """The run, its newest life with another epoch."""
        return replace(self, lives=(*self.lives[:-1], replace(self.lives[-1], epoch=epoch)))

    def holds(self, other: Run, step: int) -> bool:
        """Return whether the checkpoint of `step` that `other` saved is in this run's line: not
        left behind by going back.
        """
        if other.name != self.name or other.epoch not in [life.epoch for life in self.lives]:
            return False
        return all(step <= life.start for life in self.lives if life.epoch > other.epoch)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "model": self.model,
            "lives": [[life.epoch, life.start] for life in self.lives],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Run:
        """From JSON.

        Raises KeyError, TypeError or ValueError for anything else than `record` gave.
        """
        lives = tuple(TrainerSession(int(epoch), int(start)) for epoch, start in record["lives"])
        if not lives:
            raise ValueError("a run without a trainer")
        return cls(str(record["name"]), str(record["model"]), lives)

    def __str__(self) -> str:
        return f"run {self.name}"


@dataclass(frozen=True)
class SavedStep:
    """Content of a checkpoint's `trainer_state/trainer.json`, or of `trainer.json` beside the
    weights once the state is removed.

    Attributes:
        batch: the last one in its weights.
        unacknowledged: earlier ones in its weights that were not acknowledged at the rollout service,
            because an earlier checkpoint was still being written.
        updates: of the optimizer, in all its steps.
        layout: of the ranks that saved it; empty if that is not known.
    """

    path: Path
    step: int
    run: Run
    updates: int
    batch: TrainedBatch | None = None
    unacknowledged: tuple[TrainedBatch, ...] = ()
    layout: str = ""

    @classmethod
    def read(cls, checkpoint: Path) -> SavedStep:
        """Read it.

        Raises:
            CheckpointError: it is damaged.
        """
        file = checkpoint / TRAINER_FILE
        if has_state(checkpoint):
            file = checkpoint / STATE_FOLDER / TRAINER_FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                checkpoint,
                int(content["step"]),
                Run.from_record(content["run"]),
                int(content["updates"]),
                content["batch"] and TrainedBatch(**content["batch"]),
                tuple(TrainedBatch(**batch) for batch in content["unacknowledged"]),
                str(content.get("layout", "")),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"cannot read {file} ({type(error).__name__}: {error}): move {checkpoint.name} out of the folder, "
                "or resume from another checkpoint"
            ) from error

    def layout_change(self, layout: str) -> str:
        """The consequence for a deterministic run that goes on with another layout of ranks; empty
        if it is the same, or not known.
        """
        if self.layout in ("", layout):
            return ""
        return (
            f"{self.path} was saved by {self.layout}, and this trainer has {layout}. It adds "
            "gradients in another order, so the next weights differ from a run without a break"
        )

    @property
    def positions(self) -> dict[str, int] | None:
        """Where the data of these weights goes on; None if that is not known."""
        if self.batch is None:
            return None
        return self.batch.positions

    @property
    def order(self) -> tuple[int, int]:
        """Grows with every checkpoint that a run saves, also when it went back to an earlier step."""
        return self.run.epoch, self.step


def new_run(model_name: str, folder: Path, prefix: str, now_ms: int) -> Run:
    """A run that begins now."""
    name = (
        time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ms / 1000)) + f"-{secrets.token_hex(3)}"
    )
    return Run(
        name, model_identity(model_name), (TrainerSession(next_epoch(folder, prefix, now_ms), 0),)
    )


def next_epoch(folder: Path, prefix: str, now_ms: int) -> int:
    """The epoch of a life that begins now: greater than all that the folder knows of, whatever the
    clock did.
    """
    runs = [saved.run for saved in saved_steps(folder, prefix, skip_damaged=True)]
    if marked := marked_run(folder, prefix, skip_damaged=True):
        runs.append(marked)
    return max([now_ms, *(run.epoch + 1 for run in runs)])


def model_identity(name: str) -> str:
    """A model's name, of a folder its absolute path."""
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        return name
    return str(folder.resolve())


def same_model(one: str, other: str) -> bool:
    """Return whether two identities name the same model: equal, or one is a folder with the other's
    last name, which is none (now).
    """
    if one == other or not one or not other:
        return True
    if Path(one).is_dir() == Path(other).is_dir():
        return False
    return Path(one).name == Path(other).name


def steps_in(folder: Path, prefix: str = PREFIX) -> dict[int, Path]:
    """The complete checkpoints in a folder whose names are `prefix` and a step, by step, oldest
    first.
    """
    name = re.compile(re.escape(prefix) + r"(\d+)")
    matches = (
        (name.fullmatch(path.name), path) for path in folder.glob(f"{prefix}*") if path.is_dir()
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def has_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint keeps its optimizer state, from which training goes on exactly."""
    return (checkpoint / STATE_FOLDER / TRAINER_FILE).is_file()


def has_record(checkpoint: Path) -> bool:
    """Return whether a checkpoint names its run and step: it keeps its optimizer state, or
    trainer.json beside the weights.
    """
    return has_state(checkpoint) or (checkpoint / TRAINER_FILE).is_file()


def saved_steps(
    folder: Path, prefix: str = PREFIX, skip_damaged: bool = False, without_state: bool = False
) -> list[SavedStep]:
    """The checkpoints that training can go on from exactly, by step.

    Args:
        without_state: those without an optimizer state too.

    Raises:
        CheckpointError: a record is damaged, unless such are skipped.
    """
    saved = []
    for path in steps_in(folder, prefix).values():
        if not has_state(path) and not (without_state and has_record(path)):
            continue
        try:
            saved.append(SavedStep.read(path))
        except CheckpointError:
            if not skip_damaged:
                raise
    return saved


def run_file(folder: Path, prefix: str) -> Path:
    """Where the folder's newest run is named: `run.json`, of adapters `adapter_run.json`."""
    return folder / (prefix.removesuffix(PREFIX) + RUN_FILE)


def marked_run(folder: Path, prefix: str = PREFIX, skip_damaged: bool = False) -> Run | None:
    """The run that began or went on in a folder last; None if the folder names none.

    Raises:
        CheckpointError: the file is damaged, and that shall not count as none.
    """
    file = run_file(folder, prefix)
    try:
        return Run.from_record(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if skip_damaged:
            return None
        raise CheckpointError(
            f"cannot read {file} ({type(error).__name__}: {error}): remove it, and the run that began last counts as the newest"
        ) from error


def mark_run(run: Run, folder: Path, prefix: str = PREFIX) -> None:
    """Name in a folder the run that --resume auto continues.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    file = run_file(folder, prefix)
    content = (json.dumps(run.record()) + "\n").encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except OSError as error:
        reason = cannot_write(file, error, len(content))
        raise CheckpointError(f"{reason}; {remedy(error, 'change --save-path')}") from error


def require_save_path(folder: Path) -> None:
    """Refuse a folder that cannot be written, before the start of anything that takes long.

    Raises:
        ConfigError: the folder cannot be written or made.
    """
    try:
        require_writable(folder)
    except OSError as error:
        raise ConfigError(
            f"--save-path: {cannot_write(folder, error)}; {remedy(error, 'change --save-path')}"
        ) from error


# The start of a trainer: a new run, or a checkpoint of the run that it continues.

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
    """Return the result of `choose_start` on rank 0, on every rank. Collective."""

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
    """Return whether the run to continue has taken all of `training_steps`. Logs nothing.

    For the other arguments and the errors see choose_start.
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
        resume: None to begin a new run. "auto" to continue the run that began or went on in
            `folder` last. It continues from its newest checkpoint that has its optimizer state. If
            there is none, it continues from its newest one without, or from the model. Or a
            checkpoint's path.
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
            "%s holds checkpoints up to step %d%s: %s starts afresh and replaces equal steps "
            "(--resume auto continues). It leaves the others as they are, optimizer states "
            "included",
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
        logger.info("No checkpoint in %s to go on from: starting a run", folder)
        return Start(new_run(model_name, folder, prefix, now_ms))
    _require_model("auto", current, model_name, folder)
    line = [one for one in saved if current.holds(one.run, one.step)]
    others = [one for one in saved if one not in line]
    beside = ""
    if others:
        beside = f"; {folder} also holds {_list(others)}, which --resume PATH would continue"
    if not line:
        logger.warning(
            "%s began in %s and has no checkpoint to go on from: starting it again%s",
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


def require_no_lost_checkpoints(last_run: LastRun, folder: Path) -> None:
    """Refuse to begin at step 0 in a folder that has lost the checkpoints of the last run. Warn if
    that run saved elsewhere.

    Raises:
        CheckpointError: the last run saved into this folder.
    """
    saved = f"run {last_run.name}, which has not ended, saved step {last_run.saved_step}"
    if folder.resolve() == last_run.folder:
        raise CheckpointError(
            f"--resume auto: {folder} has no checkpoint to go on from, but {saved} there. Bring its "
            "step folders back, or leave --resume out to begin a new run"
        )
    logger.warning(
        "--resume auto begins at step 0, since %s has no checkpoint; %s into %s (give that "
        "--save-path to continue it)", folder, saved, last_run.folder,
    )  # fmt: skip


def _require_state(resume: str, saved: SavedStep, prefix: str) -> None:
    if prefix != PREFIX and not has_state(saved.path):
        raise CheckpointError(
            f"--resume {resume}: {saved.path} keeps no optimizer state, from which adapters are "
            "continued. Resume from a checkpoint that keeps it, or begin a new run without "
            "--resume (--keep-optimizer-states 1 keeps the newest)"
        )


def _require_model(resume: str, run: Run, model_name: str, folder: Path) -> None:
    if not same_model(run.model, model_identity(model_name)):
        raise ConfigError(
            f"--resume {resume}: {run} in {folder} trains {run.model}, and --model-name is "
            f"{model_name}. Give --model-name {run.model} to go on with it, or another "
            f"--save-path, or no --resume, to begin a run of {model_name}"
        )


def _list(saved: Sequence[SavedStep]) -> str:
    """`step_40 of run A, step_7 of run B`: the newest of each run."""
    newest: dict[str, SavedStep] = {}
    for one in sorted(saved, key=lambda one: one.order):
        newest[one.run.name] = one
    return ", ".join(f"{one.path.name} of {one.run}" for one in newest.values())
