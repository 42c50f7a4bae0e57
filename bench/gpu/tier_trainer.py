"""A trainer of a checkpoint by a decoder of ours, or by transformers' class of the same model.

As bench.gpu.trainer, a process of its own, which takes commands line by line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.gpu.comparing_trainer import ComparingTrainer
from bench.gpu.speed_worker import through_transformers
from bench.gpu.trainer import main
from example_trainer.config import TrainerConfig
from example_trainer.models.hf_checkpoint import load_model, make_whole
from example_trainer.training.optimizer import make_optimizer


class TierTrainer(ComparingTrainer):
    """A trainer whose updates send the weights of a real optimizer step."""

    def load_tier(self, tier: int, folder: str) -> dict[str, Any]:
        """Read a checkpoint into a model of this tier, and make its optimizer."""
        make = through_transformers(Path(folder)) if tier == 2 else make_whole
        self.model = load_model(folder, self.dtype, self.device, make)
        config = TrainerConfig(model_name=folder, lr=1e-5, training_steps=1000)
        self.optimizer = make_optimizer(config, self.model)
        return {"model": type(self.model).__name__, "way": getattr(self.model, "way", "packed")}

    def write(self, which: int) -> None:
        """Leave the parameters as the optimizer wrote them."""

    def commands(self) -> dict[str, Any]:
        return {**super().commands(), "load_tier": self.load_tier}


if __name__ == "__main__":
    main(TierTrainer)
