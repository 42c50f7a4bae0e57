"""A trainer on vLLM's GPU and its one copy of the weights, that takes real steps, in turns with the
server or beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.synthetic import gradient_of, random_batch
from bench.gpu.trainer import BenchTrainer, main
from example_trainer.batch.packing import pack_batch
from example_trainer.config import TrainerConfig


class TurnsTrainer(BenchTrainer):
    """Commands for bench/colocate.py, beside the commands of every trainer of the benchmarks."""

    def steps(self, count: int, tokens: int, length: int) -> dict[str, Any]:
        """Take whole steps: (rest,) forward, backward, optimizer, update of the server(, wake).

        Args:
            tokens: in the one pass of a step.
            length: of each sequence in it.

        Returns:
            for each step its seconds, the turn's own figures (empty without turns) and the most
            bytes that torch had. Or `out_of_memory`: the first words of the error.
        """
        assert self.model is not None
        assert self.bridge is not None
        config = TrainerConfig(model_name="bench", lr=1e-5, seq_len=length, training_steps=10**6)
        self.model.arithmetic.sums = self.optimizer.sums
        rows = []
        for number in range(count):
            batch = random_batch(
                max(1, tokens // length), (length, length), self.model.geometry.vocab_size, number
            )
            ((bins,),) = pack_batch(
                batch,
                tokens_per_bin=tokens,
                ranks=1,
                normalisation="token",
                max_tokens=length,
                share_prefixes=False,
            )
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            started, told = time.monotonic(), ""
            with self.bridge.turn(lambda: None):
                try:
                    gradient_of(
                        self.model, self.optimizer, [one.to(self.device) for one in bins], config
                    )
                    self.optimizer.step()
                except torch.OutOfMemoryError as error:
                    told = str(error).splitlines()[0][:200]
                if told:
                    self._forget()
                else:
                    self._update(self.optimizer.write_weights, self.optimizer.masters)
            if told:
                return {"out_of_memory": told}
            peak = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0
            turn = dict(self.bridge.turn_figures)
            rows.append(
                {"seconds": time.monotonic() - started, "turn": turn, "peak_reserved_bytes": peak}
            )
        return {"steps": rows, "tokens": sum(len(one.tokens) for one in bins)}

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "steps": self.steps}

    def _forget(self) -> None:
        self.optimizer.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(TurnsTrainer)
