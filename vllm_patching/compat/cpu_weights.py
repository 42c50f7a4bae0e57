"""Weights of vLLM's CPU build."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing

if TYPE_CHECKING:
    import torch


def keep_cpu_weights_plain() -> None:
    """Make vLLM's CPU linear layers multiply with the parameter itself.

    By default they pack a private copy of the weight after loading and leave the parameter empty,
    or stale when it is tied. So nothing written to the parameter would ever be used. Call before
    the model is built; does nothing elsewhere.
    """
    import torch

    utils = importlib.import_module("vllm.model_executor.layers.utils")

    def use_the_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise UnsupportedVllm(
            seam_missing("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm")
        )
    utils.dispatch_cpu_unquantized_gemm = use_the_parameter  # type: ignore[attr-defined]


def keep_cpu_experts_plain() -> None:
    """Make vLLM's CPU experts multiply with the parameters themselves.

    By default they pack a private order of the weights into the parameters after loading, which
    vLLM does not do again for new weights. Activations other than the gated ones below are left to
    vLLM. Call before the model is built; does nothing where there are no such experts.
    """
    from torch.nn import functional

    try:
        experts = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    except ImportError:
        return
    gates: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    }
    kind = getattr(experts, "CPUUnquantizedExperts", None)
    if kind is None:
        return
    pack, packed = kind.process_weights_after_loading, kind.apply

    def process(self: Any, layer: torch.nn.Module) -> None:
        self.lockstep_gate = gates.get(self.moe_config.activation.value)
        if self.lockstep_gate is None:
            pack(self, layer)

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.lockstep_gate is None:
            packed(self, *args, **kwargs)
            return
        given = inspect.signature(packed).bind(self, *args, **kwargs).arguments
        biases = (self.w1_bias, self.w2_bias)
        _mix_experts(self.lockstep_gate, biases, **{name: given[name] for name in _INPUTS})

    kind.process_weights_after_loading, kind.apply = process, apply


_INPUTS = (
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "apply_router_weight_on_input",
)


def _mix_experts(
    gate: Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> None:
    """Write the weighted sum of each token's experts into `output`, expert by expert."""
    from torch.nn import functional

    output.zero_()
    for number in topk_ids.unique().tolist():
        if number < 0:  # an expert of another rank
            continue
        rows, columns = (topk_ids == number).nonzero(as_tuple=True)
        bias1, bias2 = (None if bias is None else bias[number] for bias in biases)
        left, right = functional.linear(hidden_states[rows], w1[number], bias1).chunk(2, dim=-1)
        mixed = functional.linear(gate(left) * right, w2[number], bias2)
        if not apply_router_weight_on_input:
            mixed = mixed * topk_weights[rows, columns, None].to(mixed.dtype)
        output.index_add_(0, rows, mixed)
