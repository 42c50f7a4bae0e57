"""The trainer's deterministic backward passes on a real GPU, at the sizes of Qwen3-0.6B, and a
mixture's router and experts at the sizes of Qwen3-30B-A3B. Needs no pytest:

    python tests/gpu/check_deterministic_trainer.py [--json FILE]

Every check is made even if others fail, and reports what it saw. Not proven here: that vLLM has the
same bits, for which there is tests/example_trainer/deterministic/test_exact_determinism.py
--vllm-url.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from bench.gpu.checks import run_checks
from example_trainer.models import Decoder
from example_trainer.models.packing import Packing
from example_trainer.models.shards import GradientSums
from tests.example_trainer.deterministic.cases import (
    CASES,
    LIMITS,
    Sizes,
    attention_formula,
    errors,
    relative_error,
)
from tests.example_trainer.deterministic.determinism_check import packed_bits, run_bits
from tests.example_trainer.deterministic.training import decoder_for, summed_gradients
from tests.gpu.attention_checks import attention_checks
from tests.gpu.mixture_checks import Layer, mixture_checks
from tests.gpu.prefix_checks import prefix_checks, prefix_times
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.settings import enable_settings

LENGTHS = (1, 127, 128, 129, 255, 256, 257, 777, 64)
QWEN3 = Sizes(LENGTHS, hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936)
RAGGED = Sizes(
    (1, 2, 63, 65, 300), hidden=192, inner=200, heads=6, kv_heads=2, head_dim=64, vocab=1000
)
Result = tuple[bool, str]
"""The verdict of a check, and its observation."""


def gradient_errors(name: str, sizes: Sizes, dtype: torch.dtype) -> Result:
    """One operation's gradients against float64."""
    found = errors(name, sizes, dtype, "cuda")
    return max(found.values()) <= LIMITS[dtype], "  ".join(
        f"{key} {error:.1e}" for key, error in found.items()
    )


def float32_attention() -> Result:
    """The attention kernel in float32, which vLLM's forward kernel does not take: from the
    formula's output.
    """
    from example_trainer.models.ops.triton_gradients import attention_backward

    generator, lengths = torch.Generator().manual_seed(0), (1, 65, 130, 300)
    draw = [
        torch.randn(sum(lengths), heads, 128, generator=generator).cuda() for heads in (4, 2, 2, 4)
    ]
    leaves = [part.double().requires_grad_() for part in draw[:3]]
    packing = Packing(lengths, "cuda")
    out, lse = attention_formula(leaves[0], leaves[1], leaves[2], packing, 128**-0.5)
    out.backward(draw[3].double())
    ours = attention_backward(
        draw[3],
        draw[0],
        draw[1],
        draw[2],
        out.detach().float(),
        lse.detach().float(),
        packing,
        128**-0.5,
    )
    found = [
        relative_error(mine, leaf.grad)
        for mine, leaf in zip(ours, leaves, strict=True)
        if leaf.grad is not None
    ]
    return max(found) <= LIMITS[torch.float32], " ".join(f"{error:.1e}" for error in found)


def same_bits_again(name: str) -> Result:
    """Outputs and gradients of one operation, three runs."""
    sizes = replace(QWEN3, vocab=32000)
    first, *others = (run_bits(name, sizes, torch.bfloat16, "cuda") for _ in range(3))
    return all(other == first for other in others), "3 runs"


def input_gradient_rows(inputs: int, outputs: int) -> Result:
    """dx = dy W, row by row in batches of every kind: the same bits?"""
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(4096, outputs, generator=generator).bfloat16().cuda()
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16().cuda()
    whole = ops.linear(dy, weight.t())
    wrong = []
    for rows in (
        1,
        2,
        7,
        8,
        16,
        17,
        64,
        100,
        128,
        129,
        255,
        256,
        257,
        512,
        777,
        1000,
        1024,
        2048,
        3000,
    ):
        for start in (0, 333):
            part = ops.linear(dy[start : start + rows].clone(), weight.t())
            if not torch.equal(part, whole[start : start + rows]):
                wrong.append(rows)
                break
    return not wrong, f"depends on the batch at {wrong} rows" if wrong else "19 batch sizes"


def sum_of_parts(inputs: int, outputs: int, parts: int) -> Result:
    """The kernel's sum is that of torch in the order of the parts. A trainer's row product is that
    of the ranks, alone and in batches. A rank's columns equal the whole product's.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, inputs, generator=generator).bfloat16().cuda()
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).bfloat16().cuda()
    products = ops.row_parts(x, weight, parts)
    total = ops.add_parts(products)
    expected = products[0].float()
    for product in products[1:]:
        expected = expected + product.float()
    wrong = []
    if not torch.equal(total, expected.bfloat16()):
        wrong.append("kernel")
    for rows in (1, 3, 64, 300, 2048):
        if not torch.equal(ops.row_linear(x[:rows], weight, parts), total[:rows]):
            wrong.append(f"{rows} rows")
    narrow = weight[: outputs // parts].contiguous()
    if not torch.equal(ops.linear(x, narrow), ops.linear(x, weight)[:, : len(narrow)]):
        wrong.append("columns")
    return not wrong, f"differing: {', '.join(wrong) or 'nothing'}"


def rows_beside_nan() -> Result:
    """Weight gradients of spans with NaN in the rows before and behind them, by each kernel."""
    from example_trainer.models.ops import triton_gradients as kernels

    generator, wrong, kinds = torch.Generator().manual_seed(0), [], [kernels.HALF_BLOCKS]
    if torch.cuda.get_device_capability()[0] == 9:
        kinds += [kernels.WIDE_BLOCKS, kernels.DESCRIPTOR_BLOCKS]
    for lengths in ((1,), (3, 64, 5), (1, 63, 64, 65, 130, 17), (300, 5, 1000)):
        tokens, layout = sum(lengths), Packing(lengths, "cuda")
        whole = torch.randn(2, tokens + 128, 1024, generator=generator).bfloat16().cuda()
        whole[:, :64], whole[:, 64 + tokens :] = torch.nan, torch.nan
        start = torch.randn(512, 512, generator=generator).cuda()
        bits = []
        for blocks in kinds:
            total = start.clone()
            dy, x = whole[:, 64 : 64 + tokens, :512]
            kernels.add_weight_gradient(dy, x, total, layout, blocks)
            bits.append(total)
        if not bits[0].isfinite().all() or not all(torch.equal(bits[0], one) for one in bits):
            wrong.append(lengths)
    return not wrong, f"differing or not finite: {wrong or 'nothing'}"


def packing(what: str) -> Result:
    """A model's hidden states and weight gradients, its sequences packed in different ways."""
    model = decoder_for("cuda")
    generator = torch.Generator().manual_seed(1)
    vocab = model.geometry.vocab_size
    sequences = [
        torch.randint(0, vocab, (length,), generator=generator).cuda()
        for length in (1, 300, 64, 65, 129, 256, 7)
    ]
    if what == "forward":
        together = packed_bits(model, sequences)[0]
        alone = [packed_bits(model, [sequence])[0][0] for sequence in sequences]
        wrong = [len(s) for s, a, b in zip(sequences, together, alone, strict=True) if a != b]
        return (
            not wrong,
            f"sequences of lengths {wrong} differ" if wrong else f"{len(sequences)} sequences",
        )
    reference, differing = summed_gradients(model, sequences, 1), {}
    if missing := [name for name, _ in model.named_parameters() if name not in reference]:
        return False, f"no gradient for {missing[:3]}"
    for size in (2, 3, 7):
        other = summed_gradients(model, sequences, size)
        names = [name for name in reference if not torch.equal(reference[name], other[name])]
        if names:
            differing[size] = f"{len(names)} parameters, last layer's first: {names[-1]}"
    return not differing, str(
        differing
    ) if differing else f"{len(reference)} parameters, 1, 2, 3 and 7 sequences in a pass"


def against_the_plain_decoder() -> Result:
    """Every parameter's gradient beside the ordinary decoder's in float64."""
    model = decoder_for("cuda")
    plain = Decoder(model.geometry, torch.float64, "cuda")
    plain.load_state_dict(
        {name: parameter.double() for name, parameter in model.state_dict().items()}
    )
    plain.rotary = model.rotary.double()
    vocab = model.geometry.vocab_size
    sequences = [
        torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(length))
        for length in (100, 257)
    ]
    summed = summed_gradients(model, [sequence.cuda() for sequence in sequences], 2)
    for sequence in sequences:
        ids = sequence.cuda()
        plain.logits(ids[None])[0].log_softmax(-1).gather(1, ids.roll(-1)[:, None]).sum().backward()
    exact = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: relative_error(summed[name], g) for name, g in exact.items() if g is not None}
    worst = max(found, key=lambda name: found[name])
    return len(found) == len(exact) and found[
        worst
    ] < 0.1, f"worst {found[worst]:.1e} at {worst} (limit 1e-1: a whole model)"


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Return milliseconds of one call, after two to warm up."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def pass_time(model: Decoder, tokens: Tensor) -> float:
    """Forward and backward over [sequences, length] ids, next-token logprobs of every second half."""
    count, length = tokens.shape
    rows = torch.arange(count, device="cuda")[:, None] * length + torch.arange(
        length // 2, length, device="cuda"
    )
    sources, targets = rows.flatten(), tokens.roll(-1, 1)[:, length // 2 :].flatten()
    packing, trained = (
        Packing([length] * count, "cuda"),
        Packing([length - length // 2] * count, "cuda"),
    )

    def work() -> None:
        model.arithmetic.sums = GradientSums(model)
        hidden = model.arithmetic.ops.rows(model(tokens.flatten(), packing), sources)
        logprobs, _ = model.chosen_logprobs(hidden, targets, trained)
        logprobs.sum().backward()

    return milliseconds(work, 5)


def times() -> dict[str, float]:
    """Milliseconds: a pass with the mode on and off, and what the slowest kernels take beside
    torch's.
    """
    from example_trainer.models.ops.triton_gradients import add_weight_gradient, attention_backward

    model = decoder_for("cuda")
    plain = Decoder(model.geometry, torch.bfloat16, "cuda")
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 32000, (64, 256), generator=torch.Generator().manual_seed(0)).cuda()
    found = {
        "pass on (4 layers, 64 x 256 tokens)": pass_time(model, tokens),
        "pass off": pass_time(plain, tokens),
    }
    count = tokens.numel()
    layout = Packing([256] * 64, "cuda")
    dy, x = (
        torch.randn(count, 6144, device="cuda").bfloat16(),
        torch.randn(count, 1024, device="cuda").bfloat16(),
    )
    total = torch.zeros(6144, 1024, device="cuda")
    found["weight gradient 6144 x 1024, ours"] = milliseconds(
        lambda: add_weight_gradient(dy, x, total, layout)
    )
    found["weight gradient 6144 x 1024, torch.mm"] = milliseconds(lambda: dy.t() @ x)
    q, k, v, do = (
        torch.randn(count, heads, 128, device="cuda").bfloat16() for heads in (16, 8, 8, 16)
    )
    out, lse = ops.attention_varlen(q, k, v, layout.cu_seqlens, 256, 128**-0.5)
    found["attention backward, ours"] = milliseconds(
        lambda: attention_backward(do, q, k, v, out, lse, layout, 128**-0.5)
    )
    found["attention forward"] = milliseconds(
        lambda: ops.attention_varlen(q, k, v, layout.cu_seqlens, 256, 128**-0.5)
    )
    shaped = [
        part.view(64, 256, -1, 128).transpose(1, 2).detach().requires_grad_() for part in (q, k, v)
    ]

    def reference() -> None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            *shaped, is_causal=True, enable_gqa=True
        )
        attended.backward(do.view(64, 256, 16, 128).transpose(1, 2))

    found["attention forward + backward, torch"] = milliseconds(reference)
    return found


def checks() -> dict[str, Callable[[], Result]]:
    """All of them, by name."""
    found: dict[str, Callable[[], Result]] = {}
    for name in CASES:
        found[f"float64: {name}, bf16, Qwen3"] = lambda name=name: gradient_errors(
            name, QWEN3, torch.bfloat16
        )  # type: ignore[misc]
        found[f"float64: {name}, bf16, ragged"] = lambda name=name: gradient_errors(
            name, RAGGED, torch.bfloat16
        )  # type: ignore[misc]
        if not name.startswith("attention"):  # vLLM's kernel takes 16 bits alone
            found[f"float64: {name}, float32"] = lambda name=name: gradient_errors(
                name, RAGGED, torch.float32
            )  # type: ignore[misc]
        found[f"same bits again: {name}"] = lambda name=name: same_bits_again(name)  # type: ignore[misc]
    found["float64: attention backward, float32"] = float32_attention
    for inputs, outputs in ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)):
        found[f"input gradient {outputs} -> {inputs}, rows alone as in batches"] = (
            lambda inputs=inputs, outputs=outputs: input_gradient_rows(inputs, outputs)  # type: ignore[misc]
        )
    for inputs, outputs in ((2048, 1024), (3072, 1024), (4096, 4096), (12288, 4096)):
        for parts in (2, 4, 8):
            found[f"sum of {parts} parts, {inputs} -> {outputs}"] = (
                lambda inputs=inputs, outputs=outputs, parts=parts: sum_of_parts(  # type: ignore[misc]
                    inputs, outputs, parts
                )
            )
    found["weight gradients beside rows of NaN"] = rows_beside_nan
    found["packing: hidden states"] = lambda: packing("forward")
    found["packing: weight gradients"] = lambda: packing("gradients")
    found["float64: whole model"] = against_the_plain_decoder
    return found | mixture_checks(Layer()) | attention_checks() | prefix_checks()


def settings_and_times() -> dict[str, Any]:
    """Return the settings of the run, and the times of the operations."""
    measured = times() | prefix_times(milliseconds)
    shown = {name: round(value, 3) for name, value in measured.items()}
    for name, value in shown.items():
        print(f"  {name}: {value} ms", flush=True)
    return {"settings": enable_settings(), "milliseconds": shown}


def main() -> int:
    """Return the process's status."""
    enable_settings()
    return run_checks(__doc__, checks(), more=settings_and_times)


if __name__ == "__main__":
    sys.exit(main())
