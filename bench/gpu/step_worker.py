"""The trainer's step on a made-up batch, deterministic or not: the same code that a training run calls."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from bench.gpu.line_protocol import Answers, serve
from bench.gpu.shapes import SHAPES
from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.config import TrainerConfig
from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.deterministic.parity import weights_sha
from example_trainer.models.decoder import Decoder
from example_trainer.models.geometry import Geometry
from example_trainer.process import StopSignal
from example_trainer.training.setup import make_optimizer
from example_trainer.training.step import accumulate_gradients
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

    def load(self, seed: int = 0) -> dict[str, Any]:
        """Make the model; the same weights for the same seed in both modes."""
        geometry = Geometry.from_config(SHAPES[self.shape])
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        make = deterministic_decoder if self.mode == "ours" else Decoder
        self.model = make(geometry, dtype, self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=self.device)
                norm = "norm" in name
                parameter.copy_(noise.mul_(0.05).add_(1.0) if norm else noise.mul_(1.8 / geometry.hidden_size**0.5))
        self.options = {"model_name": "bench", "lr": 1e-5, "seq_len": 4096, "training_steps": 1000}
        self.optimizer = make_optimizer(TrainerConfig(**self.options), self.model)
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def steps(self, count: int, sequences: int, lengths: list[int], micro: int, seed: int = 0) -> dict[str, Any]:
        """Take optimizer steps.

        Args:
            count: how many; the first two are not counted.
            sequences: in a batch, of lengths drawn from `lengths` (fewest, most); the second half of each is trained.
            micro: sequences in a microbatch.

        Returns:
            median seconds of a step and of its phases, tokens per second, and the hash of the masters after the last step.
        """
        config = TrainerConfig(**self.options, batch_size=micro)
        draw = np.random.default_rng(seed)
        rows, tokens = [], 0
        for index in range(count):
            batch = self._batch(draw, sequences, lengths)
            tokens = sum(len(s.tokens) for s in batch.sequences)
            rows.append(self._step(batch, config))
            if index < 2:
                rows.clear()
        medians = {phase: float(np.median([row[phase] for row in rows])) for phase in PHASES}
        seconds = float(np.median([sum(row.values()) for row in rows]))
        return {
            "seconds": round(seconds, 4),
            "phases": {name: round(value, 4) for name, value in medians.items()},
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "weights_sha": weights_sha(self.optimizer.masters),
        }

    def _step(self, batch: Batch, config: TrainerConfig) -> dict[str, float]:
        times = [self._now()]
        accumulate_gradients(self.model, self.optimizer, batch, config, StopSignal())
        times.append(self._now())
        self.optimizer.step()
        times.append(self._now())
        self.optimizer.write_weights()
        times.append(self._now())
        return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def _batch(self, draw: np.random.Generator, sequences: int, lengths: list[int]) -> Batch:
        vocab = self.model.geometry.vocab_size
        made = []
        for index in range(sequences):
            length = int(draw.integers(lengths[0], lengths[1] + 1))
            positions = np.arange(length // 2, length)
            made.append(
                TrainedSequence(
                    tokens=draw.integers(3, vocab, length),
                    positions=positions,
                    rollout_logprobs=np.full(len(positions), -10.0, np.float32),
                    advantages=np.full(len(positions), draw.normal(), np.float32),
                    score=0.0,
                    weight_version=None,
                    order=(index // 4, index % 4),
                )
            )
        return Batch(made)


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
