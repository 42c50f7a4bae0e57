"""BenchTrainer over several processes, which torchrun starts and whose rank 0 speaks with the
parent.

The model is spread by FSDP2 over a trainer that broadcasts, or split as vLLM's ranks hold it
(--split) for a single copy.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.gpu.processes import Answers, free_port
from bench.gpu.shapes import SHAPES
from bench.gpu.trainer import BenchTrainer, parse, set_up
from example_trainer.models.decoder import Decoder
from example_trainer.parallel.fsdp import sharded_decoder
from example_trainer.parallel.launch import place_of
from example_trainer.parallel.ranks import Ranks, join_ranks
from example_trainer.parallel.tensor import TensorParallelShards, split_decoder
from vllm_patching.weights.families import Geometry

IDLE_SECONDS = 3600.0
"""Limit of the time for which the other ranks wait for the parent's next command."""


class SpreadTrainer(BenchTrainer):
    """Every command is collective; what it returns on rank 0 is the answer."""

    deterministic = False

    def __init__(
        self, shape: str, port: int, device: torch.device, timeout: float, ranks: Ranks
    ) -> None:
        super().__init__(shape, port, str(device), timeout)
        self.ranks, self.rank = ranks, ranks.rank

    def load(
        self, seed: int = 0, optimizer: bool = False, spare: bool = True, drawn: bool = False
    ) -> dict[str, Any]:
        """See BenchTrainer.load; each rank draws its own rows, and always has both sets or none."""
        model = self.model = self._make(Geometry.from_config(SHAPES[self.shape]))
        self._make_sets(seed, drawn)
        self.write(0)
        mine = sum(rows.nbytes for rows in self._local().values())
        return {
            "ranks": self.ranks.world_size,
            "parameters": sum(1 for _ in model.parameters()),
            "model_bytes": sum(self.ranks.gather(mine, "counting bytes")),
        }

    def write(self, which: int) -> None:
        if self.drawn:
            super().write(which)
            return
        with torch.no_grad():
            for name, rows in self._local().items():
                rows.copy_(self.sets[which][name])
        self.served_set = which

    def connect(self, kind: str, ports: Sequence[int] = (), **options: Any) -> dict[str, Any]:
        return super().connect(kind, ports, ranks=self.ranks, **options)

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {
            name: getattr(self, name)
            for name in ("load", "connect", "sync", "check", "memory", "close")
        }

    def serve(self, answers: Answers | None) -> None:
        """Carry out what rank 0 reads, on every rank, until its stdin ends.

        `answers`: rank 0's way to the parent.
        """
        self.answers = answers
        while True:
            line = sys.stdin.readline() if self.ranks.is_main else ""
            request = self.ranks.broadcast(
                json.loads(line) if line else None, "the next command", timeout=IDLE_SECONDS
            )
            if request is None:
                return
            name = request.pop("do")
            try:
                answer = {"ok": self.commands()[name](**request)}
            except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
                traceback.print_exc()
                answer = {"error": str(error), "type": type(error).__name__}
            if answers is not None:
                answers.write(answer)

    def _make(self, geometry: Geometry) -> Decoder:
        return sharded_decoder(
            geometry,
            self.dtype,
            self.device,
            self.ranks.world_size,
            deterministic=self.deterministic,
        )

    def _local(self) -> dict[str, torch.Tensor]:
        """This rank's rows of each parameter."""
        assert self.model is not None
        return {
            name: self.model.shards.local(parameter)
            for name, parameter in self.model.named_parameters()
        }

    def _asked(self, ask: Callable[[], Any]) -> Any:
        return self.ranks.on_main("asking the server", ask)

    def _checksums_equal(self, served: list[str], url: str = "") -> bool:
        """Return the first rank's value, as the update reported it."""
        return served[0] == self.last_checksum

    def _difference(self, *arguments: Any) -> float:
        assert self.model is not None
        found = super()._difference(*arguments)
        self.model.shards.release(self.model)
        return found

    def _master_port(self) -> int:
        port: int = self.ranks.broadcast(free_port(), "the rendezvous' port")
        return port


class SplitTrainer(SpreadTrainer):
    """Each rank holds what vLLM's rank of the same number does, so that a single copy can be made
    of both.
    """

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "flatten_head": self.flatten_head}

    def _make(self, geometry: Geometry) -> Decoder:
        return split_decoder(
            geometry,
            self.dtype,
            self.device,
            self.ranks.rank,
            self.ranks.world_size,
            torch.distributed.group.WORLD,
            self.deterministic,
        )

    def _held_by_all(self, name: str) -> bool:
        assert self.model is not None
        shards = self.model.shards
        assert isinstance(shards, TensorParallelShards)
        return shards.kinds[name] != "split"

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The ranks' parts of the vocabulary side by side."""
        assert self.model is not None
        parts = self.model.split.gather(super()._logits(ids))
        return torch.cat(list(parts), dim=-1)[..., : self.model.geometry.vocab_size]


def main(kind: type[SpreadTrainer], prepare: Callable[[], object] = lambda: None) -> None:
    """One rank of a trainer.

    `prepare`: called before the device is touched.
    """
    prepare()
    args = parse([argument for argument in sys.argv[1:] if argument != "--split"])
    place = place_of(os.environ)
    local_rank = place[2] if place else 0
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    answers = Answers()
    set_up(args)
    with join_ranks(600.0, device) as ranks:
        kind(args.shape, args.port, device, args.timeout, ranks).serve(
            answers if ranks.is_main else None
        )


if __name__ == "__main__":
    main(SplitTrainer if "--split" in sys.argv else SpreadTrainer)
