"""Additions to a vLLM worker in deterministic mode. vLLM imports this module before it builds the
model, which patches vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_patching.batch_invariant.patches import apply_patches
from vllm_patching.batch_invariant.provenance import provenance
from vllm_patching.batch_invariant.self_test import self_test
from vllm_patching.batch_invariant.settings import nccl_variables, restore_nccl
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.protocol import messages
from vllm_patching.worker.extension import LockstepWorkerExtension

logger = worker_logger("lockstep.deterministic")

for _replaced in apply_patches():
    logger.info("[Deterministic] replaced %s", _replaced)


class DeterministicWorker:
    """Mixed into vLLM's worker by --deterministic."""

    def lockstep_deterministic_check(self) -> dict[str, Any]:
        """Test the operations on this machine and on this model's shapes.

        Returns:
            {"provenance", "rotary_table": its hash, "checks": how many, "failure": "" or one line,
            "seconds"}
        """
        model = self.get_model()  # type: ignore[attr-defined]
        report = self_test(model)
        return {"provenance": provenance(), **report}


_NCCL = nccl_variables()
"""As the user set it: this module is imported before vLLM's worker touches its device."""


class DeterministicSharedWorker(DeterministicWorker, LockstepWorkerExtension):
    """With the weight bridge."""

    def lockstep_setup(self, share_storage: bool) -> messages.Setup:
        """See LockstepWorkerExtension.

        vLLM's batch-invariant mode makes NCCL sum in one order, by variables that also choose
        protocols. There is nothing to sum with one rank, and the bridge's broadcast waits for ever
        if the trainer's NCCL has chosen another protocol.
        """
        restore_nccl(_NCCL)
        return super().lockstep_setup(share_storage)


if TYPE_CHECKING:

    def _checked(worker: DeterministicWorker) -> messages.DeterministicWorker:
        return worker
