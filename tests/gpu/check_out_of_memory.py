"""A step that runs out of a GPU's memory leaves nothing behind, alone and with two ranks. A minute,
needs no pytest:

python tests/gpu/check_out_of_memory.py [--json FILE]

On a CPU it tries what it can.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.checks import run_checks
from example_trainer.batch.groups import parse_batch
from example_trainer.batch.packing import PackedBin, pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.errors import OutOfMemoryError, RankError
from example_trainer.models import Decoder
from example_trainer.models.decoder import Layer
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.process import StopSignal
from example_trainer.training import step as guarded
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.step import guarded_step, make_objective
from tests.geometries import geometry_of

Result = tuple[bool, str]
"""The verdict of a check, and its observation."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GEOMETRY = geometry_of(
    "Qwen3", 4, 512, 1536, 8, 4, 64, 4096, max_position_embeddings=65536, tie_word_embeddings=True
)
CONFIG = TrainerConfig(model_name="-", seq_len=65536, batch_size=8)
ROOM = 3 << 30
"""Bytes that this process may take: enough for the short batch, too little for the long one."""
LONGEST_SECONDS = 90.0


def fill(model: Decoder) -> Decoder:
    """The same weights on every call."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        local = model.shards.local(parameter)
        local.copy_(0.02 * torch.randn(local.shape, device=local.device) + (parameter.dim() == 1))
    return model


def bins_of(length: int, seed: int, ranks: int = 1, rank: int = 0) -> list[PackedBin]:
    """Eight sequences of about one length, as one pass; of several ranks, this one's part of them."""
    rng = random.Random(seed)
    tokens = [
        [rng.randrange(GEOMETRY.vocab_size) for _ in range(length - rng.randrange(4))]
        for _ in range(8)
    ]
    group = {"tokens": tokens, "scores": [float(i % 2) for i in range(8)]}
    group["masks"] = [[-100, *row[1:]] for row in tokens]
    group["inference_logprobs"] = [[1.0] + [-8.3] * (len(row) - 1) for row in tokens]
    batch = parse_batch([group], CONFIG.seq_len, GEOMETRY.vocab_size)
    (packed,) = pack_batch(
        batch,
        tokens_per_bin=8 * length,
        ranks=ranks,
        normalisation="token",
        max_tokens=CONFIG.seq_len,
        share_prefixes=False,
    )
    return [one.to(DEVICE) for one in packed[rank]]


def step(
    model: Decoder, optimizer: MasterAdamW, length: int, seed: int, ranks: Ranks | None = None
) -> None:
    """One step on sequences of about one length, and the weights that it makes."""
    bins = bins_of(length, seed, ranks.world_size if ranks else 1, ranks.rank if ranks else 0)
    guarded_step(
        model, optimizer, [bins], CONFIG, make_objective(CONFIG), StopSignal(), ranks=ranks
    )
    optimizer.write_weights()


def a_long_batch() -> Result:
    """It runs out, everything is given back, and the steps behind it equal the steps of a trainer
    that never saw it.
    """
    if DEVICE.type == "cpu":
        return True, "not tried: no GPU"
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM / total))
    try:
        masters = []
        seen = ""
        for hurt in (False, True):
            model = fill(Decoder(GEOMETRY, torch.bfloat16, DEVICE))
            optimizer = MasterAdamW(model, lr=1e-3)
            model.arithmetic.sums = optimizer.sums
            step(model, optimizer, 200, 1)
            if hurt:
                before = torch.cuda.memory_allocated()
                try:
                    step(model, optimizer, 60000, 2)
                    return False, "a batch of 480,000 tokens fitted"
                except OutOfMemoryError as error:
                    told = str(error)
                left = (
                    torch.cuda.memory_allocated() - before
                )  # behind the error, whose traceback holds the batch
                seen = f"{left} bytes left behind; {told}"
                if left > 1 << 20 or not optimizer.sound or optimizer.steps != 1:
                    return False, seen
            step(model, optimizer, 200, 3)
            masters.append({name: master.cpu() for name, master in optimizer.masters.items()})
            del model, optimizer
        equal = all(torch.equal(tensor, masters[1][name]) for name, tensor in masters[0].items())
        return equal, f"masters equal: {equal}; {seen}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def rank(hurt: list[int], call: int) -> None:
    """Started by torchrun for the checks of two ranks: step 2 runs out of memory in the last layer,
    on some.
    """
    guarded.GRACE_SECONDS = 5.0
    device = DEVICE
    if DEVICE.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    with join_ranks(60, device) as ranks:
        model = fill(sharded_decoder(GEOMETRY, torch.bfloat16, device, ranks.world_size))
        optimizer = MasterAdamW(model, lr=1e-3, shards=model.shards)
        forward, calls = Layer.forward, 0

        def fail(layer: Layer, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call and ranks.rank in hurt:
                torch.empty(1 << 50, device=device)
            return forward(layer, *arguments)

        Layer.forward = fail  # type: ignore[method-assign]
        step(model, optimizer, 200, 1, ranks)
        began = time.perf_counter()
        try:
            step(model, optimizer, 200, 2, ranks)
        except OutOfMemoryError:
            gathered = (
                optimizer.shards.whole(name, master) for name, master in optimizer.masters.items()
            )
            whole = sum(int(torch.isfinite(tensor).all()) for tensor in gathered)
            print(
                f"rank {ranks.rank}: agreed, sound {optimizer.sound}, {whole} masters gathered",
                flush=True,
            )
        except RankError as error:
            print(
                f"rank {ranks.rank}: gave up after {time.perf_counter() - began:.0f} s: {error}",
                flush=True,
            )
            raise


def two_ranks(hurt: str) -> Result:
    """FSDP2 over NCCL; both ranks run out of memory in the same place, or one does while the other
    waits for it.
    """
    if torch.cuda.device_count() == 1:
        return True, "not tried: one GPU"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(Path(__file__)),
    ]
    began = time.perf_counter()
    # A group of its own, so that a rank which NCCL holds can be ended with the rest.
    process = subprocess.Popen(
        [*command, "--rank-hurt", hurt],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False, f"still there after {LONGEST_SECONDS:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    seen = f"{time.perf_counter() - began:.0f} s; " + " | ".join(lines)
    if hurt == "0,1":
        return output.count(
            "agreed, sound True"
        ) == 2, seen  # two processes may write into one line
    return process.returncode != 0 and any(
        "gave up" in line and "out of memory" in line for line in lines
    ), seen


def checks() -> dict[str, Callable[[], Result]]:
    """By name."""
    return {
        "a long batch": a_long_batch,
        "two ranks, both run out": partial(two_ranks, "0,1"),
        "two ranks, one runs out": partial(two_ranks, "1"),
    }


def main() -> int:
    """Return the process's status."""
    if sys.argv[1:2] == ["--rank-hurt"]:
        rank([int(number) for number in sys.argv[2].split(",")], 2 * GEOMETRY.num_layers)
        return 0
    return run_checks(__doc__, checks())


if __name__ == "__main__":
    sys.exit(main())
