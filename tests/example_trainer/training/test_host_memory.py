"""Offloaded masters and moments: every element passes through the device once, and the bits equal
those of a step without it.
"""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from example_trainer.errors import NonFiniteError
from example_trainer.training.optimizer import HostArena, HostTensors, Kind, MasterAdamW, cut

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(0, 70)), st.tuples(st.integers(0, 70), st.integers(1, 9))),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.integers(1, 600))
def test_buckets_hold_every_row_once_in_order_and_keep_to_their_size(
    shapes: list[tuple[int, ...]], most: int
) -> None:
    named = {str(number): shape for number, shape in enumerate(shapes)}
    arena = HostArena(named, CPU)
    buckets = cut(named, arena.offsets, most)
    rows: dict[str, list[int]] = {name: [] for name in named}
    for bucket in buckets:
        widest = max(math.prod(piece.shape[1:]) for piece in bucket.pieces)
        assert bucket.stop - bucket.start <= max(most, 16 * widest)
        for piece in bucket.pieces:
            rows[piece.name] += range(piece.start, piece.stop)
            assert piece.stop == named[piece.name][0] or math.prod(piece.shape) % 16 == 0
            arena.tensors[piece.name][piece.start : piece.stop] += 1
            place = arena.flat[bucket.start : bucket.stop][
                piece.offset : piece.offset + math.prod(piece.shape)
            ]
            assert (
                place.data_ptr() == piece.of(arena.tensors[piece.name]).data_ptr()
                or not place.numel()
            )
    assert rows == {name: list(range(shape[0])) for name, shape in named.items()}
    assert all((tensor == 1).all() for tensor in arena.tensors.values())
    assert int(arena.flat.sum()) == sum(map(math.prod, shapes)), (
        "between the tensors there is nothing"
    )


def test_what_is_not_written_back_stays_and_what_is_lasts() -> None:
    tensors = HostTensors(
        {"a": (40, 3), "b": (5,)}, [Kind("x"), Kind("y")], CPU, bucket_elements=50
    )
    seen = []

    def work(pieces: object, kinds: object) -> None:
        seen.append(len(pieces))  # type: ignore[arg-type]
        for tensor in kinds[1]:  # type: ignore[index]
            tensor += 2

    tensors.work(2, work, write_back=True)
    assert len(seen) > 1
    assert [float(arena.flat.sum()) for arena in tensors.arenas] == [0.0, 2.0 * 125]


def test_tensors_outlive_what_locked_them() -> None:
    tensor = HostArena({"a": (3,)}, CPU).tensors["a"]
    gc.collect()
    tensor += 1
    assert tensor.tolist() == [1, 1, 1]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(23, 57, dtype=dtype)
        self.norm = nn.LayerNorm(57, dtype=dtype)
        self.last = nn.Linear(57, 19, bias=False, dtype=dtype)


def train(net: Net, optimizer: MasterAdamW, steps: int) -> list[float]:
    norms = []
    for step in range(steps):
        x = torch.randn(16, 23, generator=torch.Generator().manual_seed(step)).to(
            net.last.weight.dtype
        )
        net.last(net.norm(torch.tanh(net.first(x)))).float().square().mean().backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.write_weights()
    return norms


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 2000),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.booleans(),
)
def test_an_offloaded_step_has_the_bits_of_one_that_is_not(
    bucket: int, dtype: torch.dtype, clip: float, decays: bool
) -> None:
    options = {"lr": 0.03, "max_grad_norm": clip, "weight_decay": 0.1 * decays}
    one, two = Net(dtype), Net(dtype)
    resident = MasterAdamW(one, **options)  # type: ignore[arg-type]
    offloaded = MasterAdamW(two, **options, offload=True, bucket_elements=bucket)  # type: ignore[arg-type]
    assert train(one, resident, 4) == train(two, offloaded, 4)
    for (key, here), there in zip(
        resident.state_dict().items(), offloaded.state_dict().values(), strict=True
    ):
        assert torch.equal(here, there), key
    for (name, here), there in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(here, there), name


def test_an_offloaded_state_goes_into_one_that_is_not_and_back() -> None:
    first, second, third = Net(torch.bfloat16), Net(torch.bfloat16, 4), Net(torch.bfloat16, 5)
    source = MasterAdamW(first, lr=0.03, offload=True, bucket_elements=100)
    train(first, source, 2)
    for net, optimizer in (
        (second, MasterAdamW(second, lr=0.03)),
        (third, MasterAdamW(third, lr=0.03, offload=True, bucket_elements=333)),
    ):
        state = {key: tensor.clone() for key, tensor in source.state_dict().items()}
        optimizer.load_state(
            {key: tuple(t.shape) for key, t in state.items()}, state.__getitem__, 2
        )
        optimizer.write_weights()
        assert optimizer.steps == 2
        assert all(
            torch.equal(a, b) for a, b in zip(first.parameters(), net.parameters(), strict=True)
        )


def test_an_offloaded_weight_that_is_not_finite_is_named() -> None:
    net = Net(torch.float32)
    optimizer = MasterAdamW(net, lr=0.1, offload=True, bucket_elements=64)
    optimizer.masters["last.weight"][11, 3] = math.nan
    net.last(net.norm(net.first(torch.ones(2, 23)))).sum().backward()
    with pytest.raises(NonFiniteError, match=r"the weight last\.weight \(and 0 more\)"):
        optimizer.step()
    assert not optimizer.sound
