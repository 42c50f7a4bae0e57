"""Test at every start that the operations keep their bits on this GPU and this model's shapes: no
library promises it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.attention_test import attention_failure
from vllm_patching.batch_invariant.bits import (
    describe_difference,
    differing,
    random_rows,
    same_bits,
)
from vllm_patching.batch_invariant.experts_test import (
    expert_operations,
    layer_pairs,
    ties_failure,
)
from vllm_patching.batch_invariant.layouts_test import (
    rank_sum_failure,
    row_check,
    split_attention_failure,
    width_checks,
)
from vllm_patching.batch_invariant.provenance import table_hash
from vllm_patching.compat.experts import other_experts

SIZES = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    12,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    160,
    192,
    200,
    224,
    255,
    256,
)
SIZES_ABOVE = (257, 320, 384, 448, 500, 511, 512, 513, 1000, 1024, 2047)
ROWS = 2048
HEAD_ROWS = 600
"""Rows of the largest batch; fewer for the output head, whose rows are long."""
_WIDE = 65536

Operation = Callable[[slice], torch.Tensor]


class UnsupportedModel(RuntimeError):
    """The model is not made of the layers whose operations are shared."""


def self_test(model: Any, ranks: int = 1) -> dict[str, Any]:
    """Test every operation alone against in batches, and vLLM's own layers against the operations.
    Collective over the server's tensor-parallel ranks.

    Args:
        model: vLLM's, a decoder with dense layers, layers of experts or both, on the GPU.
        ranks: tensor-parallel ranks.

    Returns:
        {"checks": batches compared, "failure": "" or one line on the first difference,
        "rotary_table", "seconds"}
    """
    started = time.monotonic()
    try:
        layer, mixture = _first_layers(model)
    except UnsupportedModel as error:
        return {"checks": 0, "failure": str(error), "rotary_table": "", "seconds": 0.0}
    checks, failure = 0, ""
    with torch.inference_mode():
        if ranks > 1:
            # First, because all ranks take part in it: a rank that fails later leaves none waiting.
            failure = ran("the sum over ranks", partial(rank_sum_failure, layer, ranks))
        experts = [] if mixture is None else expert_operations(mixture, ROWS, ranks)
        everything = chain(_all_operations(model, layer, ranks), experts)
        for name, total, operation, *expected in everything:
            if failure:
                break
            checks += 2 * len(_sizes(total))
            failure = ran(name, partial(first_difference, name, operation, total, *expected))
        failure = failure or ran("vLLM's layers", partial(_layers_failure, layer))
        if mixture is not None:
            failure = failure or ran("vLLM's experts", partial(_experts_failure, mixture))
        failure = failure or ran("attention", partial(_attention, layer, ranks))
    return {
        "checks": checks,
        "failure": failure,
        "rotary_table": table_hash(layer.self_attn.rotary_emb.cos_sin_cache),
        "seconds": round(time.monotonic() - started, 2),
    }


def ran(name: str, check: Callable[[], str]) -> str:
    """Return what a check found, or one line on the error if it does not even run on this GPU.

    Args:
        name: of the operation, for the message.
        check: returns an empty text, or one line on a difference.
    """
    try:
        failure = check()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  Triton, CUDA and libraries each have their own for a kernel that a GPU lacks
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return f"{name} does not run on this GPU ({_gpu()}): {type(error).__name__}: {first[:300]}"
    return failure


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _first_layers(model: Any) -> tuple[Any, Any]:
    """Return a layer to test, a dense one if there is any, and the experts of a layer or None.

    Raises:
        UnsupportedModel: a layer has other parts than the shared operations compute.
    """
    dense, mixtures = list[Any](), list[Any]()
    for layer in model.model.layers:
        is_mixture = hasattr(layer.mlp, "experts")
        _require_parts(model, layer, _MIXTURE if is_mixture else _DENSE)
        (mixtures if is_mixture else dense).append(layer)
    if not mixtures:
        return dense[0], None
    mixture = mixtures[0].mlp
    if reason := other_experts(mixture):
        raise UnsupportedModel(
            f"deterministic mode does not know the experts of {type(model).__name__}: {reason}"
        )
    return (dense or mixtures)[0], mixture


_ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj", "self_attn.rotary_emb.cos_sin_cache")
_DENSE = (*_ATTENTION, "mlp.gate_up_proj", "mlp.act_fn")
_MIXTURE = (*_ATTENTION, "mlp.gate.weight", "mlp.experts.routed_experts.w13_weight")


def _require_parts(model: Any, layer: Any, paths: tuple[str, ...]) -> None:
    for path in paths:
        part = layer
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            raise UnsupportedModel(
                f"deterministic mode does not know {type(model).__name__}: its layers have no {path}; "
                "it knows decoders like Qwen3, Qwen2.5, Llama and Qwen3-MoE"
            )


def _sizes(total: int) -> list[int]:
    return [size for size in (*SIZES, *SIZES_ABOVE) if size < total]


def first_difference(
    name: str, operation: Operation, total: int, expected: torch.Tensor | None = None
) -> str:
    """Compare batches of an operation's rows with the same rows of its largest batch.

    Args:
        name: for the message.
        operation: result for a slice of its rows, rows first.
        total: rows of the largest batch.
        expected: all rows of the same numbers, computed in another layout.

    Returns:
        empty, or one line with the batch, the first row and column that differ, and both values.
    """
    whole, against = expected, "of the same in the other layout"
    if whole is None:
        whole, against = operation(slice(0, total)), f"of the same among {total}"
    sizes = [*_sizes(total), *([] if expected is None else [total])]
    batches = [(start, size) for size in sizes for start in {0, total - size}]
    # All are started before the first result is waited for, so that a test takes no longer than the
    # products.
    counts = [differing(operation(slice(a, a + n)), whole[a : a + n]).sum() for a, n in batches]
    wrong = torch.stack(counts).tolist()
    for (start, size), count in zip(batches, wrong, strict=True):
        if count:
            again = operation(slice(start, start + size))
            where = describe_difference(again, whole[start : start + size])
            comparison = f"of {size} rows by themselves and {against}, {count} values differ"
            cause = "depends on the batch" if expected is None else "depends on the layout"
            return f"{name} {cause}: {comparison}, {where}"
    return ""


def _all_operations(model: Any, layer: Any, ranks: int) -> Iterator[tuple[Any, ...]]:
    """(name, rows, operation) of one rank, then (name, rows, operation, expected) of layouts."""
    yield from _operations(model, layer, ranks)
    if ranks == 1:
        return
    hidden = layer.input_layernorm.weight
    parts = torch.stack(
        [random_rows(ROWS, len(hidden), like=hidden, seed=20 + rank) for rank in range(ranks)]
    )
    yield f"add_parts {[ranks, len(hidden)]}", ROWS, lambda s: ops.add_parts(parts[:, s])
    weights = {
        "qkv_proj": layer.self_attn.qkv_proj.weight.data,
        "lm_head": _head_weight(model),
    }
    if hasattr(layer.mlp, "gate_up_proj"):
        weights["gate_up_proj"] = layer.mlp.gate_up_proj.weight.data
    rows = {"lm_head": HEAD_ROWS}
    products = {
        name: (weight, random_rows(rows.get(name, ROWS), weight.shape[1], like=weight, seed=30))
        for name, weight in weights.items()
    }
    yield from width_checks(products, ranks)
    weight = layer.self_attn.o_proj.weight.data
    x = random_rows(ROWS, weight.shape[1], like=weight, seed=31)
    yield row_check("o_proj", weight, x, ranks)


def _head_weight(model: Any) -> torch.Tensor:
    head = getattr(model, "lm_head", None)
    module = model.model.embed_tokens if head is None else head
    weight: torch.Tensor = module.weight.data
    return weight


def _operations(model: Any, layer: Any, ranks: int) -> Iterator[tuple[str, int, Operation]]:
    """(name, rows, operation) for each shape of the model."""
    attention, mlp = layer.self_attn, layer.mlp
    head_weight = _head_weight(model)
    named = {"qkv_proj": attention.qkv_proj, "o_proj": attention.o_proj}
    if hasattr(mlp, "gate_up_proj"):
        named |= {"gate_up_proj": mlp.gate_up_proj, "down_proj": mlp.down_proj}
    weights = {
        name: (module.weight.data, getattr(module, "bias", None)) for name, module in named.items()
    }
    for name, (weight, bias) in {**weights, "lm_head": (head_weight, None)}.items():
        total = HEAD_ROWS if weight.shape[0] > _WIDE else ROWS
        x = random_rows(total, weight.shape[1], like=weight)
        title = f"linear {name} {list(weight.shape)}"
        yield title, total, partial(_linear_rows, x, weight, bias)
    norm = layer.input_layernorm
    x, residual = (
        random_rows(ROWS, len(norm.weight), like=norm.weight, seed=seed) for seed in (1, 2)
    )
    eps = norm.variance_epsilon
    yield f"rms_norm [{x.shape[1]}]", ROWS, lambda s: ops.rms_norm(x[s], norm.weight, eps)
    yield (
        f"fused_add_rms_norm [{x.shape[1]}]",
        ROWS,
        lambda s: _both(ops.fused_add_rms_norm(x[s], residual[s], norm.weight, eps)),
    )
    qkv = random_rows(ROWS, weights["qkv_proj"][0].shape[0], like=norm.weight, seed=3)
    dim = attention.head_dim
    q, k, _ = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    if hasattr(attention, "q_norm"):
        weight = attention.q_norm.weight
        yield (
            f"rms_norm of heads [{dim}]",
            ROWS,
            lambda s: ops.rms_norm(q[s].unflatten(-1, (-1, dim)), weight, eps),
        )
    table, interleaved = attention.rotary_emb.cos_sin_cache, not attention.rotary_emb.is_neox_style
    positions = torch.arange(ROWS, device=x.device) % table.shape[0]
    yield (
        "rotary_embedding",
        ROWS,
        lambda s: _both(ops.rotary_embedding(positions[s], q[s], k[s], dim, table, interleaved)),
    )
    gate_up = random_rows(ROWS, _gate_up_width(mlp), like=norm.weight, seed=4)
    yield f"silu_and_mul [{gate_up.shape[1]}]", ROWS, lambda s: ops.silu_and_mul(gate_up[s])
    vocabulary = ranks * head_weight.shape[0]  # the sampler has the logits of all ranks
    logits = 4 * random_rows(HEAD_ROWS, vocabulary, like=norm.weight, seed=5)
    ids = torch.arange(HEAD_ROWS, device=x.device).unsqueeze(1) % logits.shape[1]
    yield "chosen_logprobs", HEAD_ROWS, lambda s: ops.token_logprobs(logits[s], ids[s])
    yield "softmax of the sampler", HEAD_ROWS, lambda s: ops.log_softmax(logits[s]).exp_()


def _gate_up_width(mlp: Any) -> int:
    if hasattr(mlp, "gate_up_proj"):
        return int(mlp.gate_up_proj.weight.shape[0])
    return int(mlp.experts.routed_experts.w13_weight.shape[1])


def _linear_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: slice
) -> torch.Tensor:
    return ops.linear(x[rows], weight, bias)


def _both(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat(pair, dim=-1)


def _layers_failure(layer: Any) -> str:
    """Do vLLM's own layers compute what the operations compute? Empty, or one line."""
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    eps, rows = norm.variance_epsilon, 300
    x, residual = (
        random_rows(rows, len(norm.weight), like=norm.weight, seed=seed) for seed in (6, 7)
    )
    positions = torch.arange(rows, device=x.device) % attention.rotary_emb.cos_sin_cache.shape[0]
    qkv = ops.linear(x, attention.qkv_proj.weight, getattr(attention.qkv_proj, "bias", None))
    q, k, _ = (
        part.contiguous()
        for part in qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    )
    dim, table = attention.head_dim, attention.rotary_emb.cos_sin_cache
    pairs = {
        "RMSNorm": (norm(x.clone()), ops.rms_norm(x, norm.weight, eps)),
        "RMSNorm with residual": (
            _both(norm(x.clone(), residual.clone())),
            _both(ops.fused_add_rms_norm(x, residual, norm.weight, eps)),
        ),
        "qkv_proj": (attention.qkv_proj(x)[0], qkv),
        "rotary_emb": (
            _both(attention.rotary_emb(positions, q.clone(), k.clone())),
            _both(
                ops.rotary_embedding(
                    positions, q, k, dim, table, not attention.rotary_emb.is_neox_style
                )
            ),
        ),
    }
    if hasattr(mlp, "gate_up_proj"):
        gate_up = ops.linear(x, mlp.gate_up_proj.weight, getattr(mlp.gate_up_proj, "bias", None))
        pairs["gate_up_proj"] = (mlp.gate_up_proj(x)[0], gate_up)
        pairs["act_fn"] = (mlp.act_fn(gate_up), ops.silu_and_mul(gate_up))
    return _pairs_failure(pairs)


def _experts_failure(mixture: Any) -> str:
    """Return one line if vLLM's experts do not compute what the operations do."""
    return ties_failure(mixture) or _pairs_failure(layer_pairs(mixture))


def _pairs_failure(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    for name, (theirs, ours) in pairs.items():
        if not same_bits(theirs, ours):
            return f"vLLM's layer {name} does not run the shared operation: {describe_difference(theirs, ours)}"
    return ""


def _attention(layer: Any, ranks: int) -> str:
    attention, like = layer.self_attn, layer.input_layernorm.weight
    dim = attention.head_dim
    failure = attention_failure(attention.q_size // dim, attention.kv_size // dim, dim, like)
    if failure or ranks == 1:
        return failure
    heads = attention.total_num_heads, attention.total_num_kv_heads
    return split_attention_failure(*heads, dim, ranks, like)
