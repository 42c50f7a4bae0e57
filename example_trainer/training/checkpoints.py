"""Checkpoints: `step_N/` is a Hugging Face checkpoint, with what the next step needs in `step_N/trainer_state/`.

A checkpoint is written beside its place and renamed into it, so a folder called `step_N` is always complete. It says which run
it is of, and which batch it has learned from last.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder, save_model
from example_trainer.models.tensor_file import write_tensors
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import (
    PREFIX,
    STATE_FOLDER,
    TRAINER_FILE,
    Run,
    SavedStep,
    TrainedBatch,
    marked_run,
    saved_steps,
)

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"


def load_state(saved: SavedStep, optimizer: MasterAdamW) -> None:
    """Put the optimizer where it was when a checkpoint was saved.

    Raises:
        CheckpointError: the state is unreadable, or of another model.
    """
    file = saved.path / STATE_FOLDER / OPTIMIZER_FILE
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
            optimizer.load_state(shapes, opened.get_tensor, saved.step)  # one at a time: the whole may not fit into RAM
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the optimizer state in {file.parent}: {error}") from error


class Checkpoints:
    """Writes a run's checkpoints into a folder, which other runs may have saved into too.

    Args:
        folder: created when the first one is saved.
        run: whose checkpoints they are. Those of other runs keep what they have, but for steps that are saved again.
        keep_states: how many of the run's newest keep their optimizer state, which is several times as large as the weights;
            0 for all.
        ranks: rank 0 writes; the others give it what they hold.

    Attributes:
        last: the step of the newest one saved or resumed from by this process; None before that.
    """

    prefix = PREFIX

    def __init__(
        self, folder: Path, run: Run, keep_states: int = 1, last: int | None = None, ranks: Ranks | None = None
    ) -> None:
        self.folder, self.run, self.keep_states, self.last, self.ranks = folder, run, keep_states, last, ranks or Ranks()

    def save(self, model: Decoder, optimizer: MasterAdamW, config: dict[str, Any], batch: TrainedBatch | None = None) -> Path:
        """Write the checkpoint of the present step from the optimizer's masters, which the model's dtype is the rounding of.

        Collective; one tensor at a time is whole on rank 0, in the same format for any number of ranks.

        Args:
            config: the options, for people.
            batch: the last one in these weights, which a trainer that resumes must not train on again. Rank 0's counts.

        Raises:
            CheckpointError: it could not be written whole, or another trainer has taken the run over; earlier checkpoints are
                as they were.
        """
        final = self.path(optimizer.steps)
        trainer = {"step": optimizer.steps, "run": self.run.record(), "batch": vars(batch) if batch else None, "config": config}
        masters = ((name, optimizer.shards.whole(name, master)) for name, master in optimizer.masters.items())
        state = ((key, optimizer.shards.whole(key.partition(".")[2], t)) for key, t in optimizer.state_dict().items())

        def write() -> None:
            try:
                if self.ranks.is_main:
                    self._write(model, optimizer, masters, state, trainer, final)
            finally:
                # The other ranks take part in every gathering, whether or not rank 0 could write what came before.
                deque(masters, maxlen=0)
                deque(state, maxlen=0)

        self.ranks.together(f"writing {final.name}", write)
        self.last = optimizer.steps
        logger.info("Saved checkpoint %s", final)
        if self.ranks.is_main:
            self._drop_old_states()
        return final

    def _write(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        masters: Iterator[tuple[str, Tensor]],
        state: Iterator[tuple[str, Tensor]],
        trainer: dict[str, Any],
        final: Path,
    ) -> None:
        self._require_own_run(final)
        draft = self.folder / f".{final.name}.draft-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_drafts()
            self._require_space(model, optimizer)
            self._write_weights(model, optimizer.masters if self.ranks.world_size == 1 else _InOrder(masters), draft)
            deque(masters, maxlen=0)
            (draft / STATE_FOLDER).mkdir()
            write_tensors(draft / STATE_FOLDER / OPTIMIZER_FILE, optimizer.whole_state_shapes(), state, torch.float32)
            (draft / STATE_FOLDER / TRAINER_FILE).write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")
            _flush(draft)
            _replace(draft, final)
            _flush_entry(self.folder)  # whoever is told that the step is saved may rely on it, whatever happens to the power
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            kept = f"{self.path(self.last).name} is untouched" if self.last is not None else "there was none before it"
            reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
            raise CheckpointError(
                f"could not write checkpoint {final}: {reason}; {kept}; make room or change --save-path"
            ) from error

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"{self.prefix}{step}"

    def _write_weights(self, model: Decoder, masters: Mapping[str, Tensor], draft: Path) -> None:
        save_model(model, draft, weights=masters)

    def _require_own_run(self, final: Path) -> None:
        newest = marked_run(self.folder, self.prefix, skip_damaged=True)
        if newest is not None and newest.name == self.run.name and newest.epoch > self.run.epoch:
            raise CheckpointError(
                f"{final} is not written: a trainer that was started later goes on with {self.run} in this folder; "
                "stop one of the two"
            )

    def _remove_drafts(self) -> None:
        for draft in self.folder.glob(f".{self.prefix}*.draft-*"):
            owner = int(draft.name.rpartition("-")[2])
            if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
                logger.warning("Removing %s, which a process that died left unfinished", draft)
                shutil.rmtree(draft)

    def _require_space(self, model: Decoder, optimizer: MasterAdamW) -> None:
        # Knowing beforehand is kinder than failing after gigabytes; the write itself is guarded too.
        itemsize = next(model.parameters()).dtype.itemsize
        needed = (itemsize + 12) * sum(math.prod(shape) for shape in optimizer.whole_shapes.values())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(0, f"it needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free")

    def _drop_old_states(self) -> None:
        """Of this run's own checkpoints alone: another run's state is all that it could be continued from."""
        saved = [one for one in saved_steps(self.folder, self.prefix, skip_damaged=True) if one.run.name == self.run.name]
        saved.sort(key=lambda one: one.order)
        for one in saved[: -self.keep_states] if self.keep_states else []:
            shutil.rmtree(one.path / STATE_FOLDER)
            logger.info(
                "Removed the optimizer state of %s (--keep-optimizer-states %d); its weights stay", one.path, self.keep_states
            )


class _InOrder(Mapping[str, Tensor]):
    """Named tensors that are made one after another, asked for in that order, some several times in a row."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        while self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is made
            self._last = next(self._tensors, None)
            if self._last is None:
                raise KeyError(name)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("the names come with the tensors")

    def __len__(self) -> int:
        raise NotImplementedError("the names come with the tensors")


def _flush(folder: Path) -> None:
    """Make sure that everything in it is on the disk before the folder gets its name."""
    for path in [*sorted(folder.rglob("*")), folder]:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(draft: Path, final: Path) -> None:
    if not final.exists():
        draft.rename(final)
        return
    logger.warning("Replacing checkpoint %s, which was there before", final)
    old = draft.with_name(draft.name.replace(".draft-", ".old.draft-"))
    final.rename(old)
    draft.rename(final)
    shutil.rmtree(old)
