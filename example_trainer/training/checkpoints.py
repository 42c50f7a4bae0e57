"""Checkpoints: `step_N/` is a Hugging Face checkpoint, with what the next step needs in
`step_N/trainer_state/`.

A checkpoint is written beside its place and renamed into it. So the weights in a folder called
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
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atroposlib.utils.files import DISK_REFUSALS, remedy, write_whole
from example_trainer.config import TrainerConfig
from example_trainer.errors import CheckpointError, TrainerError
from example_trainer.models import Decoder
from example_trainer.models.hf_checkpoint import companions, write_checkpoint
from example_trainer.models.lora.peft_format import AdapterWriter
from example_trainer.models.lora.settings import base_model_name
from example_trainer.models.safetensors_writer import write_safetensors
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.optimizer import HostArena, MasterAdamW, free_host_memory
from example_trainer.training.runs import (
    PREFIX,
    STATE_FOLDER,
    TRAINER_FILE,
    Run,
    SavedStep,
    Start,
    TrainedBatch,
    has_state,
    marked_run,
    saved_steps,
)
from vllm_patching.weights.families import parameters

# Folders that are whole on the disk, or not there.

logger = logging.getLogger(__name__)


def flush(folder: Path, moved: Callable[[], None]) -> None:
    """Make sure that everything in it is on the disk before the folder gets its name."""
    for path in [*sorted(folder.rglob("*")), folder]:
        flush_entry(path)
        moved()


def flush_entry(path: Path) -> None:
    """Put a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, folder: Path) -> None:
    """Take a folder away at once: what has its name is whole, until nothing has."""
    gone = folder / f".{path.relative_to(folder).parts[0]}.{path.name}.old.draft-{os.getpid()}"
    path.rename(gone)
    shutil.rmtree(gone)


def put_in_place(draft: Path, final: Path) -> None:
    """Give a folder that is whole its name; one that has the name is removed afterwards."""
    if not final.exists():
        draft.rename(final)
        return
    logger.warning("Replacing checkpoint %s, which was there before", final)
    old = draft.with_name(draft.name.replace(".draft-", ".old.draft-"))
    final.rename(old)
    draft.rename(final)
    shutil.rmtree(old, ignore_errors=True)  # the next trainer removes what is left


# Saving while training goes on: the state of one step is held still, and a thread of each rank
# writes it or hands it on.
#
# Masters and moments change in `MasterAdamW.step` alone. So they are copied to host memory while
# the next batch is forwarded and goes backward. The next step waits until that has been done, which
# it usually has. Where the host has no room for a copy, they are read where they are, and the next
# step waits until they have been written.
#
# With several ranks each copies its own part, independently of the others. The parts meet on rank 0
# one tensor at a time, over a process group of their own. So nothing waits for the disk and no rank
# needs memory for the whole.


STALLED_SECONDS = 600.0
"""After so long without any progress a save counts as failed."""
_SHARE_OF_FREE_MEMORY = {"cuda": 0.7, "cpu": 0.25}
"""Share of the free memory that a copy may take, by the device: on a CPU, training needs it."""
_SENT_AT_ONCE = 64 << 20
"""Elements in one message between ranks."""

Write = Callable[[Iterator[tuple[str, Tensor]], Callable[[], None]], None]


class HostCopy:
    """The host memory that states are copied into, taken once and used for every checkpoint.

    Args:
        optimizer: whose state it is for.
        ranks_here: processes that share this machine's memory.
        weights_only: checkpoints hold no optimizer state, so the masters alone are copied.
    """

    def __init__(
        self, optimizer: MasterAdamW, ranks_here: int = 1, weights_only: bool = False
    ) -> None:
        self._optimizer, self._ranks_here, self._weights_only = optimizer, ranks_here, weights_only
        self._tensors: dict[str, Tensor] | None = None
        self._lock, self._taken = threading.Lock(), False

    def prepare(self) -> None:
        """Begin to take the memory, in a thread, so that the first checkpoint need not wait for it."""
        threading.Thread(target=self.tensors, name="memory for checkpoints", daemon=True).start()

    def tensors(self) -> dict[str, Tensor] | None:
        """The tensors to copy into, by key; None if the machine has too little memory to spare.

        Takes seconds for each 10 GB when called first.
        """
        with self._lock:
            if not self._taken:
                self._taken = True
                self._take()
        return self._tensors

    def _take(self) -> None:
        state = self._optimizer.state_dict()
        if self._weights_only:
            state = {key: tensor for key, tensor in state.items() if key.startswith("master.")}
        needed, free = (
            sum(tensor.nbytes for tensor in state.values()),
            free_host_memory()[0] // self._ranks_here,
        )
        reason = f"{free / 1e9:.1f} GB of memory are free"
        if needed <= _SHARE_OF_FREE_MEMORY[self._optimizer.device.type] * free:
            try:
                copies: dict[str, Tensor] = {}
                for dtype in {tensor.dtype for tensor in state.values()}:
                    shapes = {
                        key: tuple(tensor.shape)
                        for key, tensor in state.items()
                        if tensor.dtype == dtype
                    }
                    copies |= HostArena(shapes, self._optimizer.device, dtype).tensors
                self._tensors = copies
                return
            except TrainerError as error:
                reason = str(error)
        logger.warning(
            "Checkpoints are written without a copy, which takes %.1f GB (%s): an optimizer step "
            "that comes before then waits "
            "until they are on the disk", needed / 1e9, reason,
        )  # fmt: skip


class BackgroundSave:
    """One checkpoint on its way to the disk.

    Args:
        what: is saved, for messages.
        optimizer: its state is that of the checkpoint; it waits for the reading.
        memory: to copy into.
        keys: of the state, in the order in which the tensors are wanted; a key may come twice. The
            same on every rank.
        write: called in a thread of rank 0, with the whole tensors in host memory, one at a time.
            It also gets a function to call again and again while there is progress.
        ranks, group: of the trainer, and the group over which the parts meet; None for one rank.
    """

    def __init__(
        self,
        what: str,
        optimizer: MasterAdamW,
        memory: HostCopy,
        keys: Sequence[str],
        write: Write,
        ranks: Ranks,
        group: Any,
    ) -> None:
        self.what = what
        self._optimizer, self._memory, self._keys, self._write = optimizer, memory, keys, write
        self._ranks, self._group = ranks, group
        state = optimizer.state_dict()
        self._state = {key: state[key] for key in keys}
        self._error: BaseException | None = None
        self._read, self._done = threading.Event(), threading.Event()
        self._moved_at = time.monotonic()
        device = optimizer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream(device)
            )  # the step that made this state
        optimizer.wait_for_readers = partial(self._wait, self._read)
        self._thread = threading.Thread(target=self._run, name=f"saving {what}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether this rank's part of it has ended, well or not."""
        return self._done.is_set()

    def moved(self) -> None:
        """Note that there is progress."""
        self._moved_at = time.monotonic()

    def result(self) -> None:
        """Wait until it has ended, and raise what it failed with.

        Raises:
            CheckpointError: it could not be written, or has made no progress for too long.
        """
        self._wait(self._done)
        self._thread.join(timeout=STALLED_SECONDS)  # it has nothing left to do
        if self._error is not None:
            raise self._error

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(1.0):
            if time.monotonic() - self._moved_at > STALLED_SECONDS:
                raise CheckpointError(
                    f"writing {self.what} has made no progress for {STALLED_SECONDS:.0f} s; look at the disk of --save-path"
                )

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._save()
            else:
                with torch.cuda.device(self._optimizer.device), torch.cuda.stream(self._stream):
                    self._save()
        except BaseException as error:  # noqa: BLE001 - raised where the checkpoint is waited for
            self._error = error
        finally:
            self._read.set()
            self._done.set()

    def _save(self) -> None:
        copies = self._memory.tensors()
        if copies is not None:
            for key, tensor in self._state.items():
                copies[key].copy_(tensor, non_blocking=True)
                self.moved()
            if self._stream is not None:
                self._stream.synchronize()
            self._state = copies
            self._read.set()
        if not self._ranks.is_main:
            self._hand_on()
            return
        tensors = self._gathered()
        try:
            self._write(tensors, self.moved)
        finally:
            deque(tensors, maxlen=0)  # the other ranks send, whether or not rank 0 can write

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        shards = self._optimizer.shards
        for key in self._keys:
            name, parts, kind = (
                key.partition(".")[2],
                [self._state[key].cpu()],
                self._optimizer.kind_of(key),
            )
            for rank in range(1, self._ranks.world_size):
                part = torch.empty(shards.local_shape(name, rank, kind.block), dtype=kind.dtype)
                self._exchange(part, partial(self._receive, rank))
                parts.append(part)
            yield key, shards.joined(name, parts, kind.block)

    def _hand_on(self) -> None:
        for key in self._keys:
            self._exchange(
                self._state[key].cpu().contiguous(),
                lambda message: self._group.send([message], 0, 0),
            )

    def _receive(self, rank: int, message: Tensor) -> Any:
        return self._group.recv([message], rank, 0)

    def _exchange(self, tensor: Tensor, start: Callable[[Tensor], Any]) -> None:
        for message in tensor.view(-1).split(_SENT_AT_ONCE) if tensor.numel() else ():
            try:
                start(message).wait()
            except RuntimeError as error:
                raise self._ranks.lost(f"writing {self.what}", error) from error
            self.moved()


OPTIMIZER_FILE = "optimizer.safetensors"


def load_state(saved: SavedStep, optimizer: MasterAdamW) -> None:
    """Put the optimizer where it was when a checkpoint was saved.

    Without an optimizer state the masters stay as they are, which is the checkpoint's weights.
    AdamW's moments and the count that corrects them begin at zero.

    Raises:
        CheckpointError: the state is unreadable, or of another model.
    """
    if not has_state(saved.path):
        optimizer.steps, optimizer.updates = saved.step, 0
        logger.warning(
            "%s keeps no optimizer state: training goes on from its weights, with moments at zero "
            "and masters as precise as those weights. So it is not exactly the run without a "
            "break (--keep-optimizer-states 1 keeps the newest state)",
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
        if checkpoints.written(): ...                           # now it may be acknowledged
        checkpoints.wait()                                      # before the process ends

    Args:
        folder: created when the first one is saved.
        run: whose checkpoints they are. Other runs' checkpoints stay, but for steps that
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
            unacknowledged: earlier ones in these weights that are not acknowledged at the rollout service
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
        self._read_companions(model)
        # A restart of vLLM has written the weights of its step already.
        names = [] if self._weights_step == step else self._weights(model, optimizer)
        states = [] if self.keep_states == 0 else list(optimizer.state_dict())
        self.last = step
        if not names and not states:
            self._complete(final)
            return final
        write = partial(
            self._write, model, model.dtype, names, optimizer.whole_state() if states else {},
            optimizer.whole_shapes, final, self._record(optimizer, config, batch, unacknowledged),
        )  # fmt: skip
        keys = [*(f"master.{name}" for name in names), *states]
        self._save = BackgroundSave(
            final.name, optimizer, self._memory, keys, write, self.ranks, self._group
        )
        return final

    def _write(
        self,
        model: Decoder,
        dtype: torch.dtype,
        names: Sequence[str],
        states: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        shapes: Mapping[str, tuple[int, ...]],
        final: Path,
        record: dict[str, Any],
        tensors: Iterator[tuple[str, Tensor]],
        moved: Callable[[], None],
    ) -> None:
        """Write a checkpoint; in the thread that saves on rank 0.

        Args:
            dtype: of the weights.
            names: parameters whose weights are written; empty if the folder has the weights.
            states: dtypes and shapes of the optimizer's state; empty if none is kept.
            shapes: of the whole parameters.
            record: content of trainer.json.
            tensors: masters of `names`, then the state.
            moved: called while there is progress.
        """
        needed = sum(kind.itemsize * math.prod(shape) for kind, shape in states.values())
        if names:
            needed += dtype.itemsize * sum(map(math.prod, shapes.values()))
        target = final if names else final / STATE_FOLDER
        masters = ((key.partition(".")[2], tensor) for key, tensor in islice(tensors, len(names)))
        with self._draft(final, needed, moved, target) as draft:
            state = draft
            if names:
                self._write_weights(model, dtype, masters, draft, moved)
                if states:
                    state = draft / STATE_FOLDER
            if states:
                state.mkdir(parents=True)
                write_safetensors(state / OPTIMIZER_FILE, states, tensors, moved=moved)
            _write_record(state, record)
        if not names:
            (final / TRAINER_FILE).unlink(missing_ok=True)  # the state has it now
        self._complete(final)

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

        An earlier checkpoint may still be on its way to the disk. `begin` adds the optimizer's
        state. Only for a trainer of one rank. The arguments are the same as for `begin`.

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
            "layout": optimizer.shards.layout,
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
        """Return whether this rank is still busy with what was begun last."""
        return self._save is not None and not self._save.done

    def written(self) -> bool:
        """Return whether the checkpoint that was begun last is complete on the disk. Collective;
        asks, and does not wait.

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
        return [name for name, one in parameters(model.geometry).items() if not one.frozen]

    def _write_weights(
        self,
        model: Decoder,
        dtype: torch.dtype,
        weights: Iterator[tuple[str, Tensor]],
        draft: Path,
        moved: Callable[[], None],
    ) -> None:
        assert self._companions is not None
        held = model.held_tensors()

        def every() -> Iterator[tuple[str, Tensor]]:
            for name, one in parameters(model.geometry).items():
                yield (name, held[name].cpu()) if one.frozen else next(weights)

        write_checkpoint(draft, model.geometry, dtype, every(), self._companions, moved=moved)

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
            flush_entry(target.parent)  # a saved step survives a power failure
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            kept = "there was none before it"
            if self._whole is not None:
                kept = f"{self.path(self._whole).name} is untouched"
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            if isinstance(error, OSError) and error.errno in DISK_REFUSALS:
                reason += f" (it needs {needed / 1e9:.2f} GB)"
            raise CheckpointError(
                f"could not write checkpoint {final}: {reason}; {kept}; {remedy(error, 'change --save-path')}"
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
                # Once swept, this process's drafts are being written or removed by its threads.
                if not self._swept if owner == os.getpid() else not Path(f"/proc/{owner}").exists():
                    logger.warning("Removing %s, which a process that died left unfinished", draft)
                    shutil.rmtree(draft)
            self._swept = True

    def _remove_old(self) -> None:
        """Remove old checkpoints of this run. Another run's states stay: that run is continued from
        them.
        """
        checkpoints = saved_steps(self.folder, self.prefix, skip_damaged=True, without_state=True)
        saved = [one for one in checkpoints if one.run.name == self.run.name]
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


# Checkpoints of a run that trains adapters: `adapter_step_N/` in PEFT's format, the optimizer's
# state beside it.

ADAPTER_PREFIX = "adapter_step_"


class AdapterCheckpoints(Checkpoints):
    """As Checkpoints, of the adapters alone: the base model is named in adapter_config.json, not
    copied.

    Args:
        writer: writes the model's adapters.
    """

    prefix = ADAPTER_PREFIX

    def __init__(
        self,
        folder: Path,
        run: Run,
        keep_states: int | None,
        last: int | None,
        writer: AdapterWriter,
        keep: int = 0,
    ) -> None:
        super().__init__(folder, run, keep_states, last, keep=keep)
        self._writer = writer

    def _weights(self, model: Decoder, optimizer: MasterAdamW) -> Sequence[str]:
        return list(optimizer.masters)

    def _write_weights(
        self,
        model: Decoder,
        dtype: torch.dtype,
        weights: Iterator[tuple[str, Tensor]],
        draft: Path,
        moved: Callable[[], None],
    ) -> None:
        self._writer.write(draft, dict(weights))


def checkpoint_prefix(config: TrainerConfig) -> str:
    """Return the beginning of the names of this run's checkpoints."""
    if config.lora:
        return ADAPTER_PREFIX
    return PREFIX


def make_checkpoints(
    config: TrainerConfig,
    model: Decoder,
    start: Start,
    ranks: Ranks,
    restarts_at: Callable[[int], bool],
) -> Checkpoints:
    """Where the run saves: `step_N/`, or `adapter_step_N/` in PEFT's format. `restarts_at` is the
    bridge's.
    """
    last = states = None
    if start.saved:
        last = start.saved.step
    if config.keep_optimizer_states != "all":
        states = config.keep_optimizer_states
    if not config.lora:

        def in_use(step: int) -> bool:
            # A server that dies is started again on the checkpoint that it had: at first, the
            # checkpoint that training went on from.
            return step == last or restarts_at(step)

        return Checkpoints(
            config.save_path, start.run, states, last, ranks, config.keep_checkpoints, in_use
        )
    writer = AdapterWriter(model, config.lora, base_model_name(config.model_name))
    return AdapterCheckpoints(
        config.save_path, start.run, states, last, writer, config.keep_checkpoints
    )
