"""The trainer's side of the parity matrix: samples from a server and recomputes every logprob in
deterministic mode.

A process of its own, which takes commands line by line, as bench.gpu.trainer, whose commands it has
too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.comparing_trainer import ComparingTrainer
from bench.gpu.trainer import main
from example_trainer.deterministic.pairing import deterministic_decoder
from vllm_patching.batch_invariant import ops
from vllm_patching.batch_invariant.plan import SumPlan, plan_of
from vllm_patching.batch_invariant.provenance import provenance_difference, table_hash
from vllm_patching.batch_invariant.settings import enable_settings


class ParityTrainer(ComparingTrainer):
    """ComparingTrainer with the deterministic decoder."""

    decoder = staticmethod(deterministic_decoder)

    def load(self, **options: Any) -> dict[str, Any]:
        """See BenchTrainer; no set of weights is kept. The model follows the server's sum plan. A
        server out of deterministic mode has none, and sums one part for each of its ranks.
        """
        loaded = super().load(drawn=True, **options)
        info = self._asked(lambda: self._get("/bridge/info"))
        parts = int(info["tp_degree"])
        if info["deterministic"] is not None:
            parts = plan_of(info["deterministic"]["provenance"]).parts
        return {**loaded, **self.plan(parts)}

    def plan(self, parts: int) -> dict[str, Any]:
        """Sum so many parts from now on."""
        assert self.model is not None
        self.model.arithmetic.plan = SumPlan(parts)
        return {"parts": parts}

    def pair(self) -> dict[str, str]:
        """Return the differences between the server's kernels and tables and ours; empty strings if
        there are none.
        """
        assert self.model is not None
        theirs = self._asked(lambda: self._get("/bridge/info")["deterministic"])
        if theirs is None:
            return {"provenance": "the server is not in deterministic mode", "rotary_table": ""}
        ours = table_hash(self.model.rotary)
        return {
            "provenance": provenance_difference(
                ops.provenance(self.model.arithmetic.plan), theirs["provenance"]
            ),
            "rotary_table": ""
            if ours == theirs["rotary_table"]
            else f"{ours} here, {theirs['rotary_table']} there",
        }

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "pair": self.pair, "plan": self.plan}


if __name__ == "__main__":
    main(ParityTrainer, enable_settings)
