"""A rank of test_experts.py: compares experts that are spread over the ranks with one rank's.

FORKED_RANKS=4 python -m tests.forked_ranks experts_worker.py FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from example_trainer.models import Decoder, load_model
from example_trainer.models.decoder import Experts, Mixture
from example_trainer.models.ops import choose_operations
from example_trainer.models.packing import Packing
from example_trainer.models.shards import GradientSums
from example_trainer.parallel.experts import Exchange, SpreadExperts
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.training.memory_plan import MemoryRequest, Table, exchanged_bytes
from example_trainer.training.optimizer import MasterAdamW
from tests.geometries import geometry_of
from vllm_patching.batch_invariant.plan import SumPlan

CPU = torch.device("cpu")
EXPERTS, CHOSEN = 8, 3
GEOMETRY = geometry_of(
    "Qwen3Moe", 2, 32, 16, 2, 1, 16, 61,
    num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, mlp_only_layers=[],
)  # fmt: skip


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def lengths_of(rank: int) -> list[int]:
    """Spans of a rank's bin: other ones on each."""
    return [rank + 1, 5, 2][: 1 + rank % 3]


def choices(ranks: int, kind: str) -> list[Tensor]:
    """The experts of the tokens of each rank."""
    generator = torch.Generator().manual_seed(5)
    chosen = []
    for rank in range(ranks):
        tokens = sum(lengths_of(rank))
        drawn_experts = drawn(generator, tokens, EXPERTS).argsort(-1)[:, :CHOSEN]
        if kind == "one rank's":  # the experts of the first rank alone: the others get no rows
            drawn_experts = torch.arange(1, -1, -1).expand(tokens, 2)
        chosen.append(drawn_experts.contiguous())
    return chosen


def check_layer(
    ranks: Ranks, kind: str, dtype: torch.dtype, deterministic: bool, parts: int = 1
) -> None:
    """A layer's outputs have the bits of one rank; gradients are equal up to rounding.

    Args:
        parts: of the sums that a server of several tensor-parallel ranks takes.
    """
    rank, size = ranks.rank, ranks.world_size
    model = Decoder(GEOMETRY, dtype)
    model.arithmetic.ops = choose_operations(CPU, dtype, deterministic)
    model.arithmetic.plan = SumPlan(parts)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data.copy_(0.3 * drawn(generator, *parameter.shape))
    mixture = model.model.layers[0].mlp
    assert isinstance(mixture, Mixture)
    assert isinstance(mixture.experts, Experts)
    whole = mixture.experts
    own = EXPERTS // size
    group = dist.group.WORLD
    assert group is not None
    spread = SpreadExperts(whole, Exchange(group, size, own))
    part = slice(rank * own, (rank + 1) * own)
    spread.w13_weight.data.copy_(whole.w13_weight[part])
    spread.w2_weight.data.copy_(whole.w2_weight[part])

    chosen = choices(size, kind)
    counts = [len(one) for one in chosen]
    x = drawn(generator, sum(counts), 32).to(dtype)
    weights = drawn(generator, sum(counts), chosen[0].shape[1]).abs()
    upstream = drawn(generator, *x.shape).to(dtype)

    def run(experts: torch.nn.Module, parts: slice, chosen: Tensor, lengths: list[int]) -> None:
        leaves = [t[parts].clone().requires_grad_() for t in (x, weights)]
        y = experts(*leaves, chosen, Packing(lengths))
        y.backward(upstream[parts])
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])

    results: list[list[Tensor]] = []
    everything = [length for one in range(size) for length in lengths_of(one)]
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    run(whole, slice(None), torch.cat(chosen), everything)
    run(spread, mine, chosen[rank], lengths_of(rank))
    (y, dx, d_weights), (own_y, own_dx, own_d_weights) = results
    assert torch.equal(own_y, y[mine]), f"{kind}, {dtype}: outputs are not those of one rank"
    close = {"atol": 2e-5, "rtol": 2e-5}
    if dtype == torch.bfloat16:
        close = {"atol": 0.1, "rtol": 0.03}
    torch.testing.assert_close(own_dx, dx[mine], **close)
    torch.testing.assert_close(own_d_weights, d_weights[mine], **close)
    for one, all_of_them in (
        (spread.w13_weight, whole.w13_weight),
        (spread.w2_weight, whole.w2_weight),
    ):
        torch.testing.assert_close(one.grad, all_of_them.grad[part], **close)
    run(spread, mine, chosen[rank], lengths_of(rank))
    assert torch.equal(results[-1][1], own_dx), "a second pass has another gradient"


def check_kept(ranks: Ranks, dtype: torch.dtype, table: Table) -> None:
    """With an even load, a layer keeps for its backward pass what the memory plan counts."""
    group = dist.group.WORLD
    assert group is not None
    model = Decoder(GEOMETRY, dtype)
    model.arithmetic.ops = choose_operations(CPU, dtype, table == "invariant")
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    whole = model.model.layers[0].mlp.experts
    assert isinstance(whole, Experts)
    spread = SpreadExperts(whole, Exchange(group, ranks.world_size, EXPERTS // ranks.world_size))
    tokens = 8 * EXPERTS
    chosen = (torch.arange(tokens)[:, None] * CHOSEN + torch.arange(CHOSEN)) % EXPERTS
    kept = []
    for experts in (whole, spread):
        own = {p.untyped_storage().data_ptr() for p in (*whole.parameters(), *spread.parameters())}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        leaves = torch.ones(tokens, 32, dtype=dtype), torch.ones(tokens, CHOSEN)
        x, weights = (leaf.requires_grad_() for leaf in leaves)
        own |= {one.untyped_storage().data_ptr() for one in (x, weights)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = experts(x, weights, chosen, Packing([tokens]))
        kept.append(sum(size for pointer, size in saved.items() if pointer not in own))
        del output
    request = MemoryRequest(
        GEOMETRY, dtype, tokens, tokens, table, world_size=ranks.world_size,
        expert_parallel=ranks.world_size,
    )  # fmt: skip
    planned, kept_bytes = exchanged_bytes(request), (kept[1] - kept[0]) / tokens
    assert abs(kept_bytes - planned) < 2, f"{table}: keeps {kept_bytes}, the plan has {planned}"


def loaded(ranks: Ranks, folder: Path, count: int, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """The model of one process, and the same one spread over the ranks."""
    make = partial(sharded_decoder, world_size=ranks.world_size, expert_parallel=count)
    return load_model(str(folder), dtype), load_model(str(folder), dtype, "cpu", make)


def check_logits(ranks: Ranks, folder: Path, count: int) -> None:
    """By operations that do not depend on other rows, logits have the bits of one process."""
    models = loaded(ranks, folder, count, torch.bfloat16)
    logits = []
    tokens = torch.arange(4 + 3 * ranks.rank)[None] % 61
    for model in models:
        model.arithmetic.ops = choose_operations(CPU, torch.bfloat16, deterministic=True)
        with torch.no_grad():
            logits.append(model.logits(tokens))
            model.shards.release(model)
    assert torch.equal(*logits), f"{count} ranks share the experts: other logits"


def check_gradients(ranks: Ranks, folder: Path, count: int, checkpointing: bool) -> None:
    """Ranks join parameters and gradients of one process, each working on its own tokens."""
    whole, model = loaded(ranks, folder, count, torch.float32)
    for name, parameter in model.named_parameters():
        joined = model.shards.whole(name, model.shards.local(parameter).clone())
        assert torch.equal(joined, whole.get_parameter(name)), name
    optimizer = MasterAdamW(model, lr=0.1, shards=model.shards)
    model.arithmetic.sums = optimizer.sums
    whole.arithmetic.sums = sums = GradientSums(whole)
    model.gradient_checkpointing = checkpointing
    generator = torch.Generator().manual_seed(3)
    for rank in range(ranks.world_size):
        tokens = torch.randint(0, 61, (1, 4 + 3 * rank), generator=generator)
        upstream = drawn(generator, 1, tokens.shape[1], 61)
        for one in (whole, model) if rank == ranks.rank else (whole,):
            (one.logits(tokens) * upstream).sum().backward()
    gradients = sums.take()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        joined = model.shards.whole(name, model.shards.local(parameter.grad).clone())
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(joined, gradients[name], atol=1e-5 * scale, rtol=1e-5)


def main(ranks: Ranks, folder: Path) -> None:
    for kind in ("drawn", "one rank's"):
        check_layer(ranks, kind, torch.float32, deterministic=False)
        check_layer(ranks, kind, torch.bfloat16, deterministic=False)
        for parts in (1, 2):
            check_layer(ranks, kind, torch.bfloat16, True, parts)
    for table in ("reference", "invariant"):
        check_kept(ranks, torch.bfloat16, table)
    for count in (2, 4):
        if count <= ranks.world_size:
            check_logits(ranks, folder, count)
            check_gradients(ranks, folder, count, checkpointing=count == 2)


if __name__ == "__main__":
    with join_ranks(60, CPU) as joined:
        main(joined, Path(sys.argv[1]))
