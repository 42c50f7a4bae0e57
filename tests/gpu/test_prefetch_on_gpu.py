"""Batches that are copied to a GPU by a thread while the GPU is busy: what arrives is what was
packed.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from example_trainer.batch.client import RolloutClient
from example_trainer.batch.prefetch import Batches
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.parallel.ranks import Ranks
from tests.example_trainer.batch.test_prefetch import Client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS, LENGTH = 40, 3000


def group(number: int) -> dict[str, Any]:
    """Long enough that a copy takes a while, and no two alike."""
    tokens = [[1, *((number * 31 + i * 7 + j) % 1000 for j in range(LENGTH))] for i in range(4)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [0.0, 1.0, 2.0, 3.0],
        "inference_logprobs": [[1.0, *(-0.001 * j for j in range(LENGTH))] for _ in tokens],
        "weight_versions": [number] * 4,
    }


def test_what_arrives_on_the_gpu_is_what_was_packed() -> None:
    """Kernels of the step are still at work on one batch when the next one's memory is taken and
    filled.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    config = TrainerConfig.model_validate({"model_name": "m", "seq_len": LENGTH + 1})
    reader = BatchReader(config, vocab_size=1000, tokens_per_bin=2 * (LENGTH + 1))
    groups = [group(number) for number in range(STEPS)]
    client = Client(*groups)
    batches = Batches(
        cast(RolloutClient, client), Ranks(), reader, device, last_version=STEPS, ahead=True
    )
    busy = torch.randn(4096, 4096, device=device)
    seen: list[list[dict[str, torch.Tensor]]] = []
    for step in range(STEPS):
        batch = batches.next(step)
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)  # what is copied below waits for this
        (bins,) = batch.minibatches
        assert all(one.tokens.device == one.weights.device == device for one in bins)
        assert all(one.lengths.device == one.counts.device == torch.device("cpu") for one in bins)
        seen.append(
            [{name: tensor.clone() for name, tensor in one.tensors().items()} for one in bins]
        )
        del batch, bins
        batches.acknowledge(step + 1)
    batches.close()
    for number, bins in enumerate(seen):
        ((expected,),) = reader.read([groups[number]], number).minibatches
        for one, packed in zip(bins, expected, strict=True):
            for name, tensor in packed.tensors().items():
                # A missing field of a batch is NaN in it.
                there = one[name].cpu()
                same = there.isnan() & tensor.isnan() | (there == tensor)
                assert same.all(), f"{name} of batch {number}"
