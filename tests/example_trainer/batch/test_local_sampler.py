"""Batches that are sampled when they are asked for: under the present weights, from the next problems, never the same twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from example_trainer.batch.local_sampler import SampledBatches
from example_trainer.batch.problems import Problem, sums
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError


class MadeUpSampler:
    """Answers each question twice with as many tokens as it has digits, under the weight version that is set."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[str] = []

    def groups(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        self.asked += [problem.question for problem in problems]
        return [self._group(problem) for problem in problems]

    def _group(self, problem: Problem) -> dict[str, Any]:
        digits = [int(letter) for letter in problem.question if letter.isdigit()]
        return {
            "tokens": [[40, *digits]] * 2,
            "masks": [[-100, *digits]] * 2,
            "inference_logprobs": [[1.0] + [-1.0] * len(digits)] * 2,
            "scores": [0.0, 1.0],
            "weight_versions": [self.version] * 2,
        }


def batches(sampler: MadeUpSampler, vocab_size: int = 50) -> SampledBatches:
    reader = BatchReader(TrainerConfig(model_name="m"), vocab_size, tokens_per_bin=16)
    return SampledBatches(sampler, sums(3), 2, reader, torch.device("cpu"))  # type: ignore[arg-type]


def test_each_batch_has_the_next_problems_and_the_present_version() -> None:
    sampler = MadeUpSampler()
    made = batches(sampler)
    for version in range(3):
        sampler.version = version
        batch = made.next(version)
        assert batch.lease is None
        assert (batch.figures.sequences, batch.figures.age_max, batch.queue_size) == (4, 0, 0)
        versions = torch.cat([one.versions for one in batch.bins])
        assert versions.tolist() == [version] * batch.figures.tokens
        made.acknowledge(version + 1)
    assert sampler.asked == [problem.question for problem in itertools.islice(sums(3), 6)]


def test_a_batch_of_another_tokenizer_can_be_skipped() -> None:
    made = batches(MadeUpSampler(), vocab_size=8)
    with pytest.raises(BatchError, match="holds nothing to train on: group 0: tokens"):
        made.next(0)
