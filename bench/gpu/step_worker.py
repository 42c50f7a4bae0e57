"""The trainer's step on a made-up batch, deterministic or not: the same code that a training run
calls.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from bench.gpu.processes import Answers, serve
from bench.gpu.shapes import SHAPES
from bench.gpu.speed_worker import Timer
from bench.gpu.synthetic import dtype_on, geometry_of, gradient_of, random_batch, random_weights
from example_trainer.batch.packing import pack_batch
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.deterministic.parity import weights_sha
from example_trainer.models import Decoder
from example_trainer.training.optimizer import make_optimizer
from vllm_patching.batch_invariant.settings import enable_settings

PHASES = ("gradient", "optimizer", "weights")


class StepWorker:
    """A model with random weights, its optimizer, and batches for it."""

    def __init__(self, mode: str, shape: str, device: str) -> None:
        """
        Args:
            mode: `off` or `ours`.
            shape: a key of SHAPES.
        """
        self.mode, self.shape, self.device = mode, shape, torch.device(device)
        self.timer = Timer(self.device)

    def load(self, seed: int = 0) -> dict[str, Any]:
        """Make the model; the same weights for the same seed in both modes."""
        geometry = geometry_of(self.shape)
        dtype = dtype_on(self.device)
        make = deterministic_decoder if self.mode == "ours" else Decoder
        self.model = make(geometry, dtype, self.device)
        random_weights(self.model, seed=seed)
        self.config = TrainerConfig(model_name="bench", lr=1e-5, seq_len=4096, training_steps=1000)
        self.optimizer = make_optimizer(self.config, self.model)
        self.model.arithmetic.sums = self.optimizer.sums
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def steps(
        self, count: int, sequences: int, lengths: list[int], tokens: int, seed: int = 0
    ) -> dict[str, Any]:
        """Take optimizer steps.

        Args:
            count: how many; the first two are not counted.
            sequences: in a batch, of lengths drawn from `lengths` (fewest, most); the second half
                of each is trained.
            tokens: in a pass, at most.

        Returns:
            median seconds of a step and of its phases, tokens per second, and the hash of the
            masters after the last step.
        """
        rows = []
        for index in range(count):
            batch = random_batch(
                sequences, (lengths[0], lengths[1]), self.model.geometry.vocab_size, seed + index
            )
            options = {"normalisation": "token", "max_tokens": 4096, "share_prefixes": False}
            ((bins,),) = pack_batch(batch, tokens_per_bin=tokens, ranks=1, **options)  # type: ignore[arg-type]
            rows.append(self._step([one.to(self.device) for one in bins]))
        counted = rows[2:]
        medians = [statistics.median(row[phase] for row in counted) for phase in range(len(PHASES))]
        seconds, whole = (
            statistics.median(sum(row) for row in counted),
            sum(len(one.tokens) for one in bins),
        )
        return {
            "seconds": round(seconds, 4),
            "phases": {name: round(value, 4) for name, value in zip(PHASES, medians, strict=True)},
            "tokens": whole,
            "tokens_per_second": round(whole / seconds, 1),
            "weights_sha": weights_sha(self.optimizer.masters),
        }

    def _step(self, bins: Any) -> list[float]:
        work = (
            lambda: gradient_of(self.model, self.optimizer, bins, self.config),
            self.optimizer.step,
            self.optimizer.write_weights,
        )
        return [self.timer(part) for part in work]


if __name__ == "__main__":
    answers = Answers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True, choices=["off", "ours"])
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--device", required=True)
    parsed = parser.parse_args()
    if parsed.mode == "ours":
        enable_settings()
    worker = StepWorker(parsed.mode, parsed.shape, parsed.device)
    serve(answers, {"load": worker.load, "steps": worker.steps})
