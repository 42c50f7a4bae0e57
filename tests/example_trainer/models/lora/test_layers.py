"""Adapters: what they compute, what they learn, and that the model under them stays as it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from example_trainer.errors import ModelError
from example_trainer.models import Decoder
from example_trainer.models.decoder import Arithmetic, Linear
from example_trainer.models.lora.layers import (
    AdaptedLinear,
    BaseModel,
    adapters_of,
    attach_adapters,
    without_adapters,
)
from example_trainer.models.lora.settings import LoraSettings, parse_targets
from example_trainer.models.ops import reference
from example_trainer.models.packing import Packing
from example_trainer.training.optimizer import MasterAdamW
from tests.example_trainer.models.textbook import merged_weights
from tests.geometries import geometry_of
from vllm_patching.weights.families import PROJECTIONS

GEOMETRY = geometry_of("Qwen3", 2, 16, 24, 4, 2, 4, 17)
TOKENS = torch.arange(12).reshape(2, 6) % 17


def settings(*targets: str, dropout: float = 0.0) -> LoraSettings:
    return LoraSettings(rank=3, alpha=6.0, dropout=dropout, targets=targets or PROJECTIONS)


def random_model(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(GEOMETRY, torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def adapted(chosen: LoraSettings, trained: bool = True) -> Decoder:
    model = random_model()
    attach_adapters(model, chosen)
    if trained:
        for found in adapters_of(model):
            nn.init.normal_(found.adapter.lora_B, 0, 0.3)
    return model


def test_new_adapters_change_nothing() -> None:
    assert torch.equal(
        adapted(settings(), trained=False).logits(TOKENS), random_model().logits(TOKENS)
    )


@pytest.mark.parametrize(
    "targets",
    [PROJECTIONS, ("k_proj",), ("o_proj",), ("q_proj", "v_proj"), ("up_proj", "down_proj")],
)
def test_adapters_compute_what_their_sum_with_the_weights_computes(
    targets: tuple[str, ...],
) -> None:
    model = adapted(settings(*targets))
    merged = random_model()
    merged.load_state_dict(merged_weights(model))
    assert (model.logits(TOKENS) - merged.logits(TOKENS)).abs().max() < 1e-5
    assert (model.logits(TOKENS) - random_model().logits(TOKENS)).abs().max() > 1e-2


def test_gradients_are_the_closed_form_and_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    weight, bias = (torch.empty(*shape, dtype=torch.float64) for shape in ((9, 5), (9,)))
    base = Linear(nn.Parameter(weight), nn.Parameter(bias), Arithmetic(reference))
    for parameter in base.parameters():
        parameter.data.normal_()
    layer = AdaptedLinear(
        base, {"q_proj": 4, "k_proj": 2, "v_proj": 3}, settings("q_proj", "v_proj")
    )
    for adapter in layer.adapters.values():
        nn.init.normal_(adapter.lora_B)
    x, upstream = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 9, dtype=torch.float64)
    layer(x, Packing([7])).backward(upstream)
    for name, rows in (("q_proj", slice(0, 4)), ("v_proj", slice(6, 9))):
        a, b, g = layer.adapters[name].lora_A, layer.adapters[name].lora_B, upstream[:, rows]
        torch.testing.assert_close(a.grad, 2.0 * b.detach().T @ g.T @ x)
        torch.testing.assert_close(b.grad, 2.0 * g.T @ x @ a.detach().T)
    parameters = {
        name: p.detach().clone().requires_grad_()
        for name, p in layer.adapters.named_parameters(prefix="adapters")
    }

    def call(*values: Tensor) -> Tensor:
        return torch.func.functional_call(
            layer, dict(zip(parameters, values, strict=True)), (x, Packing([7]))
        )

    assert torch.autograd.gradcheck(call, tuple(parameters.values()))


def test_the_optimizer_trains_adapters_and_nothing_else() -> None:
    model = adapted(settings("q_proj", "down_proj"), trained=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MasterAdamW(model, lr=1e-2)
    assert set(optimizer.masters) == {name for name in before if ".adapters." in name}
    assert len(optimizer.masters) == GEOMETRY.num_layers * 2 * 2
    for _ in range(2):  # A learns from the second step on: its gradient is 0 while B is
        model.logits(TOKENS).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.write_weights()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(optimizer.masters)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_acts_while_training_only() -> None:
    model, plain = adapted(settings(dropout=0.5)), adapted(settings())
    model.load_state_dict(plain.state_dict())
    assert not torch.equal(model.logits(TOKENS), plain.logits(TOKENS))
    model.eval()
    assert torch.equal(model.logits(TOKENS), plain.logits(TOKENS))


def test_dropout_keeps_the_expected_output() -> None:
    torch.manual_seed(2)
    weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    base = Linear(weight, None, Arithmetic(reference))
    layer = AdaptedLinear(base, {"o_proj": 4}, settings("o_proj", dropout=0.25))
    nn.init.normal_(layer.adapters["o_proj"].lora_B)
    x = torch.randn(1, 6, dtype=torch.float64)
    with torch.no_grad():
        draws = layer(x.expand(40_000, 6), Packing([40_000]))
        exact = layer.eval()(x, Packing([1]))
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - exact).abs() < 5 * standard_error).all()


def test_recomputing_layers_gives_the_same_gradients_with_dropout() -> None:
    gradients = []
    for recompute in (False, True):
        model = adapted(settings(dropout=0.3))
        model.gradient_checkpointing = recompute
        torch.manual_seed(5)
        model.logits(TOKENS).logsumexp(-1).mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_without_adapters_it_is_the_base_model() -> None:
    model = adapted(settings())
    outside = model.logits(TOKENS)
    with without_adapters(model):
        assert torch.equal(model.logits(TOKENS), random_model().logits(TOKENS))
    assert torch.equal(model.logits(TOKENS), outside)


def test_the_reference_of_adapters_is_the_model_under_them() -> None:
    model = adapted(settings(dropout=0.5))
    base = BaseModel(model)
    assert torch.equal(base.logits(TOKENS), random_model().logits(TOKENS))
    assert {p.data_ptr() for p in base.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert not base(TOKENS.flatten(), Packing([6, 6])).requires_grad
    assert model(TOKENS.flatten(), Packing([6, 6])).requires_grad
    hidden, targets, counts = torch.randn(4, 16), torch.arange(4), Packing([4])
    ours, theirs = (m.chosen_logprobs(hidden, targets, counts)[0] for m in (base, model))
    assert torch.equal(ours, theirs), "one output matrix"


def test_a_is_uniform_and_b_is_zero_at_first() -> None:
    torch.manual_seed(0)
    base = Linear(nn.Parameter(torch.zeros(4, 400)), None, Arithmetic(reference))
    adapter = AdaptedLinear(base, {"o_proj": 4}, LoraSettings(64, 1.0, 0.0, ("o_proj",))).adapters[
        "o_proj"
    ]
    bound = 1 / math.sqrt(400)
    assert adapter.lora_A.abs().max() <= bound
    assert adapter.lora_A.abs().max() > 0.99 * bound
    assert float(adapter.lora_A.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not adapter.lora_B.any()


def test_adapters_are_not_put_on_twice() -> None:
    model = adapted(settings())
    with pytest.raises(ModelError, match=r"self_attn\.qkv_proj: it is a AdaptedLinear"):
        attach_adapters(model, settings())


def test_targets_are_checked_ordered_and_counted_once() -> None:
    assert parse_targets(["v_proj", "q_proj", "v_proj"]) == ("q_proj", "v_proj")
    assert parse_targets(["all-linear"]) == PROJECTIONS
    with pytest.raises(
        ValueError, match=r"no projection is called 'qkv_proj'; give all-linear, or some of q_proj,"
    ):
        parse_targets(["qkv_proj", "q_proj"])
