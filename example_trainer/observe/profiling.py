"""Where a step's time and memory go: torch's profiler for chosen steps, and the history of a GPU's
memory.

A trace opens in https://ui.perfetto.dev, a snapshot in https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from example_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_EVENTS = 200_000
"""Allocations that the history of memory keeps, the newest ones; about 1 KiB each, with where they
were made."""


class StepProfiler:
    """Writes one trace of the steps that --profile names. Does nothing before and after them.

    Args:
        steps: one after the other, counted from 1; empty for none.
        folder: gets `steps_3-5.rank0.json.gz`.
        rank: of this process.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, steps: range, folder: Path, rank: int = 0) -> None:
        self._steps = steps
        self._profile: profile | None = None
        if steps:
            _make(folder, "--profile")
            self._path = folder / f"steps_{steps[0]}-{steps[-1]}.rank{rank}.json.gz"

    def begin(self, step: int) -> None:
        """A step begins, and with it the trace if it is the first of them; behind the last one the
        trace is written.
        """
        if step not in self._steps:
            self.close()
        elif self._profile is None:
            activities = [ProfilerActivity.CPU] + [
                ProfilerActivity.CUDA
            ] * torch.cuda.is_available()
            self._profile = profile(activities=activities)
            self._profile.start()

    def close(self) -> None:
        """Write the trace that has begun, if one has."""
        begun, self._profile = self._profile, None
        if begun is None:
            return
        begun.stop()
        try:
            begun.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            # The run is worth more than its trace, and half a trace is worth nothing.
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            logger.warning(
                "--profile: cannot write %s: %s; make room, or give another --log-dir",
                self._path,
                error,
            )
            return
        logger.info("Profile of steps %d to %d: %s", self._steps[0], self._steps[-1], self._path)


@contextmanager
def memory_history(
    wanted: bool, device: torch.device, folder: Path, rank: int = 0
) -> Iterator[None]:
    """Record where GPU memory is taken and given back in the with block, if that is wanted.

    Writes `memory.rank0.pickle` at its end, and `out_of_memory_1.rank0.pickle` and so on in the
    moment in which memory runs out, when what fills it is still there.

    Raises:
        ConfigError: the device is no GPU, or the folder cannot be made.
    """
    if not wanted:
        yield
        return
    if device.type != "cuda":
        raise ConfigError(
            f"--memory-snapshot records the memory of a GPU, and --device is {device}: torch keeps none of a CPU's; leave it "
            "out here"
        )
    _make(folder, "--memory-snapshot")
    shortages = 0

    def ran_out(device_index: int, wanted_bytes: int, limit: int, free: int) -> None:
        nonlocal shortages
        shortages += 1
        _write_snapshot(folder / f"out_of_memory_{shortages}.rank{rank}.pickle")

    torch.cuda.memory._record_memory_history(max_entries=_EVENTS, stacks="python")
    torch._C._cuda_attach_out_of_memory_observer(ran_out)  # type: ignore[attr-defined]  # in builds for GPUs alone
    try:
        yield
    finally:
        _write_snapshot(folder / f"memory.rank{rank}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


def _write_snapshot(path: Path) -> None:
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning(
            "--memory-snapshot: cannot write %s: %s; make room, or give another --log-dir",
            path,
            error,
        )
        return
    logger.info("Memory snapshot: %s", path)


def _make(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag} cannot write to {folder}: {error.strerror or error}; give another --log-dir"
        ) from error
