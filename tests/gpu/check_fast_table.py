"""The fast table on a real GPU: its kernels against float64, its decoder against the reference
table, shared prefixes.

    python tests/gpu/check_fast_table.py [--json FILE]

Under a minute; needs neither vLLM nor pytest. Without a GPU the kernels alone can be checked, under
Triton's interpreter: TRITON_INTERPRET=1 python tests/gpu/check_fast_table.py. Every check is made
even if others fail, and reports what it saw.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks import run_checks
from example_trainer.models import Decoder
from example_trainer.models.ops import (
    fast_kernels,
    mixture,
    reference,
    triton_gradients,
    triton_heads,
)
from example_trainer.models.packing import NO_PARENT, Packing
from example_trainer.models.shards import GradientSums
from vllm_patching.batch_invariant import kernels, ops
from vllm_patching.batch_invariant import reference as invariant_reference
from vllm_patching.weights.families import Geometry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL_LIMIT = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Relative error of a tensor: a bf16 result is rounded once, a float32 one hardly at all."""
MODEL_FACTOR, SHARED_LIMIT = 1.5, 2e-2
"""The fast decoder's error may be this many times that of the reference table in the same dtype; a
shared pass's that much."""
Result = tuple[bool, str]
"""The verdict of a check, and its observation."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    wide = expected.detach().double()
    return float((found.detach().double() - wide).norm() / wide.norm().clamp_min(1e-30))


def worst(limit: float, pairs: Sequence[tuple[Tensor, Tensor]]) -> Result:
    """The largest relative error of several tensors."""
    found = max(relative_error(mine, theirs) for mine, theirs in pairs)
    return found <= limit, f"{found:.1e}"


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers, rounded to the dtype."""
    return torch.randn(*shape).to(device=DEVICE, dtype=dtype)


def leaf(x: Tensor) -> Tensor:
    """The same in float64, with a gradient."""
    return x.detach().double().requires_grad_()


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    """The textbook's norm."""
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def norm(dtype: torch.dtype, rows: int, width: int) -> Result:
    """Residual sum and norm, both directions."""
    x, residual, weight, dy, extra = (
        draw(dtype, *shape) for shape in ((rows, width),) * 2 + ((width,),) + ((rows, width),) * 2
    )
    y, total = fast_kernels.norm(x, residual, weight, 1e-6)
    # The norm takes the rounded sum; its gradient is taken there.
    wide, factor = leaf(total), leaf(weight)
    expected = rms(wide, factor)
    gradients = torch.autograd.grad(
        (expected * dy.double()).sum() + (wide * extra.double()).sum(), (wide, factor)
    )
    mine = fast_kernels.norm_gradient(dy, total, weight, 1e-6, extra)
    whole = x.double() + residual.double()
    return worst(
        KERNEL_LIMIT[dtype], [(y, expected), (total, whole), *zip(mine, gradients, strict=True)]
    )


def heads(
    dtype: torch.dtype,
    tokens: int,
    shape: tuple[int, int, int],
    normed: bool,
    turned: int | None = None,
    interleaved: bool = False,
) -> Result:
    """Norms of heads, rotation, and the way back; `shape` is query heads, key heads, width;
    `turned` of the width is rotated (None: all).
    """
    count, kv, width = shape
    qkv, weights = (
        draw(dtype, tokens, (count + 2 * kv) * width),
        (draw(dtype, width), draw(dtype, width)),
    )
    packing = Packing([tokens // 3, 1, tokens - tokens // 3 - 1], DEVICE)
    positions = packing.positions
    turned = turned or width
    angles = torch.randn(tokens, turned // 2, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    cos, sin = table.double()[positions][:, None].chunk(2, -1)

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        normed_x = rms(x, weight)
        rest = normed_x[..., turned:]
        pairs = normed_x[..., :turned].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        axis = -1 if interleaved else -2
        first, second = pairs.unbind(axis)
        both = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
        return torch.cat((both.flatten(-2), rest), -1)

    wide = leaf(qkv)
    leaves = [leaf(weight) for weight in weights] if normed else [None, None]
    parts = wide.view(tokens, -1, width)
    expected = (
        rotated(parts[:, :count], leaves[0]),
        rotated(parts[:, count : count + kv], leaves[1]),
    )
    norms = weights if normed else None
    found = fast_kernels.heads(qkv, kv, width, norms, 1e-6, positions, table, interleaved)
    upstream = [draw(dtype, tokens, number, width) for number in (count, kv, kv)]
    outputs = (*expected, parts[:, count + kv :])
    loss = sum((out * up.double()).sum() for out, up in zip(outputs, upstream, strict=True))
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, [wide, *(one for one in leaves if one is not None)])
    dqkv, shares = triton_heads.heads_gradient(
        upstream[0], upstream[1], upstream[2], qkv, norms, 1e-6, packing, table, interleaved
    )
    mine = (dqkv, *(() if shares is None else shares.sum((1, 2))))
    return worst(
        KERNEL_LIMIT[dtype],
        [*zip(found, expected, strict=True), *zip(mine, gradients, strict=True)],
    )


def silu(dtype: torch.dtype, rows: int, width: int) -> Result:
    """The gated product, both directions."""
    x, dy = draw(dtype, rows, 2 * width), draw(dtype, rows, width)
    wide = leaf(x)
    gate, up = wide.chunk(2, -1)
    expected = F.silu(gate) * up
    (gradient,) = torch.autograd.grad((expected * dy.double()).sum(), wide)
    mine = fast_kernels.silu_and_mul(x), triton_gradients.silu_and_mul_gradient(dy, x)
    return worst(KERNEL_LIMIT[dtype], list(zip(mine, (expected, gradient), strict=True)))


def softmax(
    dtype: torch.dtype, rows: int, vocab: int, temperature: float | None, with_entropy: bool
) -> Result:
    """Logprobs, entropies and the logits' gradient; no temperature: each row has its own."""
    logits, targets = draw(dtype, rows, vocab) * 4, torch.randint(0, vocab, (rows,), device=DEVICE)
    wide, upstream, entropy_upstream = (
        leaf(logits),
        torch.randn(rows, device=DEVICE),
        torch.randn(rows, device=DEVICE),
    )
    inverse = (
        torch.linspace(0.5, 2, rows, device=DEVICE) if temperature is None else 1 / temperature
    )
    scaled = wide * (inverse[:, None] if isinstance(inverse, Tensor) else inverse)
    table = scaled.log_softmax(-1)
    chosen, entropies = table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)
    logprobs, entropy, lse = fast_kernels.softmax_figures(logits, targets, inverse)
    forward = worst(5e-6, [(logprobs, chosen), (entropy, entropies), (lse, scaled.logsumexp(-1))])
    loss = (chosen * upstream.double()).sum()
    if with_entropy:
        loss = loss + (entropies * entropy_upstream.double()).sum()
    (gradient,) = torch.autograd.grad(loss, wide)
    arriving = (entropy, entropy_upstream) if with_entropy else None
    triton_gradients.logit_gradient(logits, targets, lse, upstream, inverse, arriving)
    backward = worst(KERNEL_LIMIT[dtype], [(logits, gradient)])
    return forward[0] and backward[0], f"{forward[1]} and {backward[1]}"


def head(name: str, dtype: torch.dtype, totals: bool) -> Result:
    """The output head of the fast table: several chunks, a temperature for each row, gradients of
    logprobs and entropies.
    """
    from example_trainer.models.ops import fast
    from tests.example_trainer.deterministic.cases import Sizes, errors

    found = errors(name, Sizes((80, 1, 60), vocab=300), dtype, DEVICE, ops=fast, totals=totals)
    return max(found.values()) <= KERNEL_LIMIT[dtype], ", ".join(
        f"{key} {error:.1e}" for key, error in found.items()
    )


def routed(dtype: torch.dtype, tokens: int, experts: int, count: int) -> Result:
    """The router's kernel, with equal logits in each row, beside the reference's choices."""
    logits = draw(dtype, tokens, experts)
    logits[:, experts // 2 :] = logits[:, : experts - experts // 2]
    details = []
    for renormalised in (False, True):
        weights, chosen = kernels.route(logits, count, renormalised)
        expected, numbers = invariant_reference.route(logits.cpu(), count, renormalised)
        wrong = int((chosen.cpu() != numbers).any(dim=1).sum())
        details.append((wrong, relative_error(weights.cpu(), expected)))
    passed_all = all(not wrong and error < 5e-6 for wrong, error in details)
    return passed_all, ", ".join(f"{wrong} tokens differ, {error:.1e}" for wrong, error in details)


def mixed(dtype: torch.dtype, totals: bool) -> Result:
    """Experts with Triton's kernels for all but the products, both directions; one is idle."""
    from tests.example_trainer.deterministic.cases import Sizes, errors

    def experts(
        x: Tensor, weights: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor, packing: Packing,
        sums: Any, parts: int = 1,
    ) -> Tensor:  # fmt: skip
        functions = mixture.Kernels(fast_kernels.silu_and_mul, triton_gradients)
        begins = packing.cu_seqlens
        return mixture.experts(x, weights, chosen, w13, w2, begins, sums, functions, parts=parts)

    table: Any = SimpleNamespace(experts=experts)
    sizes = Sizes((80, 1, 60), hidden=144, inner=136)
    differences = errors("experts", sizes, dtype, DEVICE, ops=table, totals=totals)
    return max(differences.values()) <= KERNEL_LIMIT[dtype], ", ".join(
        f"{key} {error:.1e}" for key, error in differences.items()
    )


def grouped(dtype: torch.dtype, tokens: int) -> Result:
    """PyTorch's grouped product beside plain ones, and each row's bits in a smaller batch."""
    experts, count = 16, 4
    x, weight = draw(dtype, tokens, 64), draw(dtype, experts, 32, 64)
    chosen = torch.rand(tokens, experts, device=DEVICE).argsort()[:, :count]

    def slots(rows: slice) -> Tensor:
        assigned = ops.assign(chosen[rows], experts)
        picked = x[rows][assigned.tokens]
        return ops.grouped_product(picked, weight, assigned.ends)[assigned.places]

    whole = slots(slice(0, tokens))
    expected = torch.einsum("toh,th->to", weight[chosen.flatten()].double(),
                            x.double().repeat_interleave(count, 0))  # fmt: skip
    changed = sum(
        not torch.equal(slots(slice(first, last)), whole[first * count : last * count])
        for first, last in ((0, 1), (3, 7), (tokens // 2, tokens))
    )
    good, error = worst(KERNEL_LIMIT[dtype], [(whole, expected)])
    return good and not (changed and DEVICE == "cuda"), f"{error}, {changed} batches differ"


def added_slots(dtype: torch.dtype) -> Result:
    """The weighted sum over slots beside float64."""
    rows, weights = draw(dtype, 30, 200), torch.randn(10, 3, device=DEVICE)
    places = torch.randperm(30, device=DEVICE)
    expected = (rows[places].double().view(10, 3, -1) * weights.double()[:, :, None]).sum(1)
    return worst(KERNEL_LIMIT[dtype], [(kernels.weighted_sum(rows, places, weights), expected)])


def geometry(**changes: Any) -> Geometry:
    """A decoder of four layers."""
    sizes: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM", "vocab_size": 5003, "hidden_size": 512, "intermediate_size": 1408, "num_layers": 4,
        "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "max_positions": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "qk_norm": True, "tie_word_embeddings": True,
    }  # fmt: skip
    return Geometry(**(sizes | changes))


def passed(
    shape: Geometry, weights: dict[str, Tensor] | None, dtype: torch.dtype, ops: Any, tokens: Tensor, packing: Packing,
    sources: Tensor, targets: Tensor, checkpointing: bool = False, summed: bool = True,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """One pass of a decoder: logprobs, gradients of their mean by parameter, and the weights that
    it had.
    """
    model = Decoder(shape, dtype, DEVICE, ops=ops)
    model.gradient_checkpointing = checkpointing
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is not None:
                parameter.copy_(weights[name])
            elif parameter.dim() >= 2:
                parameter.normal_(std=0.04)
            else:
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    if summed:
        model.arithmetic.sums = GradientSums(model)
    hidden = model.arithmetic.ops.rows(model(tokens, packing), sources)
    logprobs, _ = model.chosen_logprobs(
        hidden, targets, Packing([len(targets)], DEVICE), chunk=100, temperature=0.9
    )
    (logprobs * torch.linspace(-1, 1, len(targets), device=DEVICE)).sum().backward()
    gradients = (
        model.arithmetic.sums.take()
        if model.arithmetic.sums
        else {n: p.grad for n, p in model.named_parameters()}
    )
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return (
        logprobs.detach(),
        {name: gradient for name, gradient in gradients.items() if gradient is not None},
        kept,
    )


def decoder(shape: Geometry, checkpointing: bool, summed: bool) -> Result:
    """Logprobs and gradients in bf16: as near to float64 as the reference table in bf16 is?"""
    from example_trainer.models.ops import fast

    packing = Packing([5, 300, 1, 77, 640], DEVICE)
    tokens = torch.randint(0, shape.vocab_size, (packing.tokens,), device=DEVICE)
    sources = torch.arange(packing.tokens - 1, device=DEVICE)
    arguments = tokens, packing, sources, tokens[1:]
    ours, gradients, weights = passed(
        shape, None, torch.bfloat16, fast, *arguments, checkpointing, summed
    )
    plain, plain_gradients, _ = passed(shape, weights, torch.bfloat16, reference, *arguments)
    exact, exact_gradients, _ = passed(shape, weights, torch.float64, reference, *arguments)
    if gradients.keys() != exact_gradients.keys():
        return False, f"no gradient of {sorted(exact_gradients.keys() - gradients.keys())[:3]}"
    errors = {
        name: relative_error(gradients[name], exact_gradients[name]) for name in exact_gradients
    }
    limits = {
        name: MODEL_FACTOR * relative_error(plain_gradients[name], exact_gradients[name]) + 1e-3
        for name in errors
    }
    bad = [
        f"{name} {errors[name]:.1e} > {limits[name]:.1e}"
        for name in errors
        if errors[name] > limits[name]
    ]
    off, plain_off = float((ours - exact).abs().max()), float((plain - exact).abs().max())
    right = not bad and off <= MODEL_FACTOR * plain_off + 1e-3
    seen = f"logprobs off by up to {off:.1e} (reference table {plain_off:.1e}), gradients {max(errors.values()):.1e}"
    return right, "; ".join([seen, *bad[:3]])


def shared_prefix(shape: Geometry) -> Result:
    """Responses that share a prompt, and some of them more than that, against each by itself."""
    from example_trainer.models.ops import fast

    lengths, parents = [103, 40, 200, 9, 33, 1], [NO_PARENT, 0, 0, 2, 2, 0]
    spans = [torch.randint(0, shape.vocab_size, (length,), device=DEVICE) for length in lengths]
    shared = Packing(lengths, DEVICE, parents)
    begins = shared.begins
    leaves = [[0, 1], [0, 2, 3], [0, 2, 4], [0, 5]]
    whole = [torch.cat([spans[number] for number in chain]) for chain in leaves]
    rows = [
        torch.cat([torch.arange(begins[n], begins[n + 1], device=DEVICE) for n in chain])
        for chain in leaves
    ]
    apart = Packing([len(one) for one in whole], DEVICE)
    # Everything behind the prompt's last token is trained, in every response: rows of common spans
    # several times.
    sources = torch.cat([row[lengths[0] - 1 : -1] for row in rows])
    alone = torch.cat(
        [
            torch.arange(first + lengths[0] - 1, end - 1, device=DEVICE)
            for first, end in apart.spans()
        ]
    )
    targets = torch.cat([one[lengths[0] :] for one in whole])
    ours, gradients, weights = passed(
        shape, None, torch.bfloat16, fast, torch.cat(spans), shared, sources, targets
    )
    theirs, expected, _ = passed(
        shape, weights, torch.bfloat16, fast, torch.cat(whole), apart, alone, targets
    )
    off = float((ours - theirs).abs().max())
    errors = max(relative_error(gradients[name], expected[name]) for name in expected)
    saved = f"{shared.tokens} of {apart.tokens} tokens"
    return (
        off <= 0.1 and errors <= SHARED_LIMIT,
        f"{saved}: logprobs differ by up to {off:.1e}, gradients by {errors:.1e}",
    )


Checks = dict[str, Callable[[], Result]]


def kernel_checks(dtype: torch.dtype) -> Checks:
    """Norms, gated products and the output head."""
    found: Checks = {}
    on_gpu = DEVICE == "cuda"
    for rows, width in ((7, 48), (300, 2048), (65, 5120)) if on_gpu else ((7, 48),):
        found[f"norm {rows} x {width}"] = partial(norm, dtype, rows, width)
        found[f"gated product {rows} x {width}"] = partial(silu, dtype, rows, width)
    vocabularies = ((5000, 0.7), (5000, None), *([(151_936, 1.0)] if on_gpu else []))
    for vocab, temperature in vocabularies:
        for entropy in (False, True):
            name = (
                f"softmax over {vocab}, {temperature or 'own'} temperature{', entropy' * entropy}"
            )
            found[name] = partial(softmax, dtype, 6, vocab, temperature, entropy)
    for case in ("chosen_logprobs", "chosen_logprobs with entropy"):
        for totals in (False, True):
            name = f"{case}, {'summed' if totals else 'by autograd'}"
            found[name] = partial(head, case, dtype, totals)
    return found


def mixture_checks(dtype: torch.dtype) -> Checks:
    """Routers, experts and their sums."""
    checks: Checks = {"sum over slots": partial(added_slots, dtype)}
    for tokens, experts, count in ((1, 4, 2), (70, 6, 6), (33, 128, 8)):
        name = f"router, {count} of {experts}, {tokens} tokens"
        checks[name] = partial(routed, dtype, tokens, experts, count)
    # A GPU has the grouped product in 16 bits alone, and the interpreter has no such products.
    if (DEVICE == "cpu") == (dtype == torch.float32):
        checks["grouped product"] = partial(grouped, dtype, 50)
        for totals in (False, True):
            name = f"experts, {'summed' if totals else 'by autograd'}"
            checks[name] = partial(mixed, dtype, totals)
    return checks


def rotation_checks(dtype: torch.dtype) -> Checks:
    """Norms and rotations of heads, also of a part of each head and of neighbours."""
    found: Checks = {}
    for normed in (True, False):
        kind = "normed" if normed else "plain"
        for shape in ((4, 2, 16), (3, 1, 80), (16, 8, 128)):
            found[f"heads {shape}, {kind}"] = partial(heads, dtype, 70, shape, normed)
        for turned, apart in ((24, True), (80, True), (60, False)):
            name = f"heads, {turned} of 80 dimensions{', interleaved' * apart}, {kind}"
            found[name] = partial(heads, dtype, 70, (3, 1, 80), normed, turned, apart)
    return found


def model_checks() -> Checks:
    """Whole decoders; they need a GPU."""
    llama = {"qk_norm": False, "tie_word_embeddings": False, "qkv_bias": True}
    gemma = {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 256,
        "windows": (100, 100, None, 100),
        "local_rope_theta": 1e4,
        "query_scalar": 200.0,
    }
    phi = {"qk_norm": False, "head_dim": 96, "partial_rotary_factor": 0.667}
    experts = {
        "num_experts": 4,
        "experts_per_token": 4,
        "moe_intermediate_size": 256,
        "dense_layers": frozenset([1]),
    }
    shapes = {
        "Qwen3, tied": geometry(),
        "biases, untied, width 128": geometry(**llama, head_dim=128, num_kv_heads=1),
        "windows in two of four layers": geometry(windows=(100, None, 33, None)),
        "Phi 3, two thirds rotated": geometry(architecture="Phi3ForCausalLM", **phi),
        "OLMo 2": geometry(architecture="Olmo2ForCausalLM"),
        "Gemma 3": geometry(**gemma),
        # Each token has all experts: rounding cannot change their choice.
        "Qwen3-MoE": geometry(architecture="Qwen3MoeForCausalLM", **experts),
        "GLM 4": geometry(architecture="Glm4ForCausalLM", **llama, partial_rotary_factor=0.5),
    }
    found: Checks = {}
    for name, shape in shapes.items():
        for checkpointing, summed in ((False, True), (True, True), (False, False)):
            how = f"{'recomputed, ' * checkpointing}{'summed' if summed else 'by autograd'}"
            found[f"decoder: {name}, {how}"] = partial(decoder, shape, checkpointing, summed)
        found[f"shared prefixes: {name}"] = partial(shared_prefix, shape)
    return found


def checks() -> Checks:
    """Return the checks, by name."""
    found: Checks = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        every = kernel_checks(dtype) | rotation_checks(dtype) | mixture_checks(dtype)
        for name, check in every.items():
            found[f"{name}, {kind}"] = check
    if DEVICE == "cuda":
        found |= model_checks()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Make every check; 0 if all passed."""
    torch.manual_seed(0)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return run_checks(__doc__, checks(), arguments, needs_gpu=not interpreted)


if __name__ == "__main__":
    sys.exit(main())
