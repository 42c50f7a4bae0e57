"""vLLM's mixtures of experts: the router, and the experts that a rank holds whole or in part."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing

_FUSED = "vllm.model_executor.layers.fused_moe"
_GATE = (f"{_FUSED}.router.gate_linear", "GateLinear", "forward")
_ROUTER = (f"{_FUSED}.router.fused_topk_router", "FusedTopKRouter", "_compute_routing")
_SUM = (f"{_FUSED}.runner.moe_runner", "", "tensor_model_parallel_all_reduce")
_EXPERTS = (f"{_FUSED}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod", "apply")


def replace_experts(
    linear: Callable[..., Any],
    route: Callable[..., Any],
    experts: Callable[..., Any],
    all_reduce: Callable[..., Any],
) -> list[str]:
    """Put functions in the place of vLLM's router and experts; call before the model is built.

    Nothing in the functions that are put there waits for the GPU, so a CUDA graph can hold them.

    Args:
        linear: (x, weight, bias) -> logits of the router.
        route: (logits, count, renormalised) -> (weights, experts int64), [tokens, count] each.
        experts: (x, weights, experts, w13, w2) -> y.
        all_reduce: (x) -> the sum over tensor-parallel ranks, behind the experts.

    Returns:
        The names of vLLM's functions that were replaced.

    Raises:
        UnsupportedVllm: one of them is missing.
    """

    def gate(self: Any, x: Any) -> Any:
        logits = linear(x, self.weight, self.bias)
        return (logits, None) if getattr(self, "return_bias", True) else logits

    def compute_routing(
        self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, **_: Any
    ) -> tuple[Any, Any]:
        weights, chosen = route(router_logits, self.top_k, self.renormalize)
        return weights, chosen if indices_type is None else chosen.to(indices_type)

    def apply(
        self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> Any:
        return experts(x, topk_weights, topk_ids.long(), layer.w13_weight, layer.w2_weight)

    places = {_GATE: gate, _ROUTER: compute_routing, _EXPERTS: apply, _SUM: all_reduce}
    owners = [_owner(place) for place in places]
    for owner, (place, function) in zip(owners, places.items(), strict=True):
        setattr(owner, place[-1], function)
    return [".".join(filter(None, place)) for place in places]


def _owner(place: tuple[str, str, str]) -> Any:
    module, name, method = place
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedVllm(seam_missing(module)) from error
    if name:
        owner = getattr(owner, name, None)
    if not hasattr(owner, method):
        raise UnsupportedVllm(seam_missing(".".join(filter(None, place))))
    return owner


def other_experts(mixture: Any) -> str:
    """Return the reason why `replace_experts` cannot compute a layer's experts; empty if it can.

    Args:
        mixture: vLLM's module of a layer, with `gate` and `experts`.
    """
    runner = mixture.experts
    router, held = runner.router, runner.routed_experts
    if type(router) is not _owner(_ROUTER) or router.scoring_func != "softmax":
        return f"tokens are routed by {type(router).__name__}, and not by a softmax"
    if type(held.quant_method) is not _owner(_EXPERTS) or held.quant_method.is_monolithic:
        return (
            f"vLLM computes its experts by {type(held.quant_method).__name__}; start the server "
            "with --moe-backend triton"
        )
    if held.expert_map is not None:
        return "a rank holds some experts only; leave --enable-expert-parallel out"
    ranks = getattr(runner.moe_config, "tp_size", 1)
    if ranks > 1 and (
        getattr(runner.moe_config, "is_sequence_parallel", False)
        or getattr(runner, "_fused_output_is_reduced", False)
    ):
        return (
            f"the sum of {ranks} ranks is not taken behind the experts, where its order is known; "
            "start the server with --tensor-parallel-size 1"
        )
    activation = getattr(held.activation, "value", held.activation)
    others = {
        f"its experts have the activation {activation}": activation != "silu",
        "its experts have biases": hasattr(held, "w13_bias"),
        "weights are applied before the experts": held.apply_router_weight_on_input,
        "it has shared experts": runner.shared_experts is not None,
    }
    return next((reason for reason, differs in others.items() if differs), "")
