"""Norms and MLPs of transformers' models that our table computes, and the ones that it leaves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from example_trainer.models import load_model
from example_trainer.models.decoder import Arithmetic
from example_trainer.models.ops import reference
from example_trainer.models.transformers_model import TransformersModel
from example_trainer.models.transformers_operations import replace_modules
from tests.example_trainer.models.transformers_cases import checkpoint

WIDTH, INNER = 12, 20


def config(**others: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"hidden_size": WIDTH, "intermediate_size": INNER, "mlp_bias": False} | others
    )


def mlp(**others: Any) -> nn.Module:
    module: nn.Module = LlamaMLP(config(**{"hidden_act": "silu"} | others))
    return module


class Steep(nn.Module):
    """An RMSNorm by its name and parts, and another norm by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * reference.rms_norm(x, self.weight, self.eps)


class OtherRoot(Steep):
    """Adds another number in the root than it names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weight, 2e-6)


REPLACED = {
    "norm": lambda: LlamaRMSNorm(WIDTH),
    "norm of one plus the weight": lambda: Gemma2RMSNorm(WIDTH, 1e-3),
    "gated mlp": mlp,
}
LEFT = {
    "norm with a gate": lambda: Qwen3NextRMSNormGated(WIDTH),
    "norm with a factor": Steep,
    "norm with another root": OtherRoot,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "mlp with biases": lambda: mlp(mlp_bias=True),
    "mlp with a gelu gate": lambda: mlp(hidden_act="gelu"),
    "mlp of another kind": lambda: Gemma2MLP(config(hidden_activation="gelu_pytorch_tanh")),
}


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A module with random weights as transformers has it, and the same with our table."""
    theirs = REPLACED[name]().to(dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(theirs.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    ours = copy.deepcopy(theirs)
    assert replace_modules(ours, Arithmetic(reference)) == 1
    return theirs, ours


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, 5, WIDTH, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("name", REPLACED)
def test_values_and_gradients_are_those_of_the_class(name: str) -> None:
    theirs, ours = pair(name)
    found = []
    for module in (theirs, ours):
        x = inputs()
        y = module(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append((y.detach(), x.grad, [p.grad for p in module.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REPLACED)
def test_other_dtypes_and_no_tokens_go_through_the_class(name: str) -> None:
    theirs, ours = pair(name)
    empty = torch.zeros(0, WIDTH, requires_grad=True)
    assert ours(empty).shape == (0, WIDTH)
    if name != "gated mlp":
        x = inputs(torch.bfloat16)
        assert torch.equal(ours(x), theirs(x))
        assert ours(x).dtype == theirs(x).dtype


def test_a_norm_that_takes_a_gate_has_it_from_the_class() -> None:
    theirs = MambaRMSNormGated(WIDTH)
    ours = copy.deepcopy(theirs)
    assert replace_modules(ours, Arithmetic(reference)) == 1
    gate = inputs().cos()
    assert torch.equal(ours(inputs(), gate), theirs(inputs(), gate))
    assert torch.equal(ours(inputs(), gate=gate), theirs(inputs(), gate))
    torch.testing.assert_close(ours(inputs()), theirs(inputs()))


@pytest.mark.parametrize("name", LEFT)
def test_a_module_that_computes_something_else_is_left(name: str) -> None:
    module = LEFT[name]()
    assert replace_modules(module, Arithmetic(reference)) == 0
    assert "forward" not in vars(module)


def test_the_table_may_be_replaced_later() -> None:
    _, ours = pair("gated mlp")
    arithmetic = ours.forward.args[2]
    expected = ours(inputs())
    arithmetic.ops = SimpleNamespace(silu_and_mul=lambda x: 2 * reference.silu_and_mul(x))
    torch.testing.assert_close(ours(inputs()), 2 * expected)


def test_frozen_weights_get_no_gradient() -> None:
    _, ours = pair("gated mlp")
    ours.gate_proj.weight.requires_grad_(False)
    ours(inputs()).sum().backward()
    assert ours.gate_proj.weight.grad is None
    assert ours.up_proj.weight.grad is not None


def test_the_text_part_of_a_model_is_replaced_and_its_vision_tower_is_not() -> None:
    model = load_model(str(checkpoint("Qwen2_5_VL")), torch.float32)
    assert isinstance(model, TransformersModel)
    replaced = {
        name
        for name, module in model.named_modules()
        if "norm" in name.rpartition(".")[2] and "forward" in vars(module)
    }
    text = "model.language_model"
    norms = ("input_layernorm", "post_attention_layernorm")
    assert replaced == {f"{text}.norm"} | {
        f"{text}.layers.{layer}.{norm}" for layer in (0, 1) for norm in norms
    }
