"""Test at every start that the operations keep their bits on this GPU and this model's shapes: no
library promises it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.attention_test import attention_failure
from vllm_patching.batch_invariant.provenance import table_hash

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


def self_test(model: Any) -> dict[str, Any]:
    """Test every operation alone against in batches, and vLLM's own layers against the operations.

    Args:
        model: vLLM's, a dense decoder, on the GPU.

    Returns:
        {"checks": batches compared, "failure": "" or one line on the first difference,
        "rotary_table", "seconds"}
    """
    started = time.monotonic()
    try:
        layer = _first_layer(model)
    except UnsupportedModel as error:
        return {"checks": 0, "failure": str(error), "rotary_table": "", "seconds": 0.0}
    checks, failure = 0, ""
    with torch.inference_mode():
        for name, total, operation in _operations(model, layer):
            checks += 2 * len(_sizes(total))
            failure = ran(name, partial(first_difference, name, operation, total))
            if failure:
                break
        failure = failure or ran("vLLM's layers", partial(_layers_failure, layer))
        failure = failure or ran("attention", partial(_attention, layer))
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


def _first_layer(model: Any) -> Any:
    layer = model.model.layers[0]
    for path in (
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "self_attn.rotary_emb.cos_sin_cache",
        "mlp.gate_up_proj",
        "mlp.act_fn",
    ):
        part = layer
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            raise UnsupportedModel(
                f"deterministic mode does not know {type(model).__name__}: its layers have no {path}; "
                "it knows dense decoders like Qwen3, Qwen2.5 and Llama"
            )
    return layer


def _sizes(total: int) -> list[int]:
    return [size for size in (*SIZES, *SIZES_ABOVE) if size < total]


def first_difference(name: str, operation: Operation, total: int) -> str:
    """Compare batches of an operation's rows with the same rows of its largest batch.

    Args:
        name: for the message.
        operation: result for a slice of its rows, rows first.
        total: rows of the largest batch.

    Returns:
        empty, or one line with the batch, the first row and column that differ, and both values.
    """
    whole = operation(slice(0, total))
    batches = [(start, size) for size in _sizes(total) for start in {0, total - size}]
    # All are started before the first result is waited for, so that a test takes no longer than the
    # products.
    counts = [
        (_bits(operation(slice(a, a + n))) != _bits(whole[a : a + n])).sum() for a, n in batches
    ]
    wrong = torch.stack(counts).tolist()
    for (start, size), count in zip(batches, wrong, strict=True):
        if count:
            again = operation(slice(start, start + size))
            where = describe_difference(again, whole[start : start + size])
            said = (
                f"of {size} rows by themselves and of the same among {total}, {count} values differ"
            )
            return f"{name} depends on the batch: {said}, {where}"
    return ""


def describe_difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """Where two results of equal shape first differ in a bit, and both values."""
    different = (_bits(one) != _bits(other)).flatten(1)
    if not different.any():
        return "but not when it was computed again: the operation does not repeat itself"
    row, column = different.nonzero()[0].tolist()
    values = [x.flatten(1)[row, column].item() for x in (one, other)]
    return f"first at row {row}, column {column}: {values[0]!r} against {values[1]!r}"


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _random(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


def _operations(model: Any, layer: Any) -> Iterator[tuple[str, int, Operation]]:
    """(name, rows, operation) for each shape of the model."""
    attention, mlp = layer.self_attn, layer.mlp
    embedding = model.model.embed_tokens.weight.data
    head = getattr(model, "lm_head", None)
    head_weight = embedding if head is None else head.weight.data
    named = {
        "qkv_proj": attention.qkv_proj,
        "o_proj": attention.o_proj,
        "gate_up_proj": mlp.gate_up_proj,
        "down_proj": mlp.down_proj,
    }
    weights = {
        name: (module.weight.data, getattr(module, "bias", None)) for name, module in named.items()
    }
    for name, (weight, bias) in {**weights, "lm_head": (head_weight, None)}.items():
        total = HEAD_ROWS if weight.shape[0] > _WIDE else ROWS
        x = _random(total, weight.shape[1], like=weight)
        title = f"linear {name} {list(weight.shape)}"
        yield title, total, partial(_linear_rows, x, weight, bias)
    norm = layer.input_layernorm
    x, residual = (_random(ROWS, len(norm.weight), like=norm.weight, seed=seed) for seed in (1, 2))
    eps = norm.variance_epsilon
    yield f"rms_norm [{x.shape[1]}]", ROWS, lambda s: ops.rms_norm(x[s], norm.weight, eps)
    yield (
        f"fused_add_rms_norm [{x.shape[1]}]",
        ROWS,
        lambda s: _both(ops.fused_add_rms_norm(x[s], residual[s], norm.weight, eps)),
    )
    qkv = _random(ROWS, weights["qkv_proj"][0].shape[0], like=norm.weight, seed=3)
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
    gate_up = _random(ROWS, weights["gate_up_proj"][0].shape[0], like=norm.weight, seed=4)
    yield f"silu_and_mul [{gate_up.shape[1]}]", ROWS, lambda s: ops.silu_and_mul(gate_up[s])
    logits = 4 * _random(HEAD_ROWS, head_weight.shape[0], like=norm.weight, seed=5)
    ids = torch.arange(HEAD_ROWS, device=x.device).unsqueeze(1) % logits.shape[1]
    yield "chosen_logprobs", HEAD_ROWS, lambda s: ops.token_logprobs(logits[s], ids[s])
    yield "softmax of the sampler", HEAD_ROWS, lambda s: ops.log_softmax(logits[s]).exp_()


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
    x, residual = (_random(rows, len(norm.weight), like=norm.weight, seed=seed) for seed in (6, 7))
    positions = torch.arange(rows, device=x.device) % attention.rotary_emb.cos_sin_cache.shape[0]
    qkv = ops.linear(x, attention.qkv_proj.weight, getattr(attention.qkv_proj, "bias", None))
    q, k, _ = (
        part.contiguous()
        for part in qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    )
    gate_up = ops.linear(x, mlp.gate_up_proj.weight, getattr(mlp.gate_up_proj, "bias", None))
    dim, table = attention.head_dim, attention.rotary_emb.cos_sin_cache
    pairs = {
        "RMSNorm": (norm(x.clone()), ops.rms_norm(x, norm.weight, eps)),
        "RMSNorm with residual": (
            _both(norm(x.clone(), residual.clone())),
            _both(ops.fused_add_rms_norm(x, residual, norm.weight, eps)),
        ),
        "qkv_proj": (attention.qkv_proj(x)[0], qkv),
        "gate_up_proj": (mlp.gate_up_proj(x)[0], gate_up),
        "rotary_emb": (
            _both(attention.rotary_emb(positions, q.clone(), k.clone())),
            _both(
                ops.rotary_embedding(
                    positions, q, k, dim, table, not attention.rotary_emb.is_neox_style
                )
            ),
        ),
        "act_fn": (mlp.act_fn(gate_up), ops.silu_and_mul(gate_up)),
    }
    for name, (theirs, ours) in pairs.items():
        if not torch.equal(_bits(theirs), _bits(ours)):
            return f"vLLM's layer {name} does not run the shared operation: {describe_difference(theirs, ours)}"
    return ""


def _attention(layer: Any) -> str:
    attention = layer.self_attn
    dim = attention.head_dim
    return attention_failure(
        attention.q_size // dim, attention.kv_size // dim, dim, layer.input_layernorm.weight
    )
