"""The computation of one tensor-parallel rank of vLLM in deterministic mode, step by step, with the
shared operations and nothing of the trainer's decoder.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_patching.batch_invariant import ops
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import vocabulary_range

Weights = dict[str, Tensor]


class VllmRank:
    """One rank's layers, as vLLM computes the layers of Qwen3 and Llama.

    Args:
        weights: of this rank, by vLLM's names.
        rank, ranks, group: of the server.
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: Weights,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.geometry, self.weights = geometry, weights
        self.rank, self.ranks, self.group = rank, ranks, group
        g, weight = geometry, next(iter(weights.values()))
        self.rotary = ops.rotary_table(
            g.head_dim, g.max_positions, g.rope_theta, weight.dtype, weight.device
        )

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x, by rank: [ranks, ...]."""
        gathered = x.new_empty(self.ranks, *x.shape)
        rows = list(gathered.unbind(0))
        if self.ranks == 1:
            return x.unsqueeze(0)
        dist.all_gather(rows, x.contiguous(), group=self.group)
        return torch.stack(rows)

    def row_parallel(self, x: Tensor, path: str) -> Tensor:
        """RowParallelLinear: the first rank has the bias."""
        bias = None
        if self.rank == 0:
            bias = self.weights.get(f"{path}.bias")
        return ops.add_parts(self.gather(ops.linear(x, self.weights[f"{path}.weight"], bias)))

    def column_parallel(self, x: Tensor, path: str) -> Tensor:
        """QKVParallelLinear and MergedColumnParallelLinear."""
        return ops.linear(x, self.weights[f"{path}.weight"], self.weights.get(f"{path}.bias"))

    def embedding(self, ids: Tensor) -> Tensor:
        """VocabParallelEmbedding: zeros for the tokens of other ranks."""
        first, end, _ = vocabulary_range(self.geometry.vocab_size, self.rank, self.ranks)
        absent = (ids < first) | (ids >= end)
        table = self.weights["model.embed_tokens.weight"]
        rows = table[(ids - first).masked_fill(absent, 0)].masked_fill(absent[:, None], 0)
        return ops.add_parts(self.gather(rows))

    def attention(self, x: Tensor, path: str, lengths: list[int]) -> Tensor:
        """The rank's heads."""
        g = self.geometry
        heads, kv_heads = g.num_heads // self.ranks, max(1, g.num_kv_heads // self.ranks)
        qkv = self.column_parallel(x, f"{path}.qkv_proj")
        q, k, v = (
            part.unflatten(-1, (-1, g.head_dim))
            for part in qkv.split([n * g.head_dim for n in (heads, kv_heads, kv_heads)], dim=-1)
        )
        if g.qk_norm:
            q, k = (
                ops.rms_norm(one, self.weights[f"{path}.{name}.weight"], g.rms_norm_eps)
                for one, name in ((q, "q_norm"), (k, "k_norm"))
            )
        positions = torch.cat([torch.arange(length) for length in lengths])
        q, k = ops.rotary_embedding(positions, q, k, g.head_dim, self.rotary)
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        scale = ops.attention_scale(g.head_dim)
        out, _ = ops.attention_varlen(q, k, v, ends, max(lengths), scale)
        return self.row_parallel(out.flatten(1), f"{path}.o_proj")

    def mlp(self, x: Tensor, path: str) -> Tensor:
        """The rank's part of the inner width."""
        gated = ops.silu_and_mul(self.column_parallel(x, f"{path}.gate_up_proj"))
        return self.row_parallel(gated, f"{path}.down_proj")

    def logprobs(self, tokens: Tensor, targets: Tensor, lengths: list[int]) -> Tensor:
        """Log-probability of each target, as the sampler returns it."""
        g = self.geometry
        x, residual = self.embedding(tokens), None
        for number in range(g.num_layers):
            path = f"model.layers.{number}"
            for norm, block in (
                ("input_layernorm", "self_attn"),
                ("post_attention_layernorm", "mlp"),
            ):
                weight = self.weights[f"{path}.{norm}.weight"]
                if residual is None:
                    x, residual = ops.rms_norm(x, weight, g.rms_norm_eps), x
                else:
                    x, residual = ops.fused_add_rms_norm(x, residual, weight, g.rms_norm_eps)
                if block == "mlp":
                    x = self.mlp(x, f"{path}.mlp")
                else:
                    x = self.attention(x, f"{path}.self_attn", lengths)
        assert residual is not None
        last = self.weights["model.norm.weight"]
        x, _ = ops.fused_add_rms_norm(x, residual, last, g.rms_norm_eps)
        name = "model.embed_tokens" if g.tie_word_embeddings else "lm_head"
        shards = self.gather(ops.linear(x, self.weights[f"{name}.weight"]))
        logits = shards.movedim(0, -2).flatten(-2)[:, : g.vocab_size]
        return ops.token_logprobs(logits, targets[:, None]).squeeze(1)
