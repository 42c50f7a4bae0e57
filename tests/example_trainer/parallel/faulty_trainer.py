"""grpo.py with memory that runs out in one batch: in the middle of a layer, on the ranks that are
named.

python -m tests.forked_ranks faulty_trainer.py RANKS CALL OPTIONS…     RANKS: such as 0,1; CALL: of the last layer, from 1
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from example_trainer import grpo
from example_trainer.command_line import parse_config
from example_trainer.models.decoder import Layer
from example_trainer.process import run
from example_trainer.training import step

GRACE_SECONDS = 2.0
"""Limit of the wait for a rank that does not come; ranks that all run out of memory have time."""

if __name__ == "__main__":
    ranks, call, options = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]
    if len(ranks) == 1:
        step.GRACE_SECONDS = GRACE_SECONDS
    forward, calls = Layer.forward, 0

    def forward_until(layer: Layer, *arguments: Any) -> Any:
        """Every other call is of the second and last layer."""
        global calls
        calls += 1
        if calls == 2 * call and os.environ["RANK"] in ranks:
            torch.empty(1 << 52)
        return forward(layer, *arguments)

    Layer.forward = forward_until  # type: ignore[method-assign]
    sys.exit(run(lambda stop: grpo.train(parse_config(options), stop)))
