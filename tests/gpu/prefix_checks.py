"""Checks of shared prefixes in deterministic mode, for check_deterministic_trainer.py.

A prompt that is forwarded once for its answers must give them the bits of whole sequences. Checked
are attention alone, whose queries are then fewer than its keys, and a whole model. The gradients of
a prompt must repeat to the bit. On a CPU, where the tests try the checks, the reference runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from example_trainer.models import Decoder, Geometry
from example_trainer.models.ops.invariant import gradients_for
from example_trainer.models.packing import NO_PARENT, Packing
from tests.example_trainer.deterministic.cases import relative_error
from tests.example_trainer.deterministic.layouts import MODELS
from tests.example_trainer.deterministic.training import (
    QWEN3_LAYERS,
    decoder_for,
    tree_gradients,
    tree_logprobs,
)
from tests.gpu.attention_checks import Heads
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.bits import describe_difference, same_bits

Result = tuple[bool, Any]
"""The verdict of a check, and its observation."""
PROMPTS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 175, 176, 177, 256, 257, 513, 1000, 2049)
ANSWERS = (1, 16, 17, 64, 130, 300, 1025)
LIMIT = 0.1
"""Largest relative error of a parameter's gradient, through a whole model in bfloat16."""
TIMED = (64, 512, 2048)
"""Tokens of the prompt of 8 answers of 256 tokens."""
MIXTURE = Geometry.from_config(
    MODELS["two layers of a mixture"] | {"max_position_embeddings": 4096}
)


@dataclass(frozen=True)
class Group:
    """A prompt, its answers, and a further turn behind the first answer, as spans of one bin."""

    prompt: int
    answers: tuple[int, ...]
    device: str = "cuda"

    @property
    def packing(self) -> Packing:
        """The turn has as many tokens as the first answer."""
        first, *others = self.answers
        return Packing(
            (self.prompt, first, first, *others), self.device, (NO_PARENT, 0, 1, *[0] * len(others))
        )

    def __str__(self) -> str:
        return f"a prompt of {self.prompt}"


def seen_keys(packing: Packing) -> ops.SeenKeys:
    """Return the keys of a packing whose spans continue others."""
    rows = packing.key_rows
    assert rows is not None
    return ops.SeenKeys(rows, packing.cu_keys, packing.longest)


def drawn(heads: Heads, tokens: int, seed: int) -> tuple[Tensor, ...]:
    """Return random queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads.heads, heads.kv_heads, heads.kv_heads, heads.heads)
    return tuple(
        torch.randn(tokens, size, heads.width, generator=generator).to(heads.dtype).to(heads.device)
        for size in sizes
    )


def attention_bits(heads: Heads, prompts: Sequence[int], answers: tuple[int, ...]) -> Result:
    """Outputs and denominators of answers that share a prompt, against whole sequences, each
    alone.
    """
    compared = 0
    for prompt in prompts:
        packing = Group(prompt, answers, heads.device).packing
        q, k, v, _ = drawn(heads, packing.tokens, prompt)
        out, lse = ops.attention_varlen(
            q, k, v, packing.cu_seqlens, packing.max_length, heads.scale, seen_keys(packing)
        )
        for (start, end), path in zip(packing.spans(), packing.rows_seen, strict=True):
            rows, own = path.to(q.device), slice(-(end - start), None)
            bounds = torch.tensor([0, len(rows)], dtype=torch.int32, device=q.device)
            alone, denominators = ops.attention_varlen(
                q[rows], k[rows], v[rows], bounds, len(rows), heads.scale
            )
            for mine, theirs in (
                (out[start:end], alone[own]),
                (lse[:, start:end], denominators[:, own]),
            ):
                if not same_bits(mine.contiguous(), theirs.contiguous()):
                    difference = describe_difference(mine.contiguous(), theirs.contiguous())
                    return False, f"a prompt of {prompt}, {end - start} queries: {difference}"
            compared += end - start
    return True, f"{compared} queries behind {len(prompts)} prompts"


def query_gradients(heads: Heads, prompt: int, answers: tuple[int, ...]) -> Result:
    """The gradients of queries, which nothing is shared of, against whole sequences. Their bits
    need not be equal; the observation counts the rows whose bits are.
    """
    packing = Group(prompt, answers, heads.device).packing
    q, k, v, upstream = drawn(heads, packing.tokens, 1)
    given = packing.cu_seqlens, packing.max_length, heads.scale, seen_keys(packing)
    out, lse = ops.attention_varlen(q, k, v, *given)
    backward = gradients_for(q).attention_backward
    dq = backward(upstream, q, k, v, out, lse, packing, heads.scale)[0]
    equal, worst = 0, 0.0
    for (start, end), path in zip(packing.spans(), packing.rows_seen, strict=True):
        rows = path.to(q.device)
        parts = (part[rows] for part in (upstream, q, k, v, out))
        whole = Packing([len(rows)], heads.device)
        alone = backward(*parts, lse[:, rows], whole, heads.scale)[0][start - end :]
        equal += int((dq[start:end] == alone).flatten(1).all(1).sum())
        worst = max(worst, relative_error(dq[start:end], alone.double()))
    return worst < LIMIT, f"worst {worst:.1e}; {equal} of {packing.tokens} rows have equal bits"


def random_tokens(model: Decoder, packing: Packing) -> Tensor:
    """Return token ids for a packing."""
    generator = torch.Generator().manual_seed(packing.tokens)
    ids = torch.randint(0, model.geometry.vocab_size, (packing.tokens,), generator=generator)
    return ids.to(packing.device)


def model_bits(geometry: Geometry, groups: Sequence[Group]) -> Result:
    """Logprobs and entropies of a model for answers that share a prompt, against whole sequences."""
    compared, model = 0, decoder_for(groups[0].device, geometry=geometry)
    for group in groups:
        packing = group.packing
        tokens = random_tokens(model, packing)
        with torch.no_grad():
            shared, whole = (
                tree_logprobs(model, tokens, packing, together) for together in (True, False)
            )
        for name, mine, theirs in zip(("logprob", "entropy"), shared, whole, strict=True):
            if not same_bits(mine, theirs):
                difference = describe_difference(mine[:, None], theirs[:, None])
                return False, f"{name} behind {group}: {difference}"
        compared += len(shared[0])
    return True, f"{compared} tokens behind {len(groups)} prompts"


def model_gradients(geometry: Geometry, group: Group) -> Result:
    """The gradients of a model repeat to the bit, with layers kept and recomputed, and are near
    those in float64.
    """
    model, packing = decoder_for(group.device, geometry=geometry), group.packing
    tokens = random_tokens(model, packing)
    found = tree_gradients(model, tokens, packing, together=True)
    for recomputed in (False, True):
        model.gradient_checkpointing = recomputed
        again = tree_gradients(model, tokens, packing, together=True)
        if wrong := [name for name in found if not torch.equal(again[name], found[name])]:
            how = "recomputed" if recomputed else "kept"
            return False, f"layers {how}: {len(wrong)} parameters differ, first {wrong[0]}"
    errors = {
        name: relative_error(found[name], g) for name, g in exact_gradients(model, tokens, packing)
    }
    worst = max(errors, key=lambda name: errors[name])
    complete = len(errors) == len(list(model.parameters()))
    return complete and errors[worst] < LIMIT, f"worst {errors[worst]:.1e} at {worst}"


def exact_gradients(
    model: Decoder, tokens: Tensor, packing: Packing
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of the ordinary decoder in float64, of whole sequences."""
    plain = Decoder(model.geometry, torch.float64, packing.device)
    plain.load_state_dict({name: one.double() for name, one in model.state_dict().items()})
    plain.rotary = model.rotary.double()
    yield from tree_gradients(plain, tokens, packing, together=False).items()


def prefix_checks() -> dict[str, Callable[[], Result]]:
    """Return the checks on this GPU, by name."""
    found: dict[str, Callable[[], Result]] = {}
    for heads, kv_heads in ((16, 8), (32, 4), (8, 8)):
        layer = Heads(128, heads, kv_heads)
        found[f"shared prompts: attention's bits, {heads} heads of {kv_heads}"] = partial(
            attention_bits, layer, PROMPTS, ANSWERS
        )
    layer = Heads(128, 16, 8)
    found["shared prompts: gradients of queries"] = partial(query_gradients, layer, 300, ANSWERS)
    for name, geometry in {"dense": QWEN3_LAYERS, "mixture": MIXTURE}.items():
        groups = [Group(prompt, ANSWERS) for prompt in (1, 17, 64, 129, 300, 1000)]
        found[f"shared prompts: a model's bits, {name}"] = partial(model_bits, geometry, groups)
    found["shared prompts: a model's gradients, dense"] = partial(
        model_gradients, QWEN3_LAYERS, Group(129, (64, 130, 17, 300))
    )
    return found


def prefix_times(milliseconds: Callable[..., float]) -> dict[str, float]:
    """Return milliseconds of a forward and a backward pass over 8 answers of 256 tokens, with their
    prompt forwarded once and with whole sequences.
    """
    model, found = decoder_for("cuda"), dict[str, float]()
    for prompt in TIMED:
        packing = Packing([prompt, *[256] * 8], "cuda", [NO_PARENT, *[0] * 8])
        tokens = random_tokens(model, packing)
        for together, how in ((True, "forwarded once"), (False, "in each sequence")):
            work = partial(tree_gradients, model, tokens, packing, together)
            found[f"pass over 8 answers, a prompt of {prompt} {how}"] = milliseconds(work, 5)
    return found
