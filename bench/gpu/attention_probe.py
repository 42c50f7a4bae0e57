"""Attention of the probe: prefill of packed sequences against every other way in which vLLM
computes the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.gpu.probe_tools import differing_rows, microseconds
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.pages import PAGE, make_page_plan

LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    1023,
    1025,
    2047,
    2049,
    3000,
    4096,
)
CHUNKS = (16, 100, 512, 2048)
BATCHES = (1, 3, 8, 64, 256, 512)


class PagedBatch:
    """Random packed sequences, their pages, and the prefill that everything else is compared with."""

    def __init__(self, heads: int, kv_heads: int, dim: int, lengths: Sequence[int]) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        tokens = sum(lengths)
        self.q, self.k, self.v = (
            torch.randn(tokens, h, dim, generator=generator, device="cuda").bfloat16()
            for h in (heads, kv_heads, kv_heads)
        )
        self.lengths, self.scale = list(lengths), ops.attention_scale(dim)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.starts: list[int] = ends.tolist()
        self.cu = ends.to("cuda", torch.int32)
        plan = make_page_plan(self.cu, tokens, max(lengths))
        # As in a server that has run for a while: pages in any order, what is stale in them far
        # from zero.
        order = torch.randperm(plan.pages, generator=generator, device="cuda")
        cache = torch.full(
            (plan.pages, kv_heads, PAGE, 2 * dim), 3.0, device="cuda", dtype=torch.bfloat16
        )
        cache.transpose(1, 2)[order[plan.page], plan.offset] = torch.cat((self.k, self.v), -1)
        self.keys, self.values = cache.transpose(1, 2).split(dim, dim=-1)
        self.table = order[plan.block_table.long()].to(torch.int32)
        self.whole, self.lse = ops.attention_varlen(
            self.q, self.k, self.v, self.cu, max(lengths), self.scale
        )

    def call(
        self,
        q: torch.Tensor,
        lens: Sequence[int],
        seen: Sequence[int],
        which: Sequence[int],
        splits: int = 1,
        most: int = 0,
    ) -> torch.Tensor:
        """vLLM's call: for each request of the batch, `lens` new queries of sequence `which`, which
        then has `seen` tokens.
        """
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        cu = torch.tensor([0, *lens]).cumsum(0).to("cuda", torch.int32)
        out: torch.Tensor = flash_attn_varlen_func(
            q=q, k=self.keys, v=self.values, cu_seqlens_q=cu, max_seqlen_q=max(lens),
            seqused_k=torch.tensor(list(seen), device="cuda", dtype=torch.int32), max_seqlen_k=most or max(seen),
            softmax_scale=self.scale, causal=True, window_size=[-1, -1], softcap=0,
            block_table=self.table[torch.tensor(list(which), device="cuda")].contiguous(), num_splits=splits, fa_version=3,
        )  # fmt: skip
        return out

    def compare(self, requests: Sequence[tuple[int, int, int]], **options: Any) -> torch.Tensor:
        """Rows that differ when one batch holds requests (sequence, first new token, past the last
        one).
        """
        rows = torch.cat(
            [torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in requests]
        ).cuda()
        out = self.call(
            self.q[rows],
            [b - a for _, a, b in requests],
            [b for *_, b in requests],
            [s for s, *_ in requests],
            **options,
        )
        return differing_rows(out, self.whole[rows])


def _verdict(counts: list[torch.Tensor], rows: int, batches: int) -> dict[str, Any]:
    return {"batches": batches, "rows": rows, "differ": int(torch.stack(counts).sum())}


def attention(heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Verdict -> rows compared with the packed, paged prefill and rows that differ."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch = PagedBatch(heads, kv_heads, dim, LENGTHS)
    sequences = range(len(LENGTHS))
    rows: dict[str, Any] = {}

    def run(name: str, batches: Sequence[Sequence[tuple[int, int, int]]], **options: Any) -> None:
        counts = [batch.compare(requests, **options) for requests in batches]
        rows[name] = _verdict(
            counts, sum(b - a for requests in batches for _, a, b in requests), len(batches)
        )

    everything = [(s, 0, LENGTHS[s]) for s in sequences]
    run("prefill, stale and shuffled pages", [everything])
    run("prefill, alone", [[request] for request in everything])
    contiguous = {"causal": True, "softmax_scale": batch.scale, "num_splits": 1, "fa_version": 3}
    one = flash_attn_varlen_func(
        q=batch.q, k=batch.k, v=batch.v, max_seqlen_q=4096, cu_seqlens_q=batch.cu, max_seqlen_k=4096, cu_seqlens_k=batch.cu,
        **contiguous,
    )  # fmt: skip
    rows["prefill, without pages"] = _verdict([differing_rows(one, batch.whole)], len(one), 1)
    alone = []
    for s in sequences:
        part = slice(batch.starts[s], batch.starts[s + 1])
        cu = torch.tensor([0, LENGTHS[s]], device="cuda", dtype=torch.int32)
        out = flash_attn_varlen_func(
            q=batch.q[part], k=batch.k[part], v=batch.v[part], max_seqlen_q=LENGTHS[s], cu_seqlens_q=cu,
            max_seqlen_k=LENGTHS[s], cu_seqlens_k=cu, **contiguous,
        )  # fmt: skip
        alone.append(differing_rows(out, batch.whole[part]))
    rows["prefill, without pages, alone"] = _verdict(alone, len(one), len(alone))
    for size in BATCHES:
        tokens = [
            (s, p, p + 1)
            for s in sequences
            for p in range(LENGTHS[s])
            if size >= 64 or p % 97 == 0 or p + 2 > LENGTHS[s]
        ]
        tokens = sorted(tokens, key=lambda t: (t[1] * 7919) % 4099)[
            : size * (200 if size < 64 else 20)
        ]  # mixed lengths
        run(
            f"decode, {size} at a time", [tokens[i : i + size] for i in range(0, len(tokens), size)]
        )
    run(
        "decode, told of longer ones",
        [[(s, LENGTHS[s] - 1, LENGTHS[s]) for s in sequences]],
        most=8192,
    )
    longest = len(LENGTHS) - 1
    run(
        "decode, each alone, splits free",
        [[(longest, p, p + 1)] for p in range(1000, 4096, 97)],
        splits=0,
    )
    for chunk in CHUNKS:
        run(
            f"chunks of {chunk}",
            [
                [(s, a, min(a + chunk, LENGTHS[s]))]
                for s in sequences
                for a in range(0, LENGTHS[s], chunk)
            ],
        )
    mixed = [
        [(longest, a, a + 512), (9, 0, 128), *((s, LENGTHS[s] - 1, LENGTHS[s]) for s in sequences)]
        for a in range(0, 4096, 512)
    ]
    run("decodes among prefills", mixed)
    run(
        "one prefill among 255 decodes",
        [[(20, 0, 2049), *((longest, p, p + 1) for p in range(17, 4096, 16))]],
    )
    rows["decode in a CUDA graph, 64"] = _graph(batch, longest)
    return rows


def _graph(batch: PagedBatch, sequence: int) -> dict[str, Any]:
    """Decode of 64 tokens, captured while all were at the start of the sequence, replayed further
    on.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    cu = torch.arange(65, device="cuda", dtype=torch.int32)
    seen = torch.ones(64, device="cuda", dtype=torch.int32)
    start = batch.starts[sequence]
    q, out = batch.q[start : start + 64].clone(), torch.empty_like(batch.q[:64])
    table = batch.table[sequence].repeat(64, 1)

    def decode() -> None:
        flash_attn_varlen_func(
            q=q, k=batch.keys, v=batch.values, out=out, cu_seqlens_q=cu, max_seqlen_q=1, seqused_k=seen, max_seqlen_k=4096,
            softmax_scale=batch.scale, causal=True, window_size=[-1, -1], softcap=0, block_table=table,
            num_splits=1, fa_version=3,
        )  # fmt: skip

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    counts = []
    for first in range(0, 4096, 64):
        positions = torch.arange(first, first + 64, device="cuda")
        q.copy_(batch.q[start + positions])
        seen.copy_(positions + 1)
        graph.replay()
        counts.append(differing_rows(out, batch.whole[start + positions]))
    return _verdict(counts, 4096, 64)


def attention_speed(heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Microseconds: training batch with and without pages; decode with one split and with as many
    as the library likes.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows: dict[str, Any] = {}
    for lengths in ([1024] * 8, [4096] * 2, [200] * 40):
        batch = PagedBatch(heads, kv_heads, dim, lengths)
        most = max(lengths)
        options = {"softmax_scale": batch.scale, "causal": True, "num_splits": 1, "fa_version": 3}
        paged = lambda b=batch, m=most: ops.attention_varlen(b.q, b.k, b.v, b.cu, m, b.scale)  # noqa: E731
        packed = lambda b=batch, m=most, o=options: flash_attn_varlen_func(  # noqa: E731
            q=b.q,
            k=b.k,
            v=b.v,
            cu_seqlens_q=b.cu,
            max_seqlen_q=m,
            cu_seqlens_k=b.cu,
            max_seqlen_k=m,
            **o,
        )
        rows[f"prefill {len(lengths)} x {most}"] = {
            "pages": microseconds([paged] * 4),
            "no pages": microseconds([packed] * 4),
        }
    for size, context in ((1, 300), (1, 1000), (1, 4000), (64, 1000), (256, 300), (256, 1000)):
        batch = PagedBatch(heads, kv_heads, dim, [context] * size)
        cu, seen = (
            torch.arange(size + 1, device="cuda", dtype=torch.int32),
            torch.full((size,), context, device="cuda", dtype=torch.int32),
        )
        q = batch.q[:size].contiguous()

        def decode(
            splits: int,
            b: PagedBatch = batch,
            q: torch.Tensor = q,
            cu: torch.Tensor = cu,
            seen: torch.Tensor = seen,
        ) -> Any:
            return flash_attn_varlen_func(
                q=q, k=b.keys, v=b.values, cu_seqlens_q=cu, max_seqlen_q=1, seqused_k=seen, max_seqlen_k=4096,
                softmax_scale=b.scale, causal=True, block_table=b.table, num_splits=splits, fa_version=3,
            )  # fmt: skip

        rows[f"decode {size} x {context}"] = {
            "one split": microseconds([lambda d=decode: d(1)] * 8), "up to 32": microseconds([lambda d=decode: d(32)] * 8)
        }  # fmt: skip
    return rows
