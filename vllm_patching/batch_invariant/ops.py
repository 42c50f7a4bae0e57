"""The operations of a decoder, one implementation for both sides: no autograd, nothing in place for
the caller.

On a GPU each function runs the very kernel that vLLM runs in deterministic mode, on the same
dtypes. So equal inputs give equal bits whatever else is in the batch. On a CPU a reference runs
(`reference`), which is invariant to the batch too but has other bits than vLLM. Run them under
`settings.settings()` or after `settings.enable_settings()`.

Shapes: tokens of all sequences are packed into one dimension; heads come before the head's
dimension.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from vllm_patching.batch_invariant import reference
from vllm_patching.batch_invariant.flash_attention import flash_attention_version
from vllm_patching.batch_invariant.pages import page_plan
from vllm_patching.batch_invariant.provenance import provenance
from vllm_patching.batch_invariant.settings import settings

__all__ = [
    "add_parts",
    "attention_paged",
    "attention_scale",
    "attention_varlen",
    "chosen_logprobs",
    "experts",
    "fused_add_rms_norm",
    "linear",
    "log_softmax",
    "log_sum_exp",
    "provenance",
    "rms_norm",
    "rotary_embedding",
    "rotary_table",
    "route",
    "row_linear",
    "row_parts",
    "settings",
    "silu_and_mul",
    "token_logprobs",
]

VOCAB_MULTIPLE = 64
"""vLLM pads the rows of an output head to a multiple of this; a product with other columns might
take another kernel."""
LOGIT_ROWS = 1024
"""Tokens whose logits exist at once in chosen_logprobs. Rows do not depend on each other, so this
changes no bit."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T (+ bias). One cuBLASLt product without split-K; the bias is added to the rounded
    product.

    Args:
        x: [..., in].
        weight: [out, in], the dtype of x.
        bias: [out].

    Returns:
        [..., out], the dtype of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    product = (
        torch.nn.functional.linear(flat, weight) if x.is_cuda else reference.linear(flat, weight)
    )
    if bias is not None:
        # Within the product, the library may add it before or after rounding, as suits the number
        # of rows.
        product = product + bias
    return product.view(*x.shape[:-1], weight.shape[0])


def row_parts(
    x: torch.Tensor, weight: torch.Tensor, parts: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The products that `parts` of vLLM's tensor-parallel ranks compute of a row-parallel layer.

    Inputs and weight are copied part by part: a rank of vLLM has them contiguous, and a library may
    take another kernel for a view.

    Args:
        x: [rows, in], in a multiple of `parts`.
        weight: [out, in].
        bias: [out], added to the first part, as vLLM's first rank does; only for the first ranks.

    Returns:
        [parts, rows, out], each the product over in / parts columns, in the dtype of x.
    """
    return torch.stack(list(part_products(x, weight, parts, bias)))


def part_products(
    x: torch.Tensor, weight: torch.Tensor, parts: int, bias: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yield the products of row_parts one after the other."""
    if parts < 1 or weight.shape[1] % parts:
        raise ValueError(f"{weight.shape[1]} columns cannot be cut into {parts} equal parts")
    width = weight.shape[1] // parts
    for columns, of_weight in zip(x.split(width, dim=-1), weight.split(width, dim=-1), strict=True):
        yield linear(columns.contiguous(), of_weight.contiguous(), bias)
        bias = None  # the first part's alone


def add_parts(parts: torch.Tensor) -> torch.Tensor:
    """Add parts [n, rows, out] in float32 in their order and round once: [rows, out].

    A row's bits do not depend on the other rows. n is at most 8. A sum of zeros is +0.0 unless all
    are -0.0.
    """
    return _kernels().add_parts(parts) if parts.is_cuda else reference.add_parts(parts)


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, parts: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T (+ bias) in the bits of `parts` tensor-parallel ranks of vLLM; [rows, out].

    With one part it is `linear`, else add_parts(row_parts(...)) without keeping the parts. See
    `row_parts` for the arguments.
    """
    if parts == 1:
        return linear(x, weight, bias)
    products = part_products(x, weight, parts, bias)
    first = next(products)
    total = first.to(_wide(first), copy=True)
    for product in products:
        total += product
    return total.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension: float32 inside, rounded once.

    Args:
        x: [..., dim] of up to 3 dimensions; a view on heads of a wider row needs no copy.
        weight: [dim].

    Returns:
        contiguous, the shape and dtype of x.
    """
    if not x.is_cuda:
        return reference.rms_norm(x, weight, eps)
    return _kernels().rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r), r) with r = x + residual rounded to their dtype.

    Args:
        x, residual: [tokens, dim].
        weight: [dim].
    """
    if not x.is_cuda:
        return reference.fused_add_rms_norm(x, residual, weight, eps)
    return _kernels().fused_add_rms_norm(x, residual, weight, eps)


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    head_dim: int,
    cos_sin_cache: torch.Tensor,
    interleaved: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k by their positions. Returns new tensors, unless `in_place`.

    The first half of a head's first rotary_dim dimensions is rotated with the second (neox style).

    Args:
        positions: [tokens] int64.
        q: [tokens, heads * head_dim] (or with the heads apart); k in the same layout with its own
            number of heads.
        cos_sin_cache: [max_position, rotary_dim] in the model's dtype: cosines, then sines; see
            `rotary_table`.
        interleaved: neighbours are rotated, instead of the halves.
        in_place: q and k, which are contiguous, may be overwritten.
    """
    if not q.is_cuda:
        return reference.rotary_embedding(positions, q, k, head_dim, cos_sin_cache, interleaved)
    rotated, rotated_k = (part.reshape(part.shape[0], -1) for part in (q, k))
    if not in_place:
        kept = torch.contiguous_format
        rotated, rotated_k = (part.clone(memory_format=kept) for part in (rotated, rotated_k))
    _vllm_ops().rotary_embedding(
        positions, rotated, rotated_k, head_dim, cos_sin_cache, not interleaved
    )
    return rotated.view(q.shape), rotated_k.view(k.shape)


def rotary_table(
    head_dim: int, max_position: int, theta: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """cos_sin_cache as vLLM makes it for plain rotary embeddings: float32 on the device, then
    rounded to the model's dtype.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim
    angles = torch.einsum(
        "i,j -> ij",
        torch.arange(max_position, dtype=torch.float, device=device),
        1.0 / (theta**exponents),
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for x [..., 2 * n] that holds the gate in its first half; vLLM's own kernel."""
    if not x.is_cuda:
        return reference.silu_and_mul(x)
    _vllm_ops()
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x)
    return out


def route(
    logits: torch.Tensor, count: int, renormalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `count` most likely experts of each token; of equal ones the lower numbers.

    Args:
        logits: [tokens, experts].
        renormalised: a token's weights are divided by their sum.

    Returns:
        (weights [tokens, count] float32, experts [tokens, count] int64), the most likely first.
    """
    if not logits.is_cuda:
        return reference.route(logits, count, renormalised)
    weights, chosen = _kernels().route(logits, count, renormalised)
    return weights, chosen


class Assigned(NamedTuple):
    """The rows of all experts, one expert after the other, each in the order of the tokens.

    Attributes:
        order: [rows] int64, token · count + slot of each row.
        tokens: [rows] int64, the token of each row.
        places: [tokens · count] int64, the row of each token's slot.
        ends: [experts] int32, one past the last row of each.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def assign(chosen: torch.Tensor, experts: int) -> Assigned:
    """Sort the choices [tokens, count] by expert. Everything stays on the device."""
    if not chosen.is_cuda:
        return Assigned(*reference.assign(chosen, experts))
    return Assigned(*_expert_kernels().assign(chosen, experts))


def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of each row with its expert's matrix: [rows, out].

    Args:
        x: [rows, in], sorted by expert; with `tokens`, [tokens, in].
        weight: [experts, out, in].
        ends: see Assigned.
        tokens: see Assigned; the row of x for each row. Not given: x has the rows themselves.
    """
    if x.is_cuda and _expert_kernels().takes(len(x if tokens is None else tokens), weight):
        few: torch.Tensor = _expert_kernels().few_rows(x, weight, ends, tokens)
        return few
    rows = x if tokens is None else x.index_select(0, tokens)
    product = grouped_product if x.is_cuda else reference.expert_linear
    return product(rows, weight, ends)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See expert_linear. PyTorch's grouped product; a row's bits do not depend on its neighbours'.

    Raises:
        ValueError: the rows are too narrow for the kernel's alignment.
    """
    if weight.shape[1] * weight.itemsize % 16 or weight.shape[2] * weight.itemsize % 16:
        raise ValueError(
            f"experts' matrices {list(weight.shape[1:])} in {weight.dtype}: PyTorch's grouped "
            "product needs both sizes to be multiples of 16 bytes; take a model of such sizes"
        )
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    result: torch.Tensor = product(rows, weight.transpose(1, 2), offs=ends)
    return result


def weighted_sum(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ over slots of weights[token, slot] · rows[places[token, slot]], slot after slot in float32.

    Args:
        rows: [rows, dim]; places: see Assigned.
        weights: [tokens, count] float32.

    Returns:
        [tokens, dim], rounded once to the dtype of the rows.
    """
    if not rows.is_cuda:
        return reference.weighted_sum(rows, places, weights)
    summed: torch.Tensor = _kernels().weighted_sum(rows, places, weights)
    return summed


class Mixed(NamedTuple):
    """Outputs of the experts, and the values that a backward pass needs.

    Attributes:
        outputs: [parts, tokens, dim].
        inner: [rows, 2 · inner], the gate's and the up projection's outputs.
    """

    outputs: torch.Tensor
    inner: torch.Tensor
    assigned: Assigned


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    parts: int = 1,
) -> torch.Tensor:
    """The weighted sum of the gated MLPs that were chosen for each token: [tokens, dim].

    A token's slots are added in their order in float32, and the sum is rounded once. It waits for
    nothing on the host.

    Args:
        x: [tokens, dim].
        weights, chosen: see `route`.
        w13: [experts, 2 · inner, dim], the gate in the first half of each expert's rows.
        w2: [experts, dim, inner].
        parts: vLLM's tensor-parallel ranks, whose bits the result has. Each has a part of the inner
            width of every expert, and their sums are added as `add_parts` does.
    """
    outputs = mix(x, weights, chosen, w13, w2, silu_and_mul, parts).outputs
    return outputs[0] if parts == 1 else add_parts(outputs)


def mix(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    gated: Callable[[torch.Tensor], torch.Tensor],
    parts: int = 1,
) -> Mixed:
    """See `experts`; `gated` is `silu_and_mul` or another kernel for it.

    Inner values and matrices are copied part by part, see `row_parts`.
    """
    if parts < 1 or w2.shape[2] % parts:
        raise ValueError(f"an inner width of {w2.shape[2]} cannot be cut into {parts} equal parts")
    assigned = assign(chosen, w13.shape[0])
    inner = expert_linear(x, w13, assigned.ends, assigned.tokens)
    width = w2.shape[2] // parts
    outputs = [
        weighted_sum(
            expert_linear(values.contiguous(), matrices.contiguous(), assigned.ends),
            assigned.places,
            weights,
        )
        for values, matrices in zip(
            gated(inner).split(width, dim=1), w2.split(width, dim=2), strict=True
        )
    ]
    stacked = outputs[0].unsqueeze(0)
    if parts > 1:
        stacked = torch.stack(outputs)
    return Mixed(stacked, inner, assigned)


class SeenKeys(NamedTuple):
    """The keys that packed sequences see where some continue others.

    Attributes:
        rows: [keys] int64, the tokens whose keys each sequence sees, sequence after sequence, in
            the order of their positions. The last ones are the sequence's own.
        cu: [sequences + 1] int32, where the keys of each sequence begin in `rows`, and the end of
            the last.
        longest: the most keys of a sequence.
    """

    rows: torch.Tensor
    cu: torch.Tensor
    longest: int


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    shared: SeenKeys | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each of the packed sequences, in the bits of vLLM's prefill and
    decode.

    A sequence that continues others has the bits of one that holds their tokens too. For vLLM's
    kernel it is a request whose first tokens are in the cache. The last query sees all keys, the
    one before it all but one, and so on. By its sources, FlashAttention 3 chooses the queries of a
    tile by the number of queries. But it takes blocks of 128 keys for heads of 128 in any case.

    Keys and values are laid out in pages as vLLM's cache has them, because FlashAttention chooses
    its tiles by that.

    Args:
        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], heads a multiple of kv_heads.
        cu_seqlens: [sequences + 1] int32, on the device: where each sequence begins, and the end of
            the last.
        max_seqlen: of the longest sequence.
        scale: of the products of queries and keys.
        shared: the keys that each sequence sees; not given: its own.

    Returns:
        ([tokens, heads, dim] in q's dtype, log of the sum of exponentials [heads, tokens] float32)
    """
    if not q.is_cuda:
        return reference.attention_varlen(q, k, v, cu_seqlens, scale, shared)
    if shared is None:
        plan, longest = page_plan(cu_seqlens, len(k), max_seqlen), max_seqlen
    else:
        k, v = k.index_select(0, shared.rows), v.index_select(0, shared.rows)
        plan, longest = page_plan(shared.cu, len(k), shared.longest), shared.longest
    keys, values = plan.lay_out(k, v)
    return attention_paged(
        q, keys, values, cu_seqlens, max_seqlen, plan.lengths, longest, plan.block_table, scale
    )


def attention_paged(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    seen: torch.Tensor,
    max_seen: int,
    block_table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call that vLLM makes: the newest tokens of each sequence attend to all of its tokens so
    far. GPU only.

    Args:
        q, cu_seqlens, max_seqlen: as in attention_varlen, of the new tokens alone.
        keys, values: [pages, page, kv_heads, dim].
        seen, max_seen: [sequences] int32, tokens of each with the new ones; the most of them.
        block_table: [sequences, pages of the longest] int32.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _flash_attention().flash_attn_varlen_func(
        q=q,
        k=keys,
        v=values,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=max_seqlen,
        seqused_k=seen,
        max_seqlen_k=max_seen,
        softmax_scale=scale,
        causal=True,
        block_table=block_table,
        return_softmax_lse=True,
        num_splits=1,
        fa_version=_flash_attention_version(),
    )
    return result


def attention_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim), rounded as vLLM's models compute it."""
    return float(head_dim**-0.5)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float32 log_softmax over the last dimension, of logits [tokens, vocab] in any dtype: what
    vLLM's sampler calls.
    """
    return logits.to(_wide(logits)) - log_sum_exp(logits).unsqueeze(-1)


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of each row of logits [tokens, vocab] in any floating dtype; [tokens]
    float32.
    """
    return _kernels().log_sum_exp(logits) if logits.is_cuda else reference.log_sum_exp(logits)


def chosen_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each target: logits in the model's dtype, then float32 log_softmax.

    Args:
        hidden: [tokens, dim], after the last norm.
        weight: [vocab, dim], of the output head.
        targets: [tokens] int64, below vocab.

    Returns:
        [tokens] float32.
    """
    vocab = weight.shape[0]
    missing = -vocab % VOCAB_MULTIPLE
    if missing and hidden.is_cuda:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    chosen = []
    for rows, ids in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        logits = linear(rows, weight)[:, :vocab]
        chosen.append(token_logprobs(logits, ids.unsqueeze(-1)).squeeze(-1))
    return torch.cat(chosen)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The entries of log_softmax at some tokens, without making the others.

    Args:
        logits: [tokens, vocab].
        token_ids: [tokens, k] int64.

    Returns:
        [tokens, k] float32.
    """
    return logits.gather(-1, token_ids).to(_wide(logits)) - log_sum_exp(logits).unsqueeze(-1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("vllm_patching.batch_invariant.kernels")


@functools.cache
def _expert_kernels() -> ModuleType:
    return importlib.import_module("vllm_patching.batch_invariant.expert_kernels")


@functools.cache
def _vllm_ops() -> ModuleType:
    return importlib.import_module("vllm._custom_ops")


@functools.cache
def _flash_attention_version() -> int:
    return flash_attention_version(torch.cuda.get_device_capability()[0])


@functools.cache
def _flash_attention() -> ModuleType:
    module, version = (
        importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface"),
        _flash_attention_version(),
    )
    if not module.is_fa_version_supported(version):
        reason = module.fa_version_unsupported_reason(version)
        raise RuntimeError(
            f"deterministic mode needs FlashAttention {version}, which cannot run here: {reason}"
        )
    return module
