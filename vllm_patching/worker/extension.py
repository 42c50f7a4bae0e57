"""The bridge's methods in each vLLM worker, called on its main thread through collective_rpc.

vLLM imports this module in the worker before it builds the model and adds the class to the worker's
bases. So every method is prefixed: the names share one space with vLLM's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_patching.compat.cpu_seeds import take_back_cpu_draws
from vllm_patching.compat.cpu_weights import keep_cpu_experts_plain, keep_cpu_weights_plain
from vllm_patching.compat.engine import replica_of
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.compat.model_loading import watch_processing
from vllm_patching.protocol.messages import BridgeWorker, Setup, TurnsWorker
from vllm_patching.transport.shared_memory import export_cuda_ipc, export_to_shared_memory, gpu_uuid
from vllm_patching.worker.model_layout import layout_of, learn_while_loading
from vllm_patching.worker.parameters import tensor_parallel
from vllm_patching.worker.receiving import WeightReceiver
from vllm_patching.worker.turns import TurnsWorkerExtension, prepare_worker

logger = worker_logger("lockstep.worker")

keep_cpu_weights_plain()
keep_cpu_experts_plain()
watch_processing(learn_while_loading)
take_back_cpu_draws()
prepare_worker()


class LockstepWorkerExtension(WeightReceiver, TurnsWorkerExtension):
    """Mixed into vLLM's worker.

    Attributes are made by lockstep_setup, since vLLM never calls an __init__ of ours.
    """

    def lockstep_setup(self, share_storage: bool) -> Setup:
        """Find the parameters, check them against the plan, open them for sharing and start the
        updater thread.

        Args:
            share_storage: also export the storage, for a single-copy trainer (moves CPU weights
                into shared memory).

        Returns:
            see Setup.
        """
        model = self.get_model()  # type: ignore[attr-defined]  # unwrapped, whatever vLLM has put around it
        config = self.vllm_config.model_config.hf_config  # type: ignore[attr-defined]
        layout = layout_of(model, config, *tensor_parallel())
        manifest, parameters = layout.manifest, layout.tensors
        rank = manifest.tp_rank
        device = next(iter(parameters.values())).device
        handles = None
        if share_storage:
            if device.type == "cuda":
                handles = export_cuda_ipc(parameters)
            else:
                handles = export_to_shared_memory(parameters, f"tp{rank}")
        logger.info("[vLLM Patch] ✓ Exported %d params", len(manifest.entries))
        self.lockstep_open(manifest, parameters, replica_of(self.vllm_config), logger)  # type: ignore[attr-defined]
        if layout.recompute is not None:
            self._lockstep_recompute = layout.recompute
        return {
            "manifest": manifest.to_json(),
            "handles": handles,
            "gpu_uuid": gpu_uuid(device),
            "checksum": self.lockstep_check()["checksum"],
            "recomputes": layout.recompute is not None,
        }


if TYPE_CHECKING:

    def _checked(worker: LockstepWorkerExtension) -> tuple[BridgeWorker, TurnsWorker]:
        return worker, worker
