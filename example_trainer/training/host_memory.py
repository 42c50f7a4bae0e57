"""Tensors in host memory that a GPU reads and writes at full speed, and work on them in buckets
that pass through the GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from example_trainer.errors import TrainerError

BUCKET_ELEMENTS = 32 << 20
"""Elements of each kind of tensor that are on the GPU at once: large enough that a copy over the
bus runs at its full rate."""
SLOTS = 3
"""Buckets on the device at the same time: one comes, one is worked on, one goes."""
_ALIGNED = 16
"""Elements; every piece of a tensor but its last is a multiple of them, so that cutting changes no
vectorised loop's tail."""


def free_host_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Bytes of RAM free and in all, within the limit of this process's control group.

    What files lie in for speed is free.
    """
    lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    values = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")
    }
    free, total = values["MemAvailable"], values["MemTotal"]
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        free, total = min(free, max(0, limit - used + _cached_files(cgroup / "memory.stat"))), limit
    return free, total


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" where there is no limit


def _cached_files(path: Path) -> int:
    """Bytes of the control group that the kernel takes back when they are needed: what checkpoints
    were read into, mostly.
    """
    try:
        words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(size) for name, size in words if name in ("active_file", "inactive_file"))


@dataclass(frozen=True)
class Kind:
    """A kind of tensor that exists for each of several parameters.

    Attributes:
        name: of the kind, such as `exp_avg`.
        dtype: of its elements.
        block: consecutive elements of the parameter for which there is one element.
        shaped: makes the tensor's shape of the parameter's; not given: the same.
    """

    name: str
    dtype: torch.dtype = torch.float32
    block: int = 1
    shaped: Callable[[Sequence[int]], tuple[int, ...]] = tuple

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape, for a parameter of that shape."""
        return self.shaped(parameter)


class HostArena:
    """One block of host memory with named tensors of one dtype in it, page-locked if a GPU is to
    copy them.

    torch's own pinned memory is not used: its allocator takes the next power of two, up to twice
    what is asked for.

    Args:
        shapes: of the tensors; they lie in this order, zeros at first.
        device: the one that copies. On a CPU nothing is locked.
        dtype: of the tensors.
        aligned: elements; each tensor begins at a multiple of them.

    Raises:
        TrainerError: the machine has no such memory, or does not let it be locked.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        aligned: int = _ALIGNED,
    ) -> None:
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) // aligned) * aligned
        try:
            self.flat = torch.empty(end, dtype=dtype)
        except RuntimeError as error:
            size = end * dtype.itemsize / 2**30
            raise TrainerError(
                f"{size:.2f} GiB of host memory cannot be allocated: {error}"
            ) from error
        self.flat.zero_()  # which takes the pages
        self.tensors = {
            name: self.flat[self.offsets[name] : self.offsets[name] + math.prod(shape)].view(*shape)
            for name, shape in shapes.items()
        }
        if device.type == "cuda" and end:
            self._lock_pages(device)

    def _lock_pages(self, device: torch.device) -> None:
        # In one call: the driver refuses copies that reach from one locked range into the next.
        driver, start = torch.cuda.cudart(), self.flat.data_ptr()
        with torch.cuda.device(device):
            status = int(driver.cudaHostRegister(start, self.flat.nbytes, 0))
        if status != 0:
            raise TrainerError(
                f"the driver does not lock {self.flat.nbytes / 2**30:.2f} GiB of host memory for the GPU (CUDA error "
                f"{status}); look at the memory that is free, and at this container's limit"
            )
        weakref.finalize(self, driver.cudaHostUnregister, start).atexit = False


@dataclass(frozen=True)
class Piece:
    """Whole rows of one tensor (elements, of a vector) that lie in a bucket.

    Attributes:
        name: of the tensor.
        start, stop: its rows.
        offset: of the first element in the bucket.
        shape: of the piece.
    """

    name: str
    start: int
    stop: int
    offset: int
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor of the same shape."""
        return tensor[self.start : self.stop]


@dataclass(frozen=True)
class Bucket:
    """A range of the arenas, and what lies in it."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def cut(shapes: Mapping[str, Sequence[int]], offsets: Mapping[str, int], most: int) -> list[Bucket]:
    """Buckets of at most `most` elements, as long as the rows of the tensors are no longer than
    that.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    begin = end = 0
    for name, shape in shapes.items():
        rows, width = shape[0], math.prod(shape[1:])
        step = _ALIGNED * max(1, most // (_ALIGNED * max(1, width)))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            first, last = offsets[name] + start * width, offsets[name] + stop * width
            if pieces and last - begin > most:
                buckets.append(Bucket(begin, end, tuple(pieces)))
                pieces, begin = [], first
            pieces.append(Piece(name, start, stop, first - begin, (stop - start, *shape[1:])))
            end = last
    return [*buckets, Bucket(begin, end, tuple(pieces))] if pieces else buckets


Work = Callable[[Sequence[Piece], Sequence[Sequence[Tensor]]], None]
"""Gets the pieces of a bucket and, for each arena, their tensors on the device; changes these in
place."""


class HostTensors:
    """Several arenas of the same named tensors, worked on by a device that does not hold them.

    Buckets pass through the device: while one is worked on, the next one comes and the one before
    goes back, each in a stream of its own (ZeRO-Offload, arXiv:2101.06840, whose arithmetic is on
    the CPU; here the GPU does it).

    Args:
        shapes: of the parameters, at least one dimension each.
        kinds: of tensors that there are for each parameter, one arena each; the first has the
            parameter's shape.
        device: the one that works.
        bucket_elements: of the first arena that are on the device at once.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        kinds: Sequence[Kind],
        device: torch.device,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.device, self._kinds = device, tuple(kinds)
        self.arenas = [
            HostArena(
                {name: kind.shape(shape) for name, shape in shapes.items()},
                device,
                kind.dtype,
                max(1, _ALIGNED // kind.block),
            )
            for kind in kinds
        ]
        self._buckets = cut(shapes, self.arenas[0].offsets, bucket_elements)
        longest = max((bucket.stop - bucket.start for bucket in self._buckets), default=0)
        self._slots: list[list[Tensor]] = []
        if device.type == "cuda":
            # Taken now: memory that ran out in the middle of a step would leave it half done.
            self._slots = [
                [
                    torch.empty(longest // kind.block, dtype=kind.dtype, device=device)
                    for kind in self._kinds
                ]
                for _ in range(SLOTS)
            ]
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @torch.no_grad()
    def work(self, count: int, work: Work, write_back: bool) -> None:
        """Call `work` for every bucket of the first `count` kinds in turn. Return when host memory
        holds the results.

        Args:
            write_back: whether it changes the tensors.
        """
        kinds, arenas = self._kinds[:count], self.arenas[:count]
        if not self._slots:
            for bucket in self._buckets:
                found = [
                    _range(arena.flat, bucket, kind)
                    for arena, kind in zip(arenas, kinds, strict=True)
                ]
                work(
                    bucket.pieces,
                    [_tensors(flat, bucket, kind) for flat, kind in zip(found, kinds, strict=True)],
                )
            return
        here = torch.cuda.current_stream(self.device)
        self._coming.wait_stream(here)
        left: list[torch.cuda.Event | None] = [None] * SLOTS
        for number, bucket in enumerate(self._buckets):
            slot = number % SLOTS
            parts = [
                _range(arena.flat, bucket, kind) for arena, kind in zip(arenas, kinds, strict=True)
            ]
            staged = [
                buffer[: part.numel()]
                for buffer, part in zip(self._slots[slot], parts, strict=False)
            ]
            before = left[slot]
            with torch.cuda.stream(self._coming):
                if before is not None:
                    self._coming.wait_event(before)
                for buffer, part in zip(staged, parts, strict=True):
                    buffer.copy_(part, non_blocking=True)
            here.wait_stream(self._coming)
            work(
                bucket.pieces,
                [
                    _tensors(buffer, bucket, kind)
                    for buffer, kind in zip(staged, kinds, strict=True)
                ],
            )
            self._going.wait_stream(here)
            with torch.cuda.stream(self._going):
                for buffer, part in zip(staged, parts, strict=True) if write_back else ():
                    part.copy_(buffer, non_blocking=True)
            left[slot] = self._going.record_event()
        self._going.synchronize()  # the host may read


def _range(flat: Tensor, bucket: Bucket, kind: Kind) -> Tensor:
    return flat[bucket.start // kind.block : bucket.stop // kind.block]


def _tensors(flat: Tensor, bucket: Bucket, kind: Kind) -> list[Tensor]:
    found = []
    for piece in bucket.pieces:
        start, shape = piece.offset // kind.block, kind.shape(piece.shape)
        found.append(flat[start : start + math.prod(shape)].view(shape))
    return found
