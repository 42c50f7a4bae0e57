"""The checksum changes with every bit, and does not depend on memory layout or chunking."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_patching.protocol import checksum
from vllm_patching.protocol.checksum import WeightSums, weights_checksum


def one(tensor: torch.Tensor, name: str = "w") -> str:
    return weights_checksum([(name, tensor)])


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.integers(1, 300),
    data=st.data(),
)
def test_any_flipped_bit_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    weights = torch.randn(size).to(dtype)
    position = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    before = one(weights)
    words = weights.clone().view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    flip = 1 << bit
    if bit == 8 * dtype.itemsize - 1:
        flip = -(1 << bit)
    words[position] = words[position] ^ flip
    assert one(words.view(dtype)) != before


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 300), data=st.data())
def test_two_exchanged_weights_change_it(size: int, data: st.DataObject) -> None:
    weights = torch.randn(size)
    i, j = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = weights.clone()
    swapped[i], swapped[j] = weights[j], weights[i]
    assert (one(swapped) == one(weights)) == bool(weights[i] == weights[j])


def test_names_and_order_count() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert weights_checksum([("a", a), ("b", b)]) != weights_checksum([("b", b), ("a", a)])
    assert one(a, "a") != one(a, "b")


def test_strides_do_not_count() -> None:
    weights = torch.randn(6, 8)
    assert one(weights[:, 2:5]) == one(weights[:, 2:5].contiguous())


def test_chunks_do_not_count(monkeypatch: object) -> None:
    weights = torch.randn(1000)
    whole = one(weights)
    monkeypatch.setattr(checksum, "_CPU_CHUNK", 7)  # type: ignore[attr-defined]
    assert one(weights) == whole


@settings(max_examples=30, deadline=None)
@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    start=st.integers(0, 2**34),
)
def test_the_sums_are_those_of_the_definition(bits: list[int], start: int) -> None:
    """In Python's integers, which never overflow; the GPU's kernel computes the same."""

    def signed(value: int, width: int) -> int:
        return (value + (1 << width - 1)) % (1 << width) - (1 << width - 1)

    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    plain, weighted, _ = checksum._torch_sums(values, None, 4 * start).tolist()
    weights = [signed((start + i) * checksum.GOLDEN | 1, 32) for i in range(len(bits))]
    assert plain == sum(bits)
    assert weighted == signed(sum(x * w for x, w in zip(bits, weights, strict=True)), 64)


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
)
def test_masters_are_summed_as_what_they_are_rounded_to(
    dtype: torch.dtype, values: list[float]
) -> None:
    """Also where rounding ends in infinity, which counts as what must not be served."""
    masters = torch.tensor(values)
    before = WeightSums([("w", masters)], rounded=dtype).all()
    written = torch.empty(len(values), dtype=dtype).copy_(masters)
    assert before == WeightSums([("w", written)]).all()
    assert bool(before.not_finite) == (not bool(written.isfinite().all()))


def test_nothing_has_a_checksum_too() -> None:
    assert len(weights_checksum([])) == 32
