"""Checkpoints: `step_N/` is a Hugging Face checkpoint, with what the next step needs in `step_N/trainer_state/`.

A checkpoint is written beside its place and renamed into it, so a folder called `step_N` is always complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder, save_model
from example_trainer.optimizer import MasterAdamW
from example_trainer.parallel.ranks import Ranks
from example_trainer.tensor_file import write_tensors

logger = logging.getLogger(__name__)

STATE_FOLDER, OPTIMIZER_FILE, TRAINER_FILE = "trainer_state", "optimizer.safetensors", "trainer.json"
PREFIX = "step_"


def steps_in(folder: Path, prefix: str = PREFIX) -> dict[int, Path]:
    """The complete checkpoints in a folder whose names are `prefix` and a step, by step, oldest first."""
    name = re.compile(re.escape(prefix) + r"(\d+)")
    matches = ((name.fullmatch(path.name), path) for path in folder.glob(f"{prefix}*") if path.is_dir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def find_resume(resume: str | None, folder: Path, prefix: str = PREFIX) -> Path | None:
    """The checkpoint to continue from.

    Args:
        resume: "auto" for the newest that has its optimizer state (None if there is none yet), a checkpoint's path, or None.
        folder: where checkpoints are saved.
        prefix: what their names begin with.

    Raises:
        CheckpointError: the path is no checkpoint, or lacks its optimizer state.
    """
    if resume is None:
        if present := steps_in(folder, prefix):
            logger.warning(
                "%s holds checkpoints up to step %d: this run starts anew and replaces equal steps (--resume auto continues)",
                folder, max(present),
            )  # fmt: skip
        return None
    if resume == "auto":
        complete = [path for path in steps_in(folder, prefix).values() if (path / STATE_FOLDER / TRAINER_FILE).is_file()]
        if not complete:
            logger.info("No checkpoint with an optimizer state in %s: starting anew", folder)
        return complete[-1] if complete else None
    path = Path(resume).expanduser()
    if not (path / STATE_FOLDER / TRAINER_FILE).is_file():
        what = "does not exist" if not path.is_dir() else f"has no {STATE_FOLDER}/{TRAINER_FILE}"
        raise CheckpointError(
            f"--resume {resume}: the folder {what}; give a {prefix}N folder that keeps its optimizer state, or 'auto'"
        )
    return path


def load_state(checkpoint: Path, optimizer: MasterAdamW) -> None:
    """Put the optimizer where it was when `checkpoint` was saved.

    Raises:
        CheckpointError: the state is unreadable, or of another model.
    """
    try:
        trainer: dict[str, Any] = json.loads((checkpoint / STATE_FOLDER / TRAINER_FILE).read_text(encoding="utf-8"))
        state = load_file(checkpoint / STATE_FOLDER / OPTIMIZER_FILE)
        steps = int(trainer["step"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the optimizer state in {checkpoint / STATE_FOLDER}: {error}") from error
    optimizer.load_state_dict(state, steps)


class Checkpoints:
    """Writes checkpoints into a folder.

    Args:
        folder: created when the first one is saved.
        keep_states: how many of the newest keep their optimizer state, which is several times as large as the weights;
            0 for all.
        ranks: rank 0 writes; the others give it what they hold.

    Attributes:
        last: the step of the newest one saved or resumed from by this process; None before that.
    """

    prefix = PREFIX

    def __init__(self, folder: Path, keep_states: int = 1, last: int | None = None, ranks: Ranks | None = None) -> None:
        self.folder, self.keep_states, self.last, self.ranks = folder, keep_states, last, ranks or Ranks()

    def save(self, model: Decoder, optimizer: MasterAdamW, config: dict[str, Any]) -> Path:
        """Write the checkpoint of the present step from the optimizer's masters, which the model's dtype is the rounding of.

        Collective; one tensor at a time is whole on rank 0, in the same format for any number of ranks.

        Raises:
            CheckpointError: it could not be written whole; earlier checkpoints are as they were.
        """
        final = self.path(optimizer.steps)
        masters, state = optimizer.whole_masters(), optimizer.whole_state()

        def write() -> None:
            try:
                if self.ranks.is_main:
                    self._write(model, optimizer, masters, state, config, final)
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
        config: dict[str, Any],
        final: Path,
    ) -> None:
        draft = self.folder / f".{final.name}.draft-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_drafts()
            self._require_space(model, optimizer)
            self._write_weights(model, optimizer.masters if self.ranks.world_size == 1 else _InOrder(masters), draft)
            deque(masters, maxlen=0)
            (draft / STATE_FOLDER).mkdir()
            write_tensors(draft / STATE_FOLDER / OPTIMIZER_FILE, optimizer.whole_state_shapes(), state, torch.float32)
            trainer = {"step": optimizer.steps, "config": config}
            (draft / STATE_FOLDER / TRAINER_FILE).write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")
            _flush(draft)
            _replace(draft, final)
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
        with_state = [path for path in steps_in(self.folder, self.prefix).values() if (path / STATE_FOLDER).is_dir()]
        for path in with_state[: -self.keep_states] if self.keep_states else []:
            shutil.rmtree(path / STATE_FOLDER)
            logger.info(
                "Removed the optimizer state of %s (--keep-optimizer-states %d); its weights stay", path, self.keep_states
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
    """Make sure that every file is on the disk before the folder gets its name."""
    for path in sorted(folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(draft: Path, final: Path) -> None:
    if not final.exists():
        draft.rename(final)
        return
    logger.warning("Replacing checkpoint %s of an earlier run", final)
    old = draft.with_name(draft.name.replace(".draft-", ".old.draft-"))
    final.rename(old)
    draft.rename(final)
    shutil.rmtree(old)
