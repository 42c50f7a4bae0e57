"""AdamW on masters, on the device or in host memory, against torch.optim.AdamW."""

from __future__ import annotations

import gc
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from example_trainer.errors import CheckpointError, NonFiniteError
from example_trainer.training.optimizer import (
    HostArena,
    HostTensors,
    Kind,
    MasterAdamW,
    cut,
    learning_rate_factor,
)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.last = nn.Linear(8, 3, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss_of(net: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).to(
        next(net.parameters()).dtype
    )
    return net(x).float().square().mean()


def take_step(net: nn.Module, optimizer: MasterAdamW, seed: int) -> float:
    loss_of(net, seed).backward()
    norm = optimizer.step().grad_norm
    optimizer.write_weights()
    return norm


def shapes_of(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_decay_acts_on_matrices_alone(in_8_bits: bool, offload: bool) -> None:
    """Biases of experts are stacked in a matrix, and so are norms of heads."""
    net = nn.Module()
    for name, module, shape in (
        ("experts", "weight", (2, 16, 256)),
        ("experts", "down_proj_bias", (16, 256)),
        ("q_norm", "weight", (16, 256)),
        ("embed", "weight", (16, 256)),
        ("linear", "bias", (256,)),
    ):
        owner = getattr(net, name, nn.Module())
        net.add_module(name, owner)
        owner.register_parameter(module, nn.Parameter(torch.ones(shape)))
    optimizer = MasterAdamW(net, lr=0.5, weight_decay=0.2, in_8_bits=in_8_bits, offload=offload)
    sum(parameter.sum() * 0.0 for parameter in net.parameters()).backward()
    optimizer.step()
    shrunk = {name for name, master in optimizer.masters.items() if not (master == 1).all()}
    assert shrunk == {"experts.weight", "embed.weight"}
    assert optimizer.masters["embed.weight"][0, 0] == pytest.approx(0.9)


@settings(deadline=None, max_examples=20)
@given(st.floats(1e-4, 1e-1), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.05, 10.0]))
def test_equals_torch_adamw(lr: float, weight_decay: float, max_grad_norm: float) -> None:
    ours, theirs = Net(), Net()
    optimizer = MasterAdamW(
        ours,
        lr=lr,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        betas=(0.9, 0.99),
        eps=1e-7,
    )
    groups = [
        {"params": [theirs.first.weight, theirs.last.weight], "weight_decay": weight_decay},
        {"params": [theirs.first.bias], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), eps=1e-7)
    for step in range(5):
        norm = take_step(ours, optimizer, step)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or math.inf)
        reference.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5, msg=name)


def test_the_model_changes_only_when_weights_are_written() -> None:
    net = Net(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = MasterAdamW(net, lr=0.1)
    loss_of(net, 0).backward()
    assert all(p.grad is None for p in net.parameters()), "gradients move to the masters"
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    optimizer.write_weights()
    for name, parameter in net.named_parameters():
        assert not torch.equal(parameter, before[name])
        assert torch.equal(parameter, optimizer.masters[name].bfloat16())


def test_masters_keep_what_bfloat16_would_round_away() -> None:
    net = Net(torch.bfloat16)
    optimizer = MasterAdamW(net, lr=1e-5)
    start = {name: m.clone() for name, m in optimizer.masters.items()}
    weights = net.last.weight.detach().clone()
    for step in range(10):
        take_step(net, optimizer, step)
    moved = (optimizer.masters["last.weight"] - start["last.weight"]).abs().max()
    assert 2e-5 < float(moved) < 2e-4
    share = (net.last.weight != weights).float().mean()
    assert share < 0.5, "most bfloat16 weights are too coarse to show it yet"


def test_weights_follow_parameters_onto_other_memory() -> None:
    """As with a single copy: the parameters become views on the server's memory, which holds
    something else.
    """
    net = Net()
    optimizer = MasterAdamW(net, lr=0.1)
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    memory = torch.full((sum(p.numel() for p in net.parameters()),), 99.0)
    start = 0
    for parameter in net.parameters():
        parameter.data = memory[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    optimizer.write_weights()
    assert torch.equal(memory, torch.cat([value.flatten() for value in expected.values()]))
    take_step(net, optimizer, 0)
    assert torch.equal(memory, torch.cat([m.flatten() for m in optimizer.masters.values()]))
    assert not torch.equal(memory[:32], expected["first.weight"].flatten())


def test_gradients_of_bfloat16_parameters_are_summed_in_float32() -> None:
    net = Net(torch.bfloat16)
    optimizer = MasterAdamW(net, lr=0.1)
    (net.last.weight.sum() * 256).backward()
    (net.last.weight.sum() * 1).backward()
    gradient = optimizer.gradients()["last.weight"]
    assert gradient.dtype == torch.float32
    assert (gradient == 257).all(), "bfloat16 has no 257"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_names_its_parameter_and_step(bad: float) -> None:
    net = Net()
    optimizer = MasterAdamW(net, lr=0.1)
    take_step(net, optimizer, 0)
    masters = {name: m.clone() for name, m in optimizer.masters.items()}
    loss_of(net, 1).backward()
    optimizer.gradients()["first.bias"][2] = bad
    with pytest.raises(NonFiniteError, match=r"the gradient of first\.bias .* at optimizer step 1"):
        optimizer.step()
    assert all(torch.equal(m, masters[name]) for name, m in optimizer.masters.items())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    net = Net()
    optimizer = MasterAdamW(net, lr=math.inf)
    loss_of(net, 0).backward()
    with pytest.raises(NonFiniteError, match=r"the weight first\.weight"):
        optimizer.step()


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    net = Net()
    optimizer = MasterAdamW(net, lr=0.1)
    net.last.weight.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"no gradient reached 2 of 3 parameters, first first\.weight"
    ):
        optimizer.step()


def test_frozen_parameters_stay() -> None:
    net = Net()
    net.first.requires_grad_(False)
    optimizer = MasterAdamW(net, lr=0.1)
    assert set(optimizer.masters) == {"last.weight"}
    before = net.first.weight.clone()
    take_step(net, optimizer, 0)
    assert torch.equal(net.first.weight, before)


@pytest.mark.parametrize("offload", [False, True])
def test_masters_and_moments_have_their_memory_before_the_first_step(offload: bool) -> None:
    """Memory that ran out between two of them would leave a step half done."""
    net = Net()
    optimizer = MasterAdamW(net, lr=0.1, offload=offload)
    places = {key: tensor.data_ptr() for key, tensor in optimizer.state_dict().items()}
    take_step(net, optimizer, 0)
    assert {key: tensor.data_ptr() for key, tensor in optimizer.state_dict().items()} == places


def test_continuing_from_saved_state_is_exact() -> None:
    options = {
        "lr": 0.05,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_steps": 2,
        "total_steps": 8,
    }
    one, two = Net(torch.bfloat16), Net(torch.bfloat16)
    through = MasterAdamW(one, **options)  # type: ignore[arg-type]
    for step in range(3):
        take_step(one, through, step)
    state = {key: tensor.clone() for key, tensor in through.state_dict().items()}
    continued = MasterAdamW(two, **options)  # type: ignore[arg-type]
    continued.load_state(shapes_of(state), state.__getitem__, steps=3)
    continued.write_weights()
    for step in range(3, 7):
        assert take_step(one, through, step) == take_step(two, continued, step)
    for name, master in through.masters.items():
        assert torch.equal(master, continued.masters[name]), name
    assert continued.steps == through.steps == 7


def test_state_of_another_model_is_refused() -> None:
    optimizer = MasterAdamW(Net(), lr=0.1)
    state = dict(optimizer.state_dict())
    state["master.last.weight"] = torch.zeros(3, 9)
    with pytest.raises(CheckpointError, match=r"1 tensors differ, first master\.last\.weight"):
        optimizer.load_state(shapes_of(state), state.__getitem__, steps=1)


def test_a_learning_rate_of_zero_leaves_the_weights_as_they_are() -> None:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = MasterAdamW(net, lr=0.0, weight_decay=0.1)
    take_step(net, optimizer, 0)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


class TestSchedule:
    def test_closed_forms(self) -> None:
        factors = [learning_rate_factor(step, "constant", 3, 10) for step in range(6)]
        assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
        assert [learning_rate_factor(step, "linear", 0, 4) for step in range(5)] == [
            1.0,
            0.75,
            0.5,
            0.25,
            0.0,
        ]
        assert [learning_rate_factor(step, "cosine", 0, 4) for step in (0, 2, 4)] == pytest.approx(
            [1.0, 0.5, 0.0]
        )

    @given(
        st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 50)
    )
    def test_rises_then_never_rises_again(self, schedule: str, warmup: int, total: int) -> None:
        factors = [learning_rate_factor(step, schedule, warmup, total) for step in range(total + 5)]  # type: ignore[arg-type]
        assert all(0 <= factor <= 1 for factor in factors)
        assert all(a < b for a, b in pairwise(factors[:warmup]))
        assert all(a >= b for a, b in pairwise(factors[warmup:]))

    def test_the_step_uses_it(self) -> None:
        net = Net()
        optimizer = MasterAdamW(net, lr=0.1, schedule="linear", warmup_steps=1, total_steps=3)
        rates = []
        for step in range(3):
            loss_of(net, step).backward()
            rates.append(optimizer.step().lr)
        assert rates == pytest.approx([0.05, 0.1, 0.05])


class TestSums:
    def test_what_the_backward_pass_adds_itself_is_taken_beside_what_autograd_leaves(self) -> None:
        net = Net(torch.bfloat16)
        optimizer = MasterAdamW(net, lr=0.1)
        assert optimizer.sums is not None
        total = optimizer.sums.total(net.last.weight)
        assert total is not None
        total().add_(256.0)
        (net.last.weight.sum() + net.first(torch.ones(1, 4, dtype=torch.bfloat16)).sum()).backward()
        assert (optimizer.gradients()["last.weight"] == 257).all()
        total().add_(1.0)
        assert (optimizer.gradients()["last.weight"] == 258).all()
        optimizer.step()
        assert optimizer.gradients() == {}

    def test_forgetting_gradients_forgets_these(self) -> None:
        net = Net()
        optimizer = MasterAdamW(net, lr=0.1)
        assert optimizer.sums is not None
        optimizer.sums.total(net.last.weight)().add_(1.0)  # type: ignore[misc]
        optimizer.zero_grad()
        assert optimizer.sums.take() == {}

    def test_a_partly_frozen_model_has_none(self) -> None:
        net = Net()
        net.first.requires_grad_(False)
        assert MasterAdamW(net, lr=0.1).sums is None


def test_readers_are_waited_for_before_anything_changes() -> None:
    net = Net()
    optimizer = MasterAdamW(net, lr=0.1)
    masters = {name: master.clone() for name, master in optimizer.masters.items()}
    calls = []

    def wait() -> None:
        calls.append(
            all(torch.equal(master, masters[name]) for name, master in optimizer.masters.items())
        )
        raise CheckpointError("it takes too long")

    optimizer.wait_for_readers = wait
    loss_of(net, 0).backward()
    with pytest.raises(CheckpointError):
        optimizer.step()
    assert calls == [True]
    assert optimizer.sound
    assert all(torch.equal(master, masters[name]) for name, master in optimizer.masters.items())


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


class HostMemoryNet(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(23, 57, dtype=dtype)
        self.norm = nn.LayerNorm(57, dtype=dtype)
        self.last = nn.Linear(57, 19, bias=False, dtype=dtype)


def train(net: HostMemoryNet, optimizer: MasterAdamW, steps: int) -> list[float]:
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
    one, two = HostMemoryNet(dtype), HostMemoryNet(dtype)
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
    first, second, third = (
        HostMemoryNet(torch.bfloat16),
        HostMemoryNet(torch.bfloat16, 4),
        HostMemoryNet(torch.bfloat16, 5),
    )
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
    net = HostMemoryNet(torch.float32)
    optimizer = MasterAdamW(net, lr=0.1, offload=True, bucket_elements=64)
    optimizer.masters["last.weight"][11, 3] = math.nan
    net.last(net.norm(net.first(torch.ones(2, 23)))).sum().backward()
    with pytest.raises(NonFiniteError, match=r"the weight last\.weight \(and 0 more\)"):
        optimizer.step()
    assert not optimizer.sound
