"""Checkpoints: `step_N/` is a Hugging Face checkpoint, with what the next step needs in
`step_N/trainer_state/`.

A checkpoint is written beside its place and renamed into it, so the weights in a folder called
`step_N` are always complete, also while the next one is being written in the background.
`trainer_state` gets its name in the same way: with the folder, or later if a server was started on
the weights first. A checkpoint names its run, and the batch that it has learned from last.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atroposlib.utils.files import DISK_REFUSALS, write_whole
from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder
from example_trainer.models.hf_checkpoint import companions, write_checkpoint
from example_trainer.models.safetensors_writer import write_safetensors
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.background_save import BackgroundSave, HostCopy
from example_trainer.training.on_disk import flush, flush_entry, put_in_place, remove
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.runs import (
    PREFIX,
    STATE_FOLDER,
    TRAINER_FILE,
    Run,
    SavedStep,
    TrainedBatch,
    has_state,
    marked_run,
    saved_steps,
)
from vllm_patching.weights.families import parameters

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"


def load_state(saved: SavedStep, optimizer: MasterAdamW) -> None:
    """Put the optimizer where it was when a checkpoint was saved.

    Without an optimizer state the masters stay as they are, which is the checkpoint's weights, and
    AdamW's moments and the count that corrects them begin at zero.

    Raises:
        CheckpointError: the state is unreadable, or of another model.
    """
    if not has_state(saved.path):
        optimizer.steps, optimizer.updates = saved.step, 0
        logger.warning(
            "%s keeps no optimizer state: training goes on from its weights, with moments at zero and masters as precise "
            "as those weights, so it is not exactly the run without a break (--keep-optimizer-states 1 keeps the newest state)",
            saved.path,
        )  # fmt: skip
        return
    file = saved.path / STATE_FOLDER / OPTIMIZER_FILE
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
            # One at a time: the whole may not fit into RAM.
            optimizer.load_state(shapes, opened.get_tensor, saved.step, saved.updates)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the optimizer state in {file.parent}: {error}"
        ) from error


class Checkpoints:
    """Writes a run's checkpoints into a folder, which other runs may have saved into too.

    Example:
        checkpoints.begin(model, optimizer, config, batch)      # training goes on
        ...
        if checkpoints.written(): ...                           # now whoever relies on it may be told
        checkpoints.wait()                                      # before the process says that it is done

    Args:
        folder: created when the first one is saved.
        run: whose checkpoints they are. Those of other runs keep what they have, but for steps that
            are saved again.
        keep_states: how many of the run's newest keep their optimizer state, which is several times
            as large as the weights; None for all. With 0 none is written.
        ranks: rank 0 writes; the others give it what they hold.
        keep: how many of the run's newest are kept at all; 0 for all.
        in_use: whether a server may be started again on the checkpoint of a step: the newest of
            these is kept besides.

    Attributes:
        last: the step of the newest one begun or resumed from by this process; None before that.
    """

    prefix = PREFIX

    def __init__(
        self,
        folder: Path,
        run: Run,
        keep_states: int | None = 1,
        last: int | None = None,
        ranks: Ranks | None = None,
        keep: int = 0,
        in_use: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.folder, self.run, self.keep_states, self.last, self.ranks = (
            folder,
            run,
            keep_states,
            last,
            ranks or Ranks(),
        )
        self.keep, self.in_use = keep, in_use
        self._whole = last
        self._weights_step: int | None = None
        self._sweeping, self._swept = threading.Lock(), False
        self._save: BackgroundSave | None = None
        self._memory: HostCopy | None = None
        self._group: Any = None
        self._companions: dict[str, bytes] | None = None

    def prepare(self, optimizer: MasterAdamW) -> None:
        """Make ready to save an optimizer's state: the memory that it is copied into is taken in
        the background. Collective.
        """
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._memory = HostCopy(optimizer, ranks_here, weights_only=self.keep_states == 0)
        self._group = self.ranks.new_group("checkpoints")
        self._memory.prepare()

    def begin(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None = None,
        unacknowledged: Sequence[TrainedBatch] = (),
    ) -> Path:
        """Start to write the checkpoint of the present step from the optimizer's masters, which the
        model's dtype is the rounding of. Training may go on at once; an optimizer step waits until
        masters and moments have been copied.

        Collective. The format is the same for any number of ranks. One checkpoint is written at a
        time: if the one before is not complete, it is waited for.

        Args:
            config: the options, for people.
            batch: the last one in these weights, which a trainer that resumes must not train on
                again. Rank 0's counts.
            unacknowledged: earlier ones in these weights that the rollout service has not been told
                of. Rank 0's count.

        Returns:
            Where it will be, once it is complete.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        if self._memory is None:
            self.prepare(optimizer)
        assert self._memory is not None
        step, final = optimizer.steps, self.path(optimizer.steps)
        dtype = model.dtype
        trainer = self._record(optimizer, config, batch, unacknowledged)
        self._read_companions(model)
        # A restart of vLLM has written the weights of its step already.
        names = [] if self._weights_step == step else self._weights(model, optimizer)
        states = [] if self.keep_states == 0 else list(optimizer.state_dict())
        self.last = step
        if not names and not states:
            self._complete(final)
            return final
        keys = [*(f"master.{name}" for name in names), *states]
        state_entries = optimizer.whole_state()
        needed = 0
        if states:
            needed += sum(
                kind.itemsize * math.prod(shape) for kind, shape in state_entries.values()
            )
        if names:
            needed += dtype.itemsize * sum(map(math.prod, optimizer.whole_shapes.values()))

        def write(tensors: Iterator[tuple[str, Tensor]], moved: Callable[[], None]) -> None:
            weights = (
                (key.partition(".")[2], tensor) for key, tensor in islice(tensors, len(names))
            )
            with self._draft(
                final, needed, moved, final if names else final / STATE_FOLDER
            ) as draft:
                if names:
                    self._write_weights(model, dtype, weights, draft, moved)
                state = draft / STATE_FOLDER if names and states else draft
                if states:
                    state.mkdir(parents=True)
                    write_safetensors(state / OPTIMIZER_FILE, state_entries, tensors, moved=moved)
                _write_record(state, trainer)
            if not names:
                (final / TRAINER_FILE).unlink(missing_ok=True)  # the state has it now
            self._complete(final)

        self._save = BackgroundSave(
            final.name, optimizer, self._memory, keys, write, self.ranks, self._group
        )
        return final

    def save_weights(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None = None,
        unacknowledged: Sequence[TrainedBatch] = (),
    ) -> Path:
        """Write the weights of the present step for a server to load, and return when they are on
        the disk.

        An earlier checkpoint may be on its way to the disk meanwhile. `begin` adds the optimizer's
        state. Only for a trainer of one rank. The arguments are those of `begin`.

        Raises:
            CheckpointError: the weights could not be written.
        """
        assert self.ranks.world_size == 1
        final, dtype = self.path(optimizer.steps), model.dtype
        self._read_companions(model)
        state = optimizer.state_dict()
        weights = (
            (name, state[f"master.{name}"].cpu()) for name in self._weights(model, optimizer)
        )
        needed = dtype.itemsize * sum(map(math.prod, optimizer.whole_shapes.values()))
        with self._draft(final, needed, lambda: None) as draft:
            self._write_weights(model, dtype, weights, draft, lambda: None)
            _write_record(draft, self._record(optimizer, config, batch, unacknowledged))
        self._weights_step = optimizer.steps
        logger.info("Saved the weights of %s for vLLM", final)
        return final

    def _record(
        self,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None,
        unacknowledged: Sequence[TrainedBatch],
    ) -> dict[str, Any]:
        """The content of trainer.json."""
        return {
            "step": optimizer.steps,
            "updates": optimizer.updates,
            "run": self.run.record(),
            "batch": batch and vars(batch),
            "unacknowledged": [vars(one) for one in unacknowledged],
            "config": config,
        }

    def _read_companions(self, model: Decoder) -> None:
        if (
            self._companions is None
        ):  # read once: the checkpoint that the model was read from may be removed
            self._companions = companions(model)

    def _complete(self, final: Path) -> None:
        """Log that a checkpoint is whole, and remove what the options do not keep."""
        self._whole = int(final.name.removeprefix(self.prefix))
        logger.info("Saved checkpoint %s", final)
        try:
            self._remove_old()
        except OSError as error:
            logger.warning("Older checkpoints in %s could not be removed: %s", self.folder, error)

    @property
    def writing(self) -> bool:
        """Whether this rank is still busy with what was begun last."""
        return self._save is not None and not self._save.done

    def written(self) -> bool:
        """Whether the checkpoint that was begun last is complete on the disk. Collective; asks, and
        does not wait.

        Raises:
            CheckpointError: it could not be written whole, or another trainer has taken the run
                over; earlier checkpoints are as they were.
        """
        save = self._save
        if save is None:
            return True
        if not self.ranks.on_main(f"looking after {save.what}", lambda: save.done):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Return when the checkpoint that was begun last is complete on the disk.

        Collective. Raises what `written` raises.
        """
        save, self._save = self._save, None
        if save is not None:
            try:
                self.ranks.together(f"writing {save.what}", save.result)
            except CheckpointError:
                self.last = self._whole
                raise

    def save(
        self,
        model: Decoder,
        optimizer: MasterAdamW,
        config: dict[str, Any],
        batch: TrainedBatch | None = None,
    ) -> Path:
        """`begin` and `wait`."""
        final = self.begin(model, optimizer, config, batch)
        self.wait()
        return final

    def close(self) -> None:
        """Let a write that is under way come to its end.

        Not collective; what goes wrong now is logged.
        """
        save, self._save = self._save, None
        if save is not None:
            try:
                save.result()
            except Exception as error:  # noqa: BLE001 - the process ends for another reason, which is raised
                logger.error(
                    "Checkpoint %s was not written: %s", save.what, " ".join(str(error).split())
                )

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"{self.prefix}{step}"

    def _weights(self, model: Decoder, optimizer: MasterAdamW) -> Sequence[str]:
        """The parameters whose masters `_write_weights` wants, in this order."""
        return list(parameters(model.geometry))

    def _write_weights(
        self,
        model: Decoder,
        dtype: torch.dtype,
        weights: Iterator[tuple[str, Tensor]],
        draft: Path,
        moved: Callable[[], None],
    ) -> None:
        assert self._companions is not None
        write_checkpoint(draft, model.geometry, dtype, weights, self._companions, moved=moved)

    @contextmanager
    def _draft(
        self, final: Path, needed: int, moved: Callable[[], None], target: Path | None = None
    ) -> Iterator[Path]:
        """A folder to write into, which gets its name when all of it is on the disk.

        Args:
            final: the checkpoint, for messages.
            needed: bytes that will be written.
            moved: called while there is progress.
            target: the name; by default `final`.
        """
        target = target or final
        draft = self.folder / f".{final.name}.draft-{os.getpid()}"
        try:
            self._require_own_run(final)
            if (
                final.exists() and not final.is_dir()
            ):  # no checkpoint of anyone's, and so not to be replaced
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_drafts()
            free = shutil.disk_usage(self.folder).free
            if free < needed:  # knowing beforehand is kinder than failing after gigabytes
                raise OSError(
                    0, f"it needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
                )
            yield draft
            flush(draft, moved)
            put_in_place(draft, target)
            flush_entry(
                target.parent
            )  # whoever is told that the step is saved may rely on it, whatever happens to the power
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            kept = "there was none before it"
            if self._whole is not None:
                kept = f"{self.path(self._whole).name} is untouched"
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            if isinstance(error, OSError) and error.errno in DISK_REFUSALS:
                reason += f" (it needs {needed / 1e9:.2f} GB)"
            raise CheckpointError(
                f"could not write checkpoint {final}: {reason}; {kept}; make room or change --save-path"
            ) from error

    def _require_own_run(self, final: Path) -> None:
        newest = marked_run(self.folder, self.prefix, skip_damaged=True)
        if newest is not None and newest.name == self.run.name and newest.epoch > self.run.epoch:
            raise CheckpointError(
                f"{final} is not written: a trainer that was started later goes on with {self.run} in this folder; "
                "stop one of the two"
            )

    def _remove_drafts(self) -> None:
        """Remove what dead processes left unfinished.

        A dead one may have had this process's id, as in a container.
        """
        with self._sweeping:
            for draft in self.folder.glob(f".{self.prefix}*.draft-*"):
                owner = int(draft.name.rpartition("-")[2])
                # Once swept, those of this process are being written or removed by its threads.
                if not self._swept if owner == os.getpid() else not Path(f"/proc/{owner}").exists():
                    logger.warning("Removing %s, which a process that died left unfinished", draft)
                    shutil.rmtree(draft)
            self._swept = True

    def _remove_old(self) -> None:
        """Of this run's own checkpoints alone: another run's state is all that it could be
        continued from.
        """
        known = saved_steps(self.folder, self.prefix, skip_damaged=True, without_state=True)
        saved = [one for one in known if one.run.name == self.run.name]
        saved.sort(key=lambda one: one.order)
        stateful = [one for one in saved if has_state(one.path)]
        # A server may be started again on the one, and training goes on exactly from the other.
        needed = [*[one for one in saved if self.in_use(one.step)][-1:], *stateful[-1:]]
        for one in saved[: -self.keep] if self.keep else []:
            if one not in needed:
                remove(one.path, self.folder)
                logger.info("Removed checkpoint %s (--keep-checkpoints %d)", one.path, self.keep)
        kept = len(stateful)
        if self.keep_states is not None:
            kept = self.keep_states
        for one in stateful[: max(0, len(stateful) - kept)]:
            if one.path.exists():
                write_whole(
                    one.path / TRAINER_FILE, (one.path / STATE_FOLDER / TRAINER_FILE).read_bytes()
                )
                remove(one.path / STATE_FOLDER, self.folder)
                what = "Removed the optimizer state of %s (--keep-optimizer-states %d); its weights stay"
                logger.info(what, one.path, self.keep_states)


def _write_record(folder: Path, trainer: dict[str, Any]) -> None:
    (folder / TRAINER_FILE).write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")
