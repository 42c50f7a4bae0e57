"""Regions of tensors: which elements of one tensor a copy takes, and where in another it puts them.

Pure arithmetic on the standard library. A region lists elements of a tensor's memory in row-major
order of its shape, as PyTorch's `as_strided` does. All numbers count elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class NotARegion(ValueError):
    """Elements that are not evenly spaced, so that no single region lists them."""


@dataclass(frozen=True)
class Region:
    """Elements at `offset` plus multiples of `strides`, in row-major order of `shape`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def elements(self) -> list[int]:
        """The position of each element, in order."""
        positions = [self.offset]
        for length, stride in zip(self.shape, self.strides, strict=True):
            positions = [start + i * stride for start in positions for i in range(length)]
        return positions


@dataclass(frozen=True)
class Copied:
    """A copy from a region of one tensor to a region of another, element by element.

    Attributes:
        source, target: of equal shape.
    """

    source: Region
    target: Region


def row_major(shape: Sequence[int], offset: int = 0) -> Region:
    """The region of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= length
    return Region(offset, tuple(shape), tuple(strides))


def whole(copied: Copied) -> Copied:
    """Return the same copy in the fewest dimensions, in the order of the target's memory.

    Two copies of the same elements between the same places have the same form.
    """
    dims = sorted(
        (
            dim
            for dim in zip(
                copied.source.shape, copied.source.strides, copied.target.strides, strict=True
            )
            if dim[0] != 1
        ),
        key=lambda dim: -dim[2],
    )
    merged: list[tuple[int, int, int]] = []
    for length, source, target in dims:
        if merged:
            outer, outer_source, outer_target = merged[-1]
            if (outer_source, outer_target) == (length * source, length * target):
                merged[-1] = (outer * length, source, target)
                continue
        merged.append((length, source, target))
    lengths, sources, targets = zip(*(merged or [(1, 1, 1)]), strict=True)
    return Copied(
        Region(copied.source.offset, lengths, sources),
        Region(copied.target.offset, lengths, targets),
    )


def runs(copied: Copied) -> Iterator[Copied]:
    """Cut a copy into copies whose targets are contiguous, in the order of the target's memory."""
    copied = whole(copied)
    source, target = copied.source, copied.target
    if target.strides == row_major(target.shape).strides:
        yield copied
        return
    for i in range(source.shape[0]):
        yield from runs(
            Copied(
                Region(source.offset + i * source.strides[0], source.shape[1:], source.strides[1:]),
                Region(target.offset + i * target.strides[0], target.shape[1:], target.strides[1:]),
            )
        )


def through(copied: Copied, base: Region) -> Copied:
    """Return a copy from memory that is not contiguous.

    Args:
        copied: a copy from a contiguous tensor of the shape of `base`.
        base: the region that this tensor stands for, such as the region that it was cloned from.

    Returns:
        the copy from the memory that `base` refers to. Its dimensions may be more.

    Raises:
        NotARegion: the elements are not evenly spaced there.
    """
    base = whole(Copied(base, row_major(base.shape))).source
    steps = row_major(base.shape).strides
    rest, last = copied.source.offset, []
    for step in steps:
        last.append(rest // step)
        rest %= step
    offset = base.offset + sum(
        index * stride for index, stride in zip(last, base.strides, strict=True)
    )
    shape: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    view = copied.source
    for length, stride, target in zip(view.shape, view.strides, copied.target.strides, strict=True):
        for part, spacing in _spread(length, stride, base, steps, last):
            length //= part
            shape.append(part)
            sources.append(spacing)
            targets.append(target * length)
    return Copied(
        Region(offset, tuple(shape), tuple(sources)),
        Region(copied.target.offset, tuple(shape), tuple(targets)),
    )


def _spread(
    length: int, stride: int, base: Region, steps: Sequence[int], last: list[int]
) -> list[tuple[int, int]]:
    """Return (length, spacing in memory) of the dimensions that one of a view becomes.

    Args:
        length, stride: of the view's dimension.
        steps: the strides of a contiguous tensor of the shape of `base`.
        last: the index of the view's last element in each dimension of `base`, as far as its
            dimensions were looked at. This one's length is added.
    """
    if length == 1 or not stride:
        return [(length, 0)]
    axis = next(i for i, step in enumerate(steps) if step <= stride)
    every = stride // steps[axis]
    if stride % steps[axis]:
        raise NotARegion(f"a stride of {stride} over rows of {steps[axis]} elements")
    if last[axis] + (length - 1) * every < base.shape[axis]:
        last[axis] += (length - 1) * every
        return [(length, every * base.strides[axis])]
    per_row = base.shape[axis] // every
    if not axis or base.shape[axis] % every or last[axis] >= every or length % per_row:
        raise NotARegion(f"{length} elements that begin in the middle of rows of {per_row}")
    last[axis] += (per_row - 1) * every
    outer = _spread(length // per_row, stride * per_row, base, steps, last)
    return [*outer, (per_row, every * base.strides[axis])]


@dataclass(frozen=True)
class Coverage:
    """The elements of a tensor that no copy fills, or that several copies fill, as ranges."""

    missing: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...]


def coverage(size: int, ranges: Iterable[tuple[int, int]]) -> Coverage:
    """Compare ranges of elements with a tensor of `size` elements.

    Args:
        ranges: first element and one past the last, of each copy.
    """
    missing, doubled, end = [], [], 0
    for first, last in sorted(ranges):
        if first > end:
            missing.append((end, first))
        if first < end:
            doubled.append((first, min(end, last)))
        end = max(end, last)
    if end < size:
        missing.append((end, size))
    return Coverage(tuple(missing), tuple(doubled))
