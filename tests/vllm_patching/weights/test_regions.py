"""The arithmetic of regions, against PyTorch's own views of numbered elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_patching.weights.regions import (
    Copied,
    Coverage,
    NotARegion,
    Region,
    coverage,
    row_major,
    runs,
    through,
    whole,
)

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def region_of(tensor: torch.Tensor) -> Region:
    return Region(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def read(region: Region, memory: torch.Tensor) -> torch.Tensor:
    return memory.as_strided(region.shape, region.strides, region.offset).reshape(-1)


@st.composite
def views(draw: st.DrawFn) -> Callable[[torch.Tensor], torch.Tensor]:
    """A few of the operations that loaders use to cut tensors."""
    steps: list[tuple[int, ...]] = draw(
        st.lists(st.tuples(*[st.integers(0, 5)] * 4), min_size=0, max_size=4)
    )

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for kind, *numbers in steps:
            dim = numbers[0] % tensor.dim()
            length = tensor.shape[dim]
            start = numbers[1] % length
            if kind in (0, 1):
                tensor = tensor.narrow(dim, start, 1 + numbers[2] % (length - start))
            elif kind == 2:
                tensor = tensor.transpose(dim, numbers[1] % tensor.dim())
            elif kind == 3 and tensor.dim() > 1:
                tensor = tensor.select(dim, start)
            elif kind == 4 and length % 2 == 0:
                tensor = tensor.unflatten(dim, (2, length // 2))
            elif kind == 5 and tensor.is_contiguous():
                tensor = tensor.reshape(-1)
        return tensor

    return cut


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, first=views(), second=views())
def test_a_view_of_a_copy_of_a_view_lists_the_same_elements(
    shape: tuple[int, ...], first: Callable, second: Callable
) -> None:
    memory = torch.arange(torch.Size(shape).numel())
    base = first(memory.view(shape))
    view = second(base.contiguous().clone().reshape(base.shape))
    try:
        copied = through(Copied(region_of(view), region_of(view)), region_of(base))
    except NotARegion:
        # Only where the elements are unevenly spaced in memory.
        elements = view.reshape(-1)
        assert len(elements.diff().unique()) > 1
        return
    assert torch.equal(read(copied.source, memory), view.reshape(-1))
    assert torch.equal(read(copied.target, base.reshape(-1).clone()), view.reshape(-1))


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, cut=views())
def test_the_short_form_and_the_runs_of_a_copy_list_the_same_pairs(
    shape: tuple[int, ...], cut: Callable
) -> None:
    memory = torch.arange(torch.Size(shape).numel()).view(shape)
    target = region_of(cut(memory))
    copied = Copied(row_major(target.shape, offset=7), target)
    pairs = sorted(zip(copied.target.elements(), copied.source.elements(), strict=True))
    short = whole(copied)
    assert sorted(zip(short.target.elements(), short.source.elements(), strict=True)) == pairs
    assert len(short.target.shape) <= max(1, len(target.shape))
    pieces = list(runs(copied))
    listed = [
        pair
        for piece in pieces
        for pair in zip(piece.target.elements(), piece.source.elements(), strict=True)
    ]
    assert listed == pairs, "in the order of the target's memory, each once"
    for piece in pieces:
        first = piece.target.offset
        assert piece.target.elements() == list(range(first, first + piece.target.size))


def test_equal_copies_have_one_form() -> None:
    """A tensor copied whole, row by row or as a matrix."""
    forms = {
        whole(Copied(row_major(shape, 4), row_major(shape)))
        for shape in ((24,), (4, 6), (2, 1, 12), (1, 24))
    }
    assert forms == {Copied(Region(4, (24,), (1,)), Region(0, (24,), (1,)))}


def test_uneven_elements_are_refused() -> None:
    columns = Region(0, (3, 2), (10, 1))
    for view, reason in (
        (Region(1, (3,), (1,)), "middle of rows"),
        (Region(0, (2,), (3,)), "a stride of 3 over rows of 2"),
    ):
        with pytest.raises(NotARegion, match=reason):
            through(Copied(view, row_major(view.shape)), columns)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(0, 30),
    ranges=st.lists(
        st.tuples(st.integers(0, 29), st.integers(1, 10)).map(lambda r: (r[0], r[0] + r[1])),
        max_size=6,
    ),
)
def test_coverage_counts_every_element(size: int, ranges: list[tuple[int, int]]) -> None:
    ranges = [(first, min(last, size)) for first, last in ranges if first < size]
    hits = [sum(first <= i < last for first, last in ranges) for i in range(size)]
    result = coverage(size, ranges)
    missing = {i for first, last in result.missing for i in range(first, last)}
    doubled = {i for first, last in result.doubled for i in range(first, last)}
    assert missing == {i for i, hit in enumerate(hits) if hit == 0}
    assert doubled == {i for i, hit in enumerate(hits) if hit > 1}
    assert coverage(4, [(2, 4), (0, 2)]) == Coverage((), ())
