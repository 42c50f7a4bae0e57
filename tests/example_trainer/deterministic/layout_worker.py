"""A rank of test_layouts.py: train a small deterministic model spread over the ranks, on rollouts
of the whole model.

FORKED_RANKS=N python -m tests.forked_ranks layout_worker.py KIND FOLDER STEPS [FAULT]
    KIND: fsdp, experts (each two ranks share a layer's) or tensor_parallel, with the number of
    vLLM's ranks behind it. After "shared_" rollouts share prefixes LAYOUT_DEVICE=cuda: on GPUs, one
    for each rank
    FAULT: kill: rank 1 kills itself; bit: a logprob is wrong; none, and STEPS 0: look at gradients
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from atroposlib.wire import TrainerSession
from example_trainer.batch.groups import Batch
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.parity import ParityCheck, ParityError, weights_sha
from example_trainer.models import Decoder, load_model
from example_trainer.models.shards import add_in_order
from example_trainer.parallel import fsdp
from example_trainer.parallel.fsdp import OrderedReduceScatter
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.process import StopSignal
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.model import decoder_maker
from example_trainer.training.optimizer import MasterAdamW, make_optimizer
from example_trainer.training.runs import Run, SavedStep
from example_trainer.training.step import BatchGradients, guarded_step, make_objective
from tests.example_trainer.deterministic.training import config, rollouts
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.batch_invariant.settings import enable_settings

DTYPE = torch.bfloat16
ON_GPU = os.environ.get("LAYOUT_DEVICE") == "cuda"
SEQUENCES, TOKENS = 4, 60
SHARING_TOKENS = 150
if ON_GPU:
    SEQUENCES, TOKENS = 64, 1000
SAVED = 1
"""The step whose checkpoint the next run goes on from."""


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if ON_GPU else torch.device("cpu")


class Spread:
    """The model of this rank, and the whole model that its rollouts are sampled with."""

    def __init__(
        self, ranks: Ranks, kind: str, folder: Path, dtype: torch.dtype = DTYPE, **options: object
    ) -> None:
        self.shares = kind.startswith("shared_")
        kind, plan = kind.removeprefix("shared_")[:-1], SumPlan(int(kind[-1]))
        layouts: dict[str, dict[str, object]] = {
            "fsdp": {},
            "experts": {"expert_parallel": 2},
            "tensor_parallel": {"single_copy": True},
        }
        options |= layouts[kind]
        self.ranks, self.model_path = ranks, str(folder / "model")
        self.options: TrainerConfig = config(folder, max_grad_norm=0.5, lr=1e-3, **options)
        make, device = decoder_maker(self.options, ranks, plan=plan), device_of(ranks.rank)
        self.model: Decoder = load_model(self.model_path, dtype, device, make)
        whole = decoder_maker(self.options, Ranks(), plan=plan)
        self.sampler = load_model(self.model_path, dtype, device, whole)
        self.optimizer: MasterAdamW = make_optimizer(self.options, self.model)
        kernels = {"linear": "reference"}
        split = self.model.split.size > 1
        self.parity = ParityCheck(kernels, kernels, ranks=ranks, same_tokens=split)

    def masters(self) -> dict[str, torch.Tensor]:
        """The whole masters. Collective."""
        shards = self.optimizer.shards
        return {name: shards.whole(name, one) for name, one in self.optimizer.masters.items()}

    def batch(self) -> Batch:
        """Rollouts of the masters, rounded to the dtype that the model computes in."""
        masters = self.masters()
        for name, parameter in self.sampler.named_parameters():
            with torch.no_grad():
                parameter.copy_(masters[name])
        step = self.optimizer.steps
        return rollouts(self.sampler, step, step, SEQUENCES, self.shares)

    def bins(self, batch: Batch) -> list[list[PackedBin]]:
        """Each rank's bins."""
        split = self.model.split.size > 1
        (packed,) = pack_batch(
            batch,
            tokens_per_bin=max(TOKENS, SHARING_TOKENS * self.shares),
            ranks=1 if split else self.ranks.world_size,
            normalisation="token",
            max_tokens=128,
            share_prefixes=self.shares,
        )
        assert self.shares == any(one.packing.shared for mine in packed for one in mine)
        packed = [[one.to(self.optimizer.device) for one in mine] for mine in packed]
        return packed * self.ranks.world_size if split else packed

    def step(self, batch: Batch) -> str:
        """Learn from a batch; return the hash of the weights."""
        row = guarded_step(
            self.model,
            self.optimizer,
            [self.bins(batch)[self.ranks.rank]],
            self.options,
            make_objective(self.options),
            StopSignal(),
            parity=self.parity,
            ranks=self.ranks,
        )
        self.optimizer.write_weights()
        assert (row["ratio_mean"], row["ess"]) == (1, 1)
        figures = self.parity.row(self.optimizer.masters, self.model.shards)
        assert figures["compared_tokens"] == batch.trained_tokens, "each token counts once"
        assert figures["weights_sha"] == weights_sha(self.masters())
        return str(figures["weights_sha"])


def check_order(ranks: Ranks) -> None:
    """Sums over three ranks are taken in the order of the ranks: in another order it is 1."""
    one = [1e8, 1.0, -1e8][ranks.rank]
    assert add_in_order(torch.full((2,), one), dist.group.WORLD).tolist() == [0.0, 0.0]
    out, group = torch.empty(2), dist.group.WORLD
    assert group is not None
    OrderedReduceScatter()(out, torch.full((6,), one), group, dist.ReduceOp.SUM)
    assert out.tolist() == [0.0, 0.0]


def check_gradients(ranks: Ranks, kind: str, folder: Path) -> None:
    """The gradient in float32 is that of one process, also of the entropy, and logprobs have its
    bits.
    """
    if ranks.world_size == 3:
        check_order(ranks)
    spread = Spread(ranks, kind, folder, torch.float32, entropy_coef=0.3)
    bins = spread.bins(spread.batch())
    data_ranks = 1 if spread.model.split.size > 1 else ranks.world_size
    whole = [one for mine in bins[:data_ranks] for one in mine]
    alone = make_optimizer(spread.options, spread.sampler)
    options, objective = spread.options, make_objective(spread.options)
    reduced: list[int] = []
    sum_of_parts = fsdp.sum_in_order

    def counted(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        reduced.append(len(parts))
        return sum_of_parts(parts)

    fsdp.sum_in_order = counted
    for model, optimizer, mine, parity in (
        (spread.model, spread.optimizer, bins[ranks.rank], spread.parity),
        (spread.sampler, alone, whole, None),
    ):
        BatchGradients(
            model, optimizer, [mine], options, objective, StopSignal(), parity=parity
        ).accumulate(0)
    assert bool(reduced) == ("tensor" not in kind), "FSDP2 adds in an order of its own"
    expected, gradients = alone.gradients(), spread.optimizer.gradients()
    assert gradients.keys() == expected.keys()
    spread.model.shards.complete(gradients)
    for name, local in gradients.items():
        gradient = spread.model.shards.whole(name, local)
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert error < 2e-5, f"{name} differs by {error}"


def with_one_bit_changed(batch: Batch) -> Batch:
    """Change a logprob of the shortest sequence: it is alone in the bin of one rank."""
    number = min(range(len(batch.sequences)), key=lambda n: len(batch.sequences[n].tokens))
    sequence = batch.sequences[number]
    changed = sequence["rollout_logprobs"].copy()
    changed[0] = np.nextafter(changed[0], np.float32(0))
    batch.sequences[number] = sequence.with_fields(rollout_logprobs=changed)
    return batch


def check_wrong_bit(spread: Spread, batch: Batch, checkpoints: Checkpoints) -> dict[str, object]:
    """The step before is saved whole after the error, as the training loop does it. Returns the
    error and the first token.
    """
    optimizer, before = spread.optimizer, weights_sha(spread.masters())
    message = "the wrong bit was not noticed"
    try:
        spread.step(with_one_bit_changed(batch))
    except ParityError as error:
        message = str(error)
    assert weights_sha(spread.masters()) == before
    path = checkpoints.begin(spread.model, optimizer, {})
    checkpoints.wait()
    for master in optimizer.masters.values():
        master.zero_()
    load_state(SavedStep.read(path), optimizer)
    assert weights_sha(spread.masters()) == before
    return {"error": message, "first": spread.parity.report()["parity"]["first"]}


def main(ranks: Ranks, kind: str, folder: Path, steps: int, fault: str) -> None:
    torch.set_num_threads(1)
    if not steps:
        check_gradients(ranks, kind, folder)
    spread = Spread(ranks, kind, folder)
    optimizer, hashes = spread.optimizer, {}
    checkpoints = Checkpoints(
        folder / "checkpoints", Run("a", "model", (TrainerSession(1000, 0),)), ranks=ranks
    )
    saved = folder / "saved.json"
    if saved.exists():
        load_state(SavedStep.read(Path(json.loads(saved.read_text()))), optimizer)
        optimizer.write_weights()
    while optimizer.steps < steps:
        batch = spread.batch()
        if fault == "bit" and optimizer.steps == SAVED:
            hashes |= check_wrong_bit(spread, batch, checkpoints)
            break
        if fault == "kill" and optimizer.steps == SAVED:
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            spread.step(batch)
        digest = spread.step(batch)
        hashes[str(optimizer.steps)] = digest
        if fault == "kill":
            path = checkpoints.begin(spread.model, optimizer, {})
            checkpoints.wait()
            if ranks.is_main:
                saved.write_text(json.dumps(str(path)))
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(hashes))


if __name__ == "__main__":
    arguments = [*sys.argv[1:], ""]
    here = device_of(int(os.environ["RANK"]))
    if ON_GPU:
        enable_settings()
        torch.cuda.set_device(here)
    with join_ranks(60, here) as joined:
        main(joined, arguments[0], Path(arguments[1]), int(arguments[2]), arguments[3])
