"""8-bit moments: the rounding, the update against closed forms, offloading, saved state, and a run
that learns with them.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from example_trainer.errors import CheckpointError, ConfigError
from example_trainer.training import quantised
from example_trainer.training.optimizer import (
    FLOAT32_KINDS,
    QUANTISED_KINDS,
    MasterAdamW,
    saved_kinds,
)
from example_trainer.training.quantised import (
    QUANTISED_BLOCK,
    can_be_quantised,
    dequantise,
    quantise,
    scale_shape,
)


class Net(nn.Module):
    """An embedding whose blocks span rows, a matrix whose rows are blocks, stacked matrices, a
    vector and a matrix too small for 8 bits.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(128, 96, dtype=dtype)
        self.inner = nn.Linear(256, 96, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(3, 96, 32, dtype=dtype) * 0.05)
        self.small = nn.Linear(96, 5, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        mixed = torch.einsum("eoi,bi->bo", self.experts, x[:, :32])
        found: Tensor = self.small(torch.tanh(self.embed(tokens) + self.inner(x) + mixed))
        return found


pytestmark = pytest.mark.nightly

IN_8_BITS = {"embed.weight", "inner.weight", "experts"}
MOMENTS = ("exp_avg", "exp_avg_sq")


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (32,), generator=generator)
    x = torch.randn(32, 256, generator=generator)
    targets = torch.stack([x[:, :4].sum(1), *x[:, 4:8].unbind(1)], 1)
    return tokens, x.to(dtype), targets


def train(net: Net, optimizer: MasterAdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens, x, targets = batch(step, net.small.weight.dtype)
        loss = (net(tokens, x).float() - targets).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.write_weights()
    return losses


def state_of(optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}


def shapes_of(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


@pytest.mark.parametrize(
    ("shape", "alone", "spread"),
    [
        ((64, 256), True, True),
        ((64, 512), True, True),
        ((64, 192), True, False),
        ((66, 192), False, False),
        ((1024, 896), True, False),
        ((64, 100), False, False),
        ((15, 256), False, False),
        ((4096,), False, False),
        ((4, 4, 256), True, True),
        ((64, 4, 16), True, False),
        ((3, 5, 300), False, False),
    ],
)
def test_matrices_of_whole_blocks_have_8_bits(
    shape: tuple[int, ...], alone: bool, spread: bool
) -> None:
    assert (can_be_quantised(shape), can_be_quantised(shape, spread=True)) == (alone, spread)
    if alone:
        assert math.prod(scale_shape(shape)) * QUANTISED_BLOCK == math.prod(shape)


def table_of(signed: bool) -> Tensor:
    return quantised._table(signed, torch.device("cpu")).double()


def values_of(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The values that codes and scales stand for (float64, [blocks, QUANTISED_BLOCK])."""
    return table_of(signed)[codes.long()].view(-1, QUANTISED_BLOCK) * scale.double().view(-1, 1)


def assert_rounded(codes: Tensor, scale: Tensor, exact: Tensor, signed: bool) -> None:
    """Each block's scale is its greatest magnitude, and each element the nearest that a block can
    hold, but for float32.
    """
    blocks, table = exact.double().view(-1, QUANTISED_BLOCK), table_of(signed)
    greatest = blocks.abs().amax(1, keepdim=True).clip(1e-12)
    torch.testing.assert_close(scale.double().view(-1, 1), greatest, rtol=1e-5, atol=0.0)
    above = torch.searchsorted(table, blocks / greatest).clip(1, 255)
    nearest = torch.minimum(
        *((blocks / greatest - table[place]).abs() for place in (above, above - 1))
    )
    error = (values_of(codes, scale, signed) - blocks).abs() / greatest
    assert bool((error <= nearest + 2e-5).all())


@settings(max_examples=30)
@given(
    rows=st.integers(4, 40),
    seed=st.integers(0, 1000),
    signed=st.booleans(),
    spread=st.floats(-10, 1),
)
def test_a_value_is_rounded_to_the_nearest_of_its_block(
    rows: int, seed: int, signed: bool, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4 * rows, 192, generator=generator) * torch.logspace(spread, 0, 192)
    values = values if signed else values.square()
    codes, scale = quantise(values, signed)
    assert (codes.dtype, tuple(codes.shape), tuple(scale.shape)) == (
        torch.uint8,
        (4 * rows, 192),
        (rows, 3),
    )
    assert_rounded(codes, scale, values, signed)
    found = dequantise(codes, scale, signed)
    torch.testing.assert_close(
        found.double().view(-1, QUANTISED_BLOCK),
        values_of(codes, scale, signed),
        rtol=1e-6,
        atol=0.0,
    )


@settings(max_examples=15)
@given(
    lr=st.floats(1e-5, 1e-2),
    decay=st.sampled_from([0.0, 0.1]),
    clip=st.sampled_from([0.0, 0.05, 100.0]),
)
def test_an_update_is_adamw_whose_moments_are_rounded_after_it(
    lr: float, decay: float, clip: float
) -> None:
    """Against the formula in float64, from the state before each update."""
    net = Net()
    optimizer = MasterAdamW(
        net,
        lr=lr,
        weight_decay=decay,
        max_grad_norm=clip,
        betas=(0.9, 0.99),
        eps=1e-7,
        in_8_bits=True,
    )
    for step in range(1, 5):
        tokens, x, targets = batch(step)
        (net(tokens, x) - targets).square().mean().backward()
        gradients = {
            name: gradient.double().clone() for name, gradient in optimizer.gradients().items()
        }
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        divisor = (norm + 1e-6) / clip if 0 < clip < norm else 1.0
        before = state_of(optimizer)
        assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-5)
        optimizer.write_weights()
        after = optimizer.state_dict()
        for name in optimizer.masters:
            gradient, master = gradients[name] / divisor, before[f"master.{name}"].double()
            if name in IN_8_BITS:
                codes = [
                    [before[f"{moment}_{kind}.{name}"] for kind in ("codes", "scale")]
                    for moment in MOMENTS
                ]
                first, second = (
                    values_of(*codes[n], signed=n == 0).view(master.shape) for n in (0, 1)
                )
            else:
                first, second = (before[f"{moment}.{name}"].double() for moment in MOMENTS)
            first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient.square()
            root = (second / (1 - 0.99**step)).sqrt() + 1e-7
            held = decay if gradient.dim() >= 2 else 0.0
            expected = master * (1 - lr * held) - lr * first / (1 - 0.9**step) / root
            torch.testing.assert_close(
                after[f"master.{name}"].double(), expected, rtol=1e-5, atol=1e-4 * lr, msg=name
            )
            for moment, exact, signed in zip(MOMENTS, (first, second), (True, False), strict=True):
                if name in IN_8_BITS:
                    assert_rounded(
                        after[f"{moment}_codes.{name}"],
                        after[f"{moment}_scale.{name}"],
                        exact,
                        signed,
                    )
                else:
                    torch.testing.assert_close(
                        after[f"{moment}.{name}"].double(), exact, rtol=1e-4, atol=1e-9
                    )


def test_the_update_compiles_into_one_graph_for_all_sizes() -> None:
    """As it does on a GPU, here without a compiler behind it: the graph alone."""
    device = torch.device("cpu")
    plain, graphs = quantised._update(compiled=False), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend=count)
    tables = quantised._table(True, device), quantised._table(False, device)
    for blocks in (64, 40, 41):
        generator = torch.Generator().manual_seed(blocks)
        values, gradient = torch.randn(2, blocks * QUANTISED_BLOCK, generator=generator).unbind()
        states = []
        for update in (plain, compiled):
            state = [values.clone()]
            for _ in MOMENTS:
                state += [torch.zeros(values.numel(), dtype=torch.uint8), torch.zeros(blocks)]
            with torch.no_grad():
                for step in (1, 2):
                    rates = quantised.Rates(0.01, (0.9, 0.99), 1e-8, 0.1, step, 2.0)
                    update(state, gradient, rates.tensor(device), tables, 0.9, 0.99, 1e-8, 0.1)
            states.append(state)
        assert all(torch.equal(one, two) for one, two in zip(*states, strict=True))
    assert len(graphs) == 1


def test_the_first_step_is_that_of_adamw() -> None:
    """Its moments are rounded after it, so 8 bits change nothing yet."""
    one, two = Net(), Net()
    plain, small = MasterAdamW(one, lr=0.01), MasterAdamW(two, lr=0.01, in_8_bits=True)
    train(one, plain, range(1))
    train(two, small, range(1))
    for name, master in plain.masters.items():
        torch.testing.assert_close(small.masters[name], master, atol=1e-6, rtol=1e-5, msg=name)


def test_it_learns_as_adamw_does() -> None:
    """The loss of a small regression after 300 steps, in float32 and in 8 bits: the same within a
    tenth, from 1.9 to 0.2.
    """
    losses = {}
    for in_8_bits in (False, True):
        net = Net()
        losses[in_8_bits] = train(net, MasterAdamW(net, lr=0.003, in_8_bits=in_8_bits), range(300))
    plain, small = (sum(losses[kind][-20:]) / 20 for kind in (False, True))
    assert plain < 0.2 * losses[False][0]
    assert small == pytest.approx(plain, rel=0.1)
    assert losses[True] != losses[False]


def test_state_takes_a_quarter_of_the_moments_memory() -> None:
    optimizer = MasterAdamW(Net(), lr=0.1, in_8_bits=True)
    for name, parameter in Net().named_parameters():
        kinds = {
            key.partition(".")[0] for key in optimizer.state_dict() if key.partition(".")[2] == name
        }
        assert kinds == {
            kind.name for kind in (QUANTISED_KINDS if name in IN_8_BITS else FLOAT32_KINDS)
        }
        moments = sum(
            t.nbytes
            for key, t in optimizer.state_dict().items()
            if key.endswith(name) and "master" not in key
        )
        assert moments == (
            2 * parameter.numel() * (1 + 4 / 256) if name in IN_8_BITS else 8 * parameter.numel()
        )


@settings(max_examples=20)
@given(
    bucket=st.integers(1, 30000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    clip=st.sampled_from([0.0, 0.1]),
)
def test_an_offloaded_update_has_the_bits_of_one_that_is_not(
    bucket: int, dtype: torch.dtype, clip: float
) -> None:
    options: dict[str, Any] = {
        "lr": 0.03,
        "max_grad_norm": clip,
        "weight_decay": 0.1,
        "in_8_bits": True,
    }
    one, two = Net(dtype), Net(dtype)
    resident = MasterAdamW(one, **options)
    offloaded = MasterAdamW(two, **options, offload=True, bucket_elements=bucket)
    assert train(one, resident, range(4)) == train(two, offloaded, range(4))
    there = offloaded.state_dict()
    assert all(torch.equal(tensor, there[key]) for key, tensor in resident.state_dict().items())
    assert all(
        torch.equal(here, other)
        for here, other in zip(one.parameters(), two.parameters(), strict=True)
    )


@pytest.mark.parametrize("offload", [False, True])
def test_continuing_from_saved_state_is_exact(offload: bool) -> None:
    one, two = Net(torch.bfloat16), Net(torch.bfloat16, seed=4)
    through = MasterAdamW(one, lr=0.03, in_8_bits=True)
    train(one, through, range(3))
    state = state_of(through)
    continued = MasterAdamW(two, lr=0.03, in_8_bits=True, offload=offload, bucket_elements=5000)
    continued.load_state(shapes_of(state), state.__getitem__, steps=3)
    continued.write_weights()
    assert train(one, through, range(3, 6)) == train(two, continued, range(3, 6))
    found = continued.state_dict()
    assert all(torch.equal(tensor, found[key]) for key, tensor in through.state_dict().items())


def test_moments_of_the_other_optimizer_are_converted_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, small = MasterAdamW(Net(), lr=0.03), MasterAdamW(Net(seed=4), lr=0.03, in_8_bits=True)
    net = Net(seed=5)
    source = MasterAdamW(net, lr=0.03)
    train(net, source, range(3))
    state = state_of(source)
    small.load_state(shapes_of(state), state.__getitem__, steps=3)
    assert (
        "The saved moments of 3 parameters, such as experts, were converted to 8 bits (--optimizer)"
        in caplog.text
    )
    caplog.clear()
    in_8_bits = state_of(small)
    plain.load_state(shapes_of(in_8_bits), in_8_bits.__getitem__, steps=3)
    assert "were converted to float32" in caplog.text
    back = plain.state_dict()
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        if name not in IN_8_BITS or kind == "master":
            assert torch.equal(back[key], tensor), key
        else:
            assert torch.equal(
                back[key], dequantise(*quantise(tensor, kind == "exp_avg"), kind == "exp_avg")
            ), key
    assert saved_kinds("embed.weight", in_8_bits) == QUANTISED_KINDS


def test_state_that_lacks_its_scales_is_refused() -> None:
    optimizer = MasterAdamW(Net(), lr=0.03, in_8_bits=True)
    state = state_of(optimizer)
    del state["exp_avg_scale.embed.weight"]
    with pytest.raises(
        CheckpointError, match=r"1 tensors differ, first exp_avg_scale\.embed\.weight"
    ):
        optimizer.load_state(shapes_of(state), state.__getitem__, steps=1)


def test_a_missing_torchao_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    quantised.quantisation.cache_clear()
    with pytest.raises(
        ConfigError,
        match=r"--optimizer adamw-8bit needs torchao==0\.18\.0 .*: pip install torchao==0\.18\.0$",
    ):
        quantised.quantisation()
    monkeypatch.undo()
    quantised.quantisation.cache_clear()
    assert quantised.quantisation().create_dynamic_map(signed=False)[-1] == 1.0
