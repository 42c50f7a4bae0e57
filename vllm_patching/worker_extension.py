"""What each vLLM worker can do for the bridge, called on the worker's main thread through collective_rpc.

vLLM imports this module in the worker before it builds the model and adds the class to the worker's bases, so every method
is prefixed: the names share one space with vLLM's own.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from vllm_patching.checksum import weights_checksum
from vllm_patching.compat import keep_cpu_weights_plain, worker_logger
from vllm_patching.distributed_utils import Rendezvous
from vllm_patching.manifest import Manifest, ManifestEntry, dtype_name, flat_layout, flat_views, local_view
from vllm_patching.sharding import ModelGeometry, plan_shards
from vllm_patching.shared_memory import export_cuda_ipc, export_to_shared_memory
from vllm_patching.weight_updater import WeightUpdater

logger = worker_logger("lockstep.worker")

keep_cpu_weights_plain()


class LayoutError(RuntimeError):
    """The parameters that vLLM built are not the ones that the sharding plan expects."""


class LockstepWorkerExtension:
    """Mixed into vLLM's worker. Attributes are made by lockstep_setup, since vLLM never calls an __init__ of ours."""

    def lockstep_setup(self, share_storage: bool) -> dict[str, Any]:
        """Find the parameters, check them against the plan, open them for sharing and start the updater thread.

        Args:
            share_storage: also export the storage, for a single-copy trainer (moves CPU weights into shared memory).

        Returns:
            {"manifest", "handles" or None, "checksum", "host_pid"}
        """
        model = self.get_model()  # type: ignore[attr-defined]  # unwrapped, whatever vLLM has put around it
        parameters = dict(model.named_parameters())
        # With a tied head vLLM may list the embedding a second time under the head's name.
        for name in ("lm_head.weight",):
            if name in parameters and parameters[name] is parameters.get("model.embed_tokens.weight"):
                del parameters[name]
        rank, size = _tensor_parallel()
        geometry = ModelGeometry.from_hf_config(self.vllm_config.model_config.hf_config.to_dict())  # type: ignore[attr-defined]
        manifest = build_manifest(geometry, parameters, rank, size)
        self._lockstep_parameters = parameters
        self._lockstep_manifest = manifest
        self._lockstep_layout, _ = flat_layout(manifest)
        device = next(iter(parameters.values())).device
        handles = None
        if share_storage:
            if device.type == "cuda":
                handles = export_cuda_ipc(parameters)
            else:
                handles = export_to_shared_memory(parameters, f"tp{rank}")
        logger.info("[vLLM Patch] ✓ Exported %d params", len(manifest.entries))
        self._lockstep_updater = WeightUpdater(manifest, device, logger)
        self._lockstep_updater.start()
        return {"manifest": manifest.to_json(), "handles": handles, "checksum": self.lockstep_checksum(), "pid": os.getpid()}

    def lockstep_join(self, host: str, port: int, epoch: int, world_size: int, data_backend: str, timeout: float) -> None:
        """Have the updater thread meet the trainer. Returns at once."""
        rank = 1 + self._lockstep_manifest.tp_rank
        self._lockstep_updater.join(Rendezvous(host, port, epoch, rank, world_size, data_backend, timeout))

    def lockstep_receive(self, version: int) -> None:
        """Have the updater thread receive the weights of `version` into staging. Returns at once."""
        self._lockstep_updater.receive(version)

    def lockstep_status(self) -> dict[str, Any]:
        """The updater thread's status, with the rank."""
        return {"tp_rank": self._lockstep_manifest.tp_rank, **self._lockstep_updater.status.to_json()}

    def lockstep_verify_staged(self, version: int) -> dict[str, Any]:
        """Checksum of what is staged and whether all of it is finite, without touching a live parameter."""
        status = self._lockstep_updater.status
        if status.staged_version != version or self._lockstep_updater.staging is None:
            return {
                "tp_rank": self._lockstep_manifest.tp_rank,
                "error": f"version {status.staged_version} is staged, not {version}",
            }
        staged = list(flat_views(self._lockstep_updater.staging, self._lockstep_layout))
        bad = _first_not_finite((item.name, tensor) for item, tensor in staged)
        return {
            "tp_rank": self._lockstep_manifest.tp_rank,
            "checksum": weights_checksum((item.name, tensor) for item, tensor in staged),
            "error": f"{bad} holds NaN or infinity" if bad else "",
        }

    def lockstep_commit(self) -> dict[str, Any]:
        """Copy what is staged into the live parameters; returns their checksum and the seconds it took."""
        assert self._lockstep_updater.staging is not None
        started = time.perf_counter()
        with torch.no_grad():
            for item, tensor in flat_views(self._lockstep_updater.staging, self._lockstep_layout):
                local_view(item, self._lockstep_parameters[item.name].data).copy_(tensor)
        self._lockstep_updater.discard()
        checksum = self.lockstep_checksum()
        return {"tp_rank": self._lockstep_manifest.tp_rank, "checksum": checksum, "seconds": time.perf_counter() - started}

    def lockstep_discard(self) -> None:
        """Forget what is staged."""
        self._lockstep_updater.discard()

    def lockstep_checksum(self) -> str:
        """Checksum of the live parameters. On a GPU it first waits for every write made through another process."""
        if next(iter(self._lockstep_parameters.values())).is_cuda:
            torch.cuda.synchronize()
        return weights_checksum(
            (item.name, local_view(item, self._lockstep_parameters[item.name].data)) for item in self._lockstep_layout
        )

    def lockstep_first_not_finite(self) -> str:
        """Name of the first live parameter with NaN or infinity in it, or an empty string."""
        return _first_not_finite((name, parameter.data) for name, parameter in self._lockstep_parameters.items())


def build_manifest(geometry: ModelGeometry, parameters: dict[str, torch.nn.Parameter], tp_rank: int, tp_size: int) -> Manifest:
    """The manifest of a rank, after checking that vLLM built exactly the parameters that the plan names.

    Raises:
        LayoutError: a parameter is missing, unexpected, of another shape or not contiguous; all differences are named.
    """
    specs = {spec.name: spec for spec in plan_shards(geometry, tp_rank, tp_size)}
    problems = [f"{name} is planned but vLLM has no such parameter" for name in specs.keys() - parameters.keys()]
    problems += [f"{name} is in vLLM but not planned" for name in parameters.keys() - specs.keys()]
    for name in specs.keys() & parameters.keys():
        if tuple(parameters[name].shape) != specs[name].shape:
            problems.append(f"{name} is planned as {specs[name].shape}, vLLM has {tuple(parameters[name].shape)}")
        elif not parameters[name].is_contiguous():
            problems.append(f"{name} is not contiguous in vLLM")
    if problems:
        raise LayoutError(
            f"rank {tp_rank}: {len(problems)} of {len(specs)} parameters cannot be mapped: {'; '.join(sorted(problems)[:8])}"
        )
    entries = (
        ManifestEntry(spec, dtype_name(parameters[name].dtype), str(parameters[name].device)) for name, spec in specs.items()
    )
    return Manifest(tp_rank, tp_size, tuple(entries))


def _first_not_finite(named: Any) -> str:
    for name, tensor in named:
        if not bool(torch.isfinite(tensor).all()):
            return str(name)
    return ""


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
