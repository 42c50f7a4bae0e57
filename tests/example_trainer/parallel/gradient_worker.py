"""A rank of test_float32_gradients.py. It adds up the gradients of its own bins of a bfloat16
model, and compares the sum of both ranks with that of one process.

python -m tests.forked_ranks gradient_worker.py FOLDER SEED…
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from example_trainer.batch.groups import parse_batch
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder, load_model
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.process import StopSignal
from example_trainer.training.memory_plan import MemoryRequest, send_buffer_bytes
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import BatchGradients, make_objective
from example_trainer.weight_bridge.stream import SendPlan, WeightStream
from tests.example_trainer.parallel.spread_cases import SEQ_LEN, TOKENS, make_batch
from vllm_patching.protocol.manifest import Manifest, ManifestEntry
from vllm_patching.protocol.messages import Route
from vllm_patching.weights.sharding import plan_shards

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
CONFIG = TrainerConfig(model_name="-", seq_len=SEQ_LEN, batch_size=4, logprob_chunk=16)


def bins_of(seed: int, vocab_size: int) -> list[list[PackedBin]]:
    """The bins of each rank."""
    groups = parse_batch(make_batch(seed, vocab_size), SEQ_LEN, vocab_size)
    packed = pack_batch(
        groups,
        tokens_per_bin=TOKENS,
        ranks=2,
        normalisation=CONFIG.method.loss_normalisation,
        max_tokens=SEQ_LEN,
        share_prefixes=False,
    )
    return packed[0]


def optimizer_of(model: Decoder, offload: bool = False) -> MasterAdamW:
    optimizer = MasterAdamW(
        model, lr=0.01, weight_decay=0.1, shards=model.shards, offload=offload, bucket_elements=500
    )
    model.arithmetic.sums = optimizer.sums
    return optimizer


def add_gradients(model: Decoder, optimizer: MasterAdamW, bins: list[PackedBin]) -> None:
    BatchGradients(
        model, optimizer, [bins], CONFIG, make_objective(CONFIG), StopSignal()
    ).accumulate(0)


def check_gradients(model: Decoder, whole: Decoder, seed: int, rank: int) -> MasterAdamW:
    """Return the optimizer of the spread model, with the gradients of this rank's bins."""
    bins = bins_of(seed, model.geometry.vocab_size)
    assert min(map(len, bins)) > 1, "each rank needs several bins"
    optimizer, alone = optimizer_of(model), optimizer_of(whole)
    check_forward(model, whole, seed)
    add_gradients(model, optimizer, bins[rank])
    add_gradients(whole, alone, [one for mine in bins for one in mine])
    expected = alone.gradients()
    for name, local in optimizer.gradients().items():
        gradient, target = model.shards.whole(name, local), expected.pop(name)
        assert gradient.dtype == torch.float32
        error, size = float((gradient - target).abs().max()), float(target.abs().max())
        assert size > 0
        assert error <= 2e-6 * size, f"case {seed}: {name} differs by {error / size}"
    assert not expected, f"no gradient reached {list(expected)}"
    return optimizer


def check_forward(model: Decoder, whole: Decoder, seed: int) -> None:
    """The spread model computes in bfloat16, with the bits of one process."""
    bin = bins_of(seed, model.geometry.vocab_size)[0][0]
    with torch.no_grad():
        hidden = model(bin.tokens, bin.packing)
        model.shards.release(model)
        assert hidden.dtype == DTYPE
        assert torch.equal(hidden, whole(bin.tokens, bin.packing))


def check_update(model: Decoder, optimizer: MasterAdamW, offloaded: MasterAdamW) -> None:
    """An update changes the parameters themselves, with moments in host memory as without."""
    start = {name: master.clone() for name, master in optimizer.masters.items()}
    gradients = {name: local.clone() for name, local in optimizer.gradients().items()}
    optimizer.step()
    state = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
    optimizer.write_weights()
    changed = 0
    for name, parameter in model.named_parameters():
        local = model.shards.local(parameter)
        assert local.dtype == torch.float32
        assert torch.equal(local, state[f"master.{name}"])
        changed += int((local != start[name]).sum())
        local.copy_(start[name])
    assert changed > 0
    offloaded.gradients().update(gradients)
    offloaded.step()
    for key, tensor in offloaded.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def check_buffers(model: Decoder, ranks: Ranks) -> None:
    """The memory plan counts what is made to send float32 parameters to servers of 16 bits."""
    geometry = model.geometry
    manifest = Manifest(
        0, 1, tuple(ManifestEntry(one, "bfloat16", "cpu") for one in plan_shards(geometry, 0, 1))
    )
    plan = SendPlan(ranks.world_size, 1)
    stream = WeightStream(model, [manifest], plan, ranks, CPU, Route.GLOO)
    asked = MemoryRequest(
        geometry, DTYPE, TOKENS, SEQ_LEN, layouts=((manifest,),), packs=True, world_size=2
    )
    assert stream.buffer_bytes == send_buffer_bytes(asked)


def run_case(ranks: Ranks, folder: Path, seed: int) -> None:
    path = str(folder / f"model-{seed}")
    make = partial(sharded_decoder, world_size=ranks.world_size)
    model, whole = load_model(path, DTYPE, CPU, make), load_model(path, DTYPE)
    model.gradient_checkpointing = seed % 2 == 0
    for name, parameter in whole.named_parameters():
        held: Tensor = model.get_parameter(name)
        assert held.dtype == torch.float32
        assert torch.equal(
            model.shards.whole(name, model.shards.local(held)), parameter.detach().float()
        )
    frozen = load_model(path, DTYPE, CPU, partial(make, trained=False)).requires_grad_(False)
    assert {parameter.dtype for parameter in frozen.parameters()} == {DTYPE}
    check_forward(frozen, whole, seed)
    optimizer = check_gradients(model, whole, seed, ranks.rank)
    check_update(model, optimizer, optimizer_of(model, offload=True))
    check_buffers(model, ranks)


if __name__ == "__main__":
    with join_ranks(60, CPU) as joined:
        for number in map(int, sys.argv[2:]):
            run_case(joined, Path(sys.argv[1]), number)
