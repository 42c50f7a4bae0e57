"""Additions to a vLLM worker in deterministic mode. vLLM imports this module before it builds the
model, which patches vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_patching.batch_invariant.patches import apply_patches, patch_experts
from vllm_patching.batch_invariant.plan import SumPlan
from vllm_patching.batch_invariant.provenance import provenance
from vllm_patching.batch_invariant.self_test import self_test
from vllm_patching.compat.batch_invariant import sums_in_one_kernel, tensor_ranks
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.protocol import messages
from vllm_patching.worker.extension import LockstepWorkerExtension

logger = worker_logger("lockstep.deterministic")

for _replaced in [*apply_patches(), *patch_experts()]:
    logger.info("[Deterministic] replaced %s", _replaced)


class DeterministicWorker:
    """Mixed into vLLM's worker by --deterministic."""

    def lockstep_deterministic_check(self) -> dict[str, Any]:
        """Test the operations on this machine and on this model's shapes. Collective: all ranks of
        the server test at the same time.

        Returns:
            {"provenance", "rotary_table": its hash, "checks": how many, "failure": "" or one line,
            "seconds"}
        """
        model = self.get_model()  # type: ignore[attr-defined]
        ranks = tensor_ranks()
        if ranks > 1:
            how = (
                "by vLLM's one-stage all-reduce" if sums_in_one_kernel() else "gathered, then added"
            )
            logger.info("[Deterministic] sums over %d ranks: %s", ranks, how)
        report = self_test(model, ranks)
        return {"provenance": provenance(SumPlan(ranks)), **report}


class DeterministicSharedWorker(DeterministicWorker, LockstepWorkerExtension):
    """With the weight bridge."""


if TYPE_CHECKING:

    def _checked(worker: DeterministicWorker) -> messages.DeterministicWorker:
        return worker
