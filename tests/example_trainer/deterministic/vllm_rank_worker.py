"""A rank of test_vllm_ranks.py: the sampler's ranks and the trainer's, of every pair of layouts.

FORKED_RANKS=4 python -m tests.forked_ranks vllm_rank_worker.py DTYPE FILE

The ranks below n are a server with n tensor-parallel ranks, and those below m a trainer with m.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.models import Decoder
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split
from example_trainer.parallel.ranks import join_ranks
from example_trainer.parallel.tensor import TensorParallelShards, split_decoder
from tests.example_trainer.deterministic.training import SMALL, decoder_for
from tests.example_trainer.deterministic.vllm_rank import VllmRank, Weights
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.weights.families import Geometry

LENGTHS = [1, 9, 23]
MODELS = {
    "Qwen3, tied, two key-value heads": SMALL,
    "Llama, biases everywhere": replace(
        SMALL, architecture="LlamaForCausalLM", qk_norm=False, qkv_bias=True, o_bias=True,
        mlp_bias=True, tie_word_embeddings=False, num_kv_heads=4,
    ),
}  # fmt: skip
Groups = dict[int, dist.ProcessGroup]


def inputs(geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Tokens of all sequences, and the token after each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, geometry.vocab_size, (sum(LENGTHS),), generator=generator)
    return tokens, tokens.roll(-1)


def logprobs_of(model: Decoder) -> Tensor:
    """Logprobs of the targets. Collective if the model is split."""
    tokens, targets = inputs(model.geometry)
    packing = Packing(LENGTHS)
    return model.chosen_logprobs(model(tokens, packing), targets, packing)[0]


def whole_model(geometry: Geometry, dtype: torch.dtype) -> Decoder:
    """The model of one rank."""
    return decoder_for("cpu", 0, geometry).to(dtype)


class Comparison:
    """All layouts of one model in one dtype.

    Attributes:
        differing: layout -> logprobs that differ from the sampler's in a bit.
        errors: layout -> the largest relative error of a parameter's gradient.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype, rank: int, groups: Groups) -> None:
        self.geometry, self.dtype, self.rank, self.groups = geometry, dtype, rank, groups
        self.weights = dict(whole_model(geometry, dtype).named_parameters())
        self.differing: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.exact = self.exact_gradients()

    def exact_gradients(self) -> Weights:
        """The gradients in float64, of the plain operations."""
        plain = Decoder(self.geometry, torch.float64)
        plain.load_state_dict({name: one.double() for name, one in self.weights.items()})
        logprobs_of(plain).sum().backward()
        return {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}

    def local(self, ranks: int) -> tuple[TensorParallelShards | None, Weights]:
        """This rank's shards of the weights."""
        if ranks == 1:
            return None, {name: one.detach() for name, one in self.weights.items()}
        shards = TensorParallelShards(self.geometry, Split(self.rank, ranks, self.groups[ranks]))
        return shards, {name: shards.take(name, one.detach()) for name, one in self.weights.items()}

    def sampled(self, ranks: int) -> Tensor:
        """The logprobs of a server. Collective over its ranks."""
        _, weights = self.local(ranks)
        server = VllmRank(self.geometry, weights, self.rank, ranks, self.groups[ranks])
        with torch.no_grad():
            return server.logprobs(*inputs(self.geometry), LENGTHS)

    def compare(self, sampled: Tensor, parts: int, ranks: int) -> None:
        """Compare a trainer of `ranks` ranks with a server of `parts`. Collective over its ranks."""
        cpu = torch.device("cpu")
        shards, weights = self.local(ranks)
        if shards is None:
            model = deterministic_decoder(self.geometry, self.dtype)
        else:
            group = self.groups[ranks]
            model = split_decoder(
                self.geometry, self.dtype, cpu, self.rank, ranks, group, deterministic=True
            )
        model.load_state_dict(weights)
        model.arithmetic.plan = SumPlan(parts)
        logprobs = logprobs_of(model)
        layout = f"server {parts}, trainer {ranks}"
        self.differing[layout] = int(
            (logprobs.view(torch.int32) != sampled.view(torch.int32)).sum()
        )
        logprobs.sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        assert all(one is not None for one in gradients.values())
        wide = {name: one.double() for name, one in gradients.items() if one is not None}
        if shards is not None:
            shards.complete(wide)
            wide = {name: shards.whole(name, one) for name, one in wide.items()}
        self.errors[layout] = max(
            float((wide[name] - exact).norm() / exact.norm()) for name, exact in self.exact.items()
        )


def main(dtype: torch.dtype, path: Path) -> None:
    torch.set_num_threads(1)
    with join_ranks(60, torch.device("cpu")) as joined:
        rank = joined.rank
        groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
        results: dict[str, Any] = {}
        for name, geometry in MODELS.items():
            comparison = Comparison(geometry, dtype, rank, groups)
            for parts in groups:
                # Every rank needs the server's logprobs, also one that is not of the server.
                sampled = torch.empty(sum(LENGTHS))
                if rank < parts:
                    sampled = comparison.sampled(parts)
                for ranks in SumPlan(parts).trainer_ranks():
                    if rank < ranks:
                        comparison.compare(sampled, parts, ranks)
            results[name] = {
                "differing": comparison.differing,
                "errors": comparison.errors,
                "changed by the plan": plans_differ(comparison),
            }
        (path / f"rank{rank}.json").write_text(json.dumps(results))
        joined.barrier("the end")


def plans_differ(comparison: Comparison) -> int:
    """Logprobs of one rank that another plan changes."""
    model = deterministic_decoder(comparison.geometry, comparison.dtype)
    model.load_state_dict(comparison.weights)
    with torch.no_grad():
        one = logprobs_of(model)
        model.arithmetic.plan = SumPlan(4)
        return int((logprobs_of(model) != one).sum())


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), Path(sys.argv[2]))
