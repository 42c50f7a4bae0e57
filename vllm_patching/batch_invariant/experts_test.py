"""The part of the self-test for a layer with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.bits import random_rows
from vllm_patching.batch_invariant.layouts_test import wider


def expert_operations(mixture: Any, rows: int, ranks: int = 1) -> Iterator[tuple[Any, ...]]:
    """Yield (name, rows, operation) for the router and the experts.

    The tokens are spread over the experts evenly, unevenly, and all on the same experts. Equal
    logits go to the experts with the lowest numbers. With several ranks the function also yields a
    trainer's wider experts, and the sum of its parts. Each part has this rank's weights.

    Args:
        mixture: vLLM's module of the layer.
        rows: of the largest batch.
        ranks: tensor-parallel ranks of the server.
    """
    gate, router = mixture.gate.weight.data, mixture.experts.router
    held = mixture.experts.routed_experts
    w13, w2 = held.w13_weight.data, held.w2_weight.data
    x = random_rows(rows, gate.shape[1], like=gate, seed=8)
    yield (
        f"linear router {list(gate.shape)}",
        rows,
        lambda s: ops.linear(x[s], gate),
    )
    route = partial(ops.route, count=router.top_k, renormalised=router.renormalize)
    for name, logits in routings(rows, gate.shape[0], gate).items():
        yield f"route, {name}", rows, partial(_route_rows, route, logits)
        weights, chosen = route(logits)
        yield (
            f"experts {list(w13.shape)}, {name}",
            rows,
            partial(_experts_rows, x, weights, chosen, w13, w2),
        )
    weights, chosen = route(routings(rows, gate.shape[0], gate)["unevenly"])
    for factor in wider(ranks):
        own = ops.experts(x, weights, chosen, w13, w2)
        gate_rows, up_rows = (half.repeat(1, factor, 1) for half in w13.chunk(2, dim=1))
        wide = torch.cat((gate_rows, up_rows), dim=1), w2.repeat(1, 1, factor)
        yield (
            f"experts {list(w13.shape)} within {factor} times the width",
            rows,
            partial(_experts_rows, x, weights, chosen, *wide, parts=factor),
            ops.add_parts(torch.stack([own] * factor)),
        )


def routings(rows: int, experts: int, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits [rows, experts] of routers, by name."""
    spread = random_rows(rows, experts, like=like, seed=9)
    preference = torch.arange(experts, 0, -1, device=like.device, dtype=like.dtype)
    return {
        "evenly": spread,
        "unevenly": spread + 4 * preference / experts,
        "all on the same experts": (preference / experts).repeat(rows, 1),
        "by ties": torch.zeros_like(spread),
    }


def _route_rows(
    route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor,
    rows: slice,
) -> torch.Tensor:
    weights, chosen = route(logits[rows])
    return torch.cat((weights, chosen.to(weights.dtype)), dim=-1)


def _experts_rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: slice,
    parts: int = 1,
) -> torch.Tensor:
    return ops.experts(x[rows], weights[rows], chosen[rows], w13, w2, parts)


def ties_failure(mixture: Any) -> str:
    """Return one line if equal logits do not go to the experts with the lowest numbers."""
    count = mixture.experts.router.top_k
    logits = torch.zeros(3, *mixture.gate.weight.shape[:1], device=mixture.gate.weight.device)
    chosen = ops.route(logits, count, True)[1].tolist()
    if chosen == [[*range(count)]] * 3:
        return ""
    return f"route: of equal logits it chooses experts {chosen[0]}, and not {[*range(count)]}"


def layer_pairs(mixture: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return what vLLM's own router and experts compute, and what the operations compute."""
    runner = mixture.experts
    gate, router, held = mixture.gate, runner.router, runner.routed_experts
    x = random_rows(300, gate.weight.shape[1], like=gate.weight, seed=10)
    logits = ops.linear(x, gate.weight)
    theirs = router.select_experts(hidden_states=x, router_logits=logits)
    weights, chosen = ops.route(logits, router.top_k, router.renormalize)
    output = held.quant_method.apply(held, x, *theirs, None, None)
    return {
        "gate": (gate(x)[0], logits),
        "router's weights": (theirs[0], weights),
        "router's choice": (theirs[1].long(), chosen),
        "experts": (output, ops.experts(x, weights, chosen, held.w13_weight, held.w2_weight)),
    }
