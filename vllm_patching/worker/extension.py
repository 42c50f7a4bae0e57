"""What each vLLM worker can do for the bridge, called on the worker's main thread through collective_rpc.

vLLM imports this module in the worker before it builds the model and adds the class to the worker's bases, so every method
is prefixed: the names share one space with vLLM's own.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from vllm_patching.compat.cpu_weights import keep_cpu_weights_plain
from vllm_patching.compat.engine import replica_of
from vllm_patching.compat.loggers import worker_logger
from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name, flat_layout, local_view
from vllm_patching.protocol.sharding import ModelGeometry, plan_shards
from vllm_patching.transport.cohort import CohortPlace
from vllm_patching.transport.shared_memory import (
    SharedMemoryError,
    export_cuda_ipc,
    export_to_shared_memory,
    open_event,
    reached_in_time,
)
from vllm_patching.worker.first_step import FirstStep
from vllm_patching.worker.turns import TurnsWorkerExtension, prepare_worker
from vllm_patching.worker.updater import WeightUpdater

logger = worker_logger("lockstep.worker")

STAGING_MARGIN = 1 << 30
"""Bytes of GPU memory that a staging buffer must leave free for whatever vLLM still allocates."""
LEAVE_SECONDS = 2.0
"""How long a trainer that joins waits for the memory that the one before it needed here."""

keep_cpu_weights_plain()
prepare_worker()


class LayoutError(RuntimeError):
    """The parameters that vLLM built are not the ones that the sharding plan expects."""


class LockstepWorkerExtension(TurnsWorkerExtension):
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
        device = next(iter(parameters.values())).device
        handles = None
        if share_storage:
            if device.type == "cuda":
                handles = export_cuda_ipc(parameters)
            else:
                handles = export_to_shared_memory(parameters, f"tp{rank}")
        logger.info("[vLLM Patch] ✓ Exported %d params", len(manifest.entries))
        self._lockstep_rank = rank
        self._lockstep_replica = replica_of(self.vllm_config)  # type: ignore[attr-defined]
        self._lockstep_device = device
        layout, num_bytes = flat_layout(manifest)
        live = [(item.name, local_view(item, parameters[item.name].data)) for item in layout]
        self._lockstep_live = [tensor for _, tensor in live]
        self._lockstep_sums = WeightSums(live)
        self._lockstep_written: torch.cuda.Event | None = None
        self._lockstep_writer = ("", 0.0)
        self._lockstep_updater = WeightUpdater(rank, layout, num_bytes, live, logger)
        self._lockstep_updater.start()
        self._lockstep_first_step = FirstStep(self)
        return {
            "manifest": manifest.to_json(),
            "handles": handles,
            "checksum": self.lockstep_check()["checksum"],
            "pid": os.getpid(),
        }

    def lockstep_room(self) -> dict[str, Any]:
        """Bytes that a staging buffer needs, and bytes free for one (None on a CPU, where memory is not the question)."""
        updater = self._lockstep_updater
        free = None
        if self._lockstep_device.type == "cuda":
            free = torch.cuda.mem_get_info(self._lockstep_device)[0] - STAGING_MARGIN
        return {"needed": 0 if updater.staging is not None else updater.num_bytes, "free": free}

    def lockstep_aim(self, direct: bool) -> None:
        """Choose where transfers go from now on: into the live parameters, or into a staging buffer. Leaves the cohort that the
        updater thread is in. Returns at once.
        """
        self._lockstep_updater.aim_at(direct)

    def lockstep_cohort(
        self, host: str, port: int, key: str, members: int, index: int, lanes: int, epoch: int, backend: str, timeout: float
    ) -> None:
        """Have the updater thread leave its cohort and join another. Returns at once.

        Args:
            host, port: of the trainer's store.
            key: names this forming of the cohorts.
            members: receivers of each cohort: replicas of every server; 0: only leave.
            index: of the first of this server's replicas among them.
            lanes: senders to each rank, at most.
            epoch, backend, timeout: see CohortPlace.
        """
        if not members:
            self._lockstep_updater.leave(keep_staging=True)
            return
        place = CohortPlace(
            host, port, key, members, index + self._lockstep_replica, lanes, self._lockstep_rank, epoch, backend, timeout
        )
        self._lockstep_updater.join_cohort(place)

    def lockstep_leave(self) -> None:
        """Have the updater thread leave its trainer and give its staging buffer back: the next one writes by itself."""
        self._lockstep_updater.leave()
        self._lockstep_updater.wait(LEAVE_SECONDS)

    def lockstep_receive(self, version: int) -> None:
        """Have the updater thread receive the weights of `version`. Returns at once."""
        if self._lockstep_device.type == "cuda":
            torch.cuda.synchronize()  # a direct transfer must not overtake a step that still reads the old weights
        self._lockstep_first_step.watch()
        self._lockstep_updater.receive(version)

    def lockstep_status(self, patience: float = 0.0) -> dict[str, Any]:
        """The updater thread's status, the rank and whether the trainer has ended; waits up to `patience` seconds for the
        thread's command to end.
        """
        updater = self._lockstep_updater
        status = updater.wait(patience).to_json()
        who = {"tp_rank": self._lockstep_rank, "replica": self._lockstep_replica}
        return {**who, "trainer_gone": updater.trainer_gone(), **status}

    def lockstep_commit(self) -> dict[str, Any]:
        """Copy what is staged into the live parameters, and check those."""
        with torch.no_grad():
            torch._foreach_copy_(self._lockstep_live, self._lockstep_updater.staged())
        return self.lockstep_check()

    def lockstep_first_step(self) -> dict[str, Any]:
        """When this rank began its first step since weights were last received or checked (time.monotonic(), or None)."""
        return {"tp_rank": self._lockstep_rank, "began": self._lockstep_first_step.began}

    def lockstep_discard(self, patience: float) -> bool:
        """Forget what was received; a transfer in flight is called off. Returns whether it has ended by then."""
        return self._lockstep_updater.discard(patience)

    def lockstep_follow(self, events: list[str], trainer: str, seconds: float) -> str:
        """Have checks of what a trainer of a single copy wrote wait for what it has enqueued by the time that it asks for one.

        Args:
            events: handle of an event for each rank, which the trainer records behind its writes; none: nothing to wait for.
            trainer: for messages.
            seconds: that a check waits at most.

        Returns:
            empty, or why this rank cannot; then the trainer must wait itself before it asks.
        """
        self._lockstep_written, self._lockstep_writer = None, (trainer, seconds)
        try:
            if events:
                self._lockstep_written = open_event(events[self._lockstep_rank], self._lockstep_device)
        except SharedMemoryError as error:
            logger.warning("[vLLM Patch] rank %d: %s", self._lockstep_rank, error)
            return str(error)
        return ""

    def lockstep_check_written(self) -> dict[str, Any]:
        """As lockstep_check, behind the writes of the trainer that is followed.

        Its process may have been killed after it recorded its event and before its GPU came there. So the wait has an end, and
        `late` says then what did not come; the weights are not looked at.
        """
        trainer, seconds = self._lockstep_writer
        late = ""
        try:
            if self._lockstep_written is not None and not reached_in_time(self._lockstep_written, seconds):
                late = f"{trainer} has not finished its writes on the GPU within {seconds:g} s"
        except SharedMemoryError as error:
            late = f"whether {trainer} has finished its writes cannot be known: {error}"
        if late:
            # An answer and not an exception: vLLM would leave the other ranks' answers behind, for the next call to find.
            return {"tp_rank": self._lockstep_rank, "checksum": "", "not_finite": "", "late": late}
        return self.lockstep_check()

    def lockstep_check(self) -> dict[str, Any]:
        """Checksum of the live parameters and the first of them that holds NaN or infinity (or an empty string).

        On a GPU it comes after every step of the engine.
        """
        if self._lockstep_device.type == "cuda":
            torch.cuda.synchronize()
        summary = self._lockstep_sums.all()
        self._lockstep_first_step.watch()
        return {"tp_rank": self._lockstep_rank, "checksum": summary.checksum, "not_finite": summary.not_finite}


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


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
