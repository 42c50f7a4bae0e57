"""One copy of the weights: the trainer's parameters are views on the memory that vLLM reads.

The server stands still from before the first write until it has checked the last one. So what can
be done before is done before (the sums of what will be written). On a GPU the server is asked to
check as soon as the writes are enqueued. Its check waits for them on the GPU, while the question
travels.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import LeaseLost, SyncReport, WeightBridge, Weights
from example_trainer.weight_bridge.server import (
    BridgeServer,
    Shapes,
    check_layout,
    manifests_of,
    require_finite,
    require_in_time,
    require_layout,
    served_dtype,
    shapes_of,
    timed,
)
from example_trainer.weight_bridge.turns import Turns, require_turns
from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.protocol.manifest import FlatSlice, Manifest, flat_layout, local_view
from vllm_patching.protocol.messages import Writer, this_process
from vllm_patching.transport.shared_memory import (
    SharedMemoryError,
    gpu_uuid,
    open_handles,
    share_event,
)

logger = logging.getLogger(__name__)

_MOST_MASTER_SUMS = 4
"""Places in memory that the masters may take turns in; making the sums of a new place takes longer
than computing them."""


class SingleCopyBridge(WeightBridge):
    """The optimizer writes into vLLM's own storage, while the server is paused.

    A trainer of several ranks has one for each of vLLM's: each writes the storage of the rank with
    its own number.

    A server that is killed and started again is found; the parameters become views on the new
    server's memory.
    """

    def __init__(
        self,
        server: BridgeServer,
        ranks: Ranks | None = None,
        colocate: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            server: what rank 0 asks; the other ranks do not use it.
            ranks: the trainer's processes, if it has several.
            colocate: take turns with the server.
            device: that this rank will compute on, if it is known before the model is there.
        """
        self._server, self._planned_device = server, device
        self._ranks = ranks or Ranks()
        self._turns = Turns(server, self._ranks) if colocate else None
        self._manifests: list[Manifest] = []
        self._served_model = ""
        self._model: torch.nn.Module | None = None
        self._shapes: Shapes = {}
        self._sums: WeightSums | None = None
        self._layout: list[FlatSlice] = []
        self._master_sums: dict[tuple[int, ...], WeightSums] = {}
        self._written: torch.cuda.Event | None = None
        self._server_follows = False
        self._owes_lease = False
        self._device = torch.device("cpu")
        self._epoch = 0
        self._version = 0
        self._checks: list[Callable[[str, dict[str, Any]], None]] = []
        self._kernels: Mapping[str, str] | None = None

    def serving_dtype(self) -> torch.dtype | None:
        """See WeightBridge.serving_dtype.

        Refuses a server whose memory this trainer could not train in.
        """
        info = self._ask()

        def check() -> None:
            handles = read_handles(info, self._server.url, self._ranks.rank)
            if self._planned_device is not None:
                require_gpu(
                    str(handles.get("gpu_uuid") or ""), self._planned_device, self._ranks.rank
                )

        self._ranks.together("looking for vLLM's memory", check)
        self._manifests, self._served_model = manifests_of(info), str(info["model"])
        if any(info.get("gpu_uuids", ())):
            self.server_share = info.get("gpu_memory_utilization")
        return served_dtype(info)

    def require(self, check: Callable[[str, dict[str, Any]], None]) -> None:
        self._checks.append(check)

    def require_kernels(
        self, kernels: Mapping[str, str], check: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._kernels = kernels
        self.require(check)

    def require_shapes(self, shapes: Shapes) -> None:
        require_layout(self._manifests, shapes, f", which serves {self._served_model}")

    def turn(self, write_weights: Callable[[], None]) -> AbstractContextManager[None]:
        if self._turns is None:
            return nullcontext()
        return self._turns.taken(lambda: self._epoch, lambda: self.keep_serving(write_weights))

    @property
    def turn_figures(self) -> Mapping[str, float]:  # type: ignore[override]
        return self._turns.figures if self._turns is not None else {}

    def connect(self, model: torch.nn.Module) -> None:
        self._model = model
        self._shapes = shapes_of(model)
        self._attach()

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        """See WeightBridge.sync. `write_weights` runs while the server is paused: nothing samples
        from half-written weights.

        A trainer that was delayed for longer than the server waits repeats the update once.
        """
        self._version = version
        try:
            return self._update(version, write_weights, masters)
        except BridgeError as error:
            hangs = f"[Bridge] {error}; waiting for vLLM's engine"
            hung = self._ranks.on_main(
                "waiting for vLLM",
                lambda: self._server.wait_for_engine(hangs),
                self._server.longest_wait,
            )
            waiting = f"[Bridge] {error}; looking whether the server was restarted"
            if self._ranks.on_main(
                "asking vLLM",
                lambda: self._server.wait_for_restart(waiting),
                self._server.longest_wait,
            ):
                logger.warning(
                    "[Bridge] %s was restarted: joining it again to give it version %d",
                    self._server.url,
                    version,
                )
                self._attach()
            elif (hung or isinstance(error, LeaseLost)) and not self._owes_lease:
                logger.warning("[Bridge] %s: doing the update to version %d again", error, version)
            else:
                raise
        return self._update(version, write_weights, masters)

    def server_restarted(self) -> bool:
        return self._server.has_restarted()

    def server_trouble(self) -> str:
        return self._server.why_not_serving()

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """See WeightBridge.keep_serving."""
        if self._ranks.on_main("looking for a restarted server", self._server.has_restarted):
            logger.warning(
                "[Bridge] %s was restarted: giving it version %d", self._server.url, self._version
            )
            self._attach()
            self._update(self._version, write_weights)

    def close(self) -> None:
        self._server.close()

    def _attach(self) -> None:
        """Make the parameters views on the server's memory.

        Their earlier values are not carried over.
        """
        assert self._model is not None
        info = self._ask()
        if self._checks:
            self._ranks.on_main("checking the vLLM server", lambda: self._check(info))
        self.params_mapped, self.params_total = check_layout(info, self._shapes), len(self._shapes)
        layout, _ = flat_layout(manifests_of(info)[self._ranks.rank])
        parameters = dict(self._model.named_parameters())
        shared = self._ranks.together("opening vLLM's memory", lambda: self._open(info, parameters))
        self._join(next(iter(shared.values())).device)
        for name, parameter in parameters.items():
            # A trainer of one rank holds the vocabulary without vLLM's padding, which is below it.
            parameter.data = shared[name].narrow(0, 0, parameter.shape[0])
        self._layout, self._master_sums = layout, {}
        self._sums = WeightSums(
            [(item.name, local_view(item, shared[item.name])) for item in layout]
        )
        self._sums.all()  # compiles the kernel now, and not while the server waits
        self.joins += 1
        logger.info(
            "[Bridge] ✓ Single copy: the trainer's %d parameters are vLLM's own memory",
            self.params_mapped,
        )

    def _check(self, info: dict[str, Any]) -> None:
        """Raise BridgeError if a check refuses the server that answers now."""
        for check in self._checks:
            try:
                check(self._server.url, info)
            except TrainerError as error:
                raise BridgeError(str(error)) from error

    def _join(self, device: torch.device) -> None:
        """Begin an epoch; on a GPU the server gets an event of each rank's, which its checks wait
        for.
        """
        self._device, handle = device, ""
        if device.type == "cuda":
            self._written, handle = share_event(device)
        handles = [
            text for text in self._ranks.gather(handle, "sharing an event with vLLM") if text
        ]
        # Every rank writes, and the server must know of each whether it has ended.
        told = self._ranks.gather(this_process().to_json(), "naming the writers to vLLM")
        writers = [Writer.from_json(process) for process in told]
        if self._owes_lease:
            self._give_back("the trainer joins again")
        answer = self._post(
            "init",
            lambda: self._server.init(
                "single_copy", self._shapes, events=handles, writers=writers, kernels=self._kernels
            ),
        )
        self._epoch, self._server_follows = answer["epoch"], answer["follows_writes"]

    def _open(
        self, info: dict[str, Any], parameters: dict[str, torch.nn.Parameter]
    ) -> dict[str, torch.Tensor]:
        """The storage of vLLM's rank of this rank's number."""
        handles = read_handles(info, self._server.url, self._ranks.rank)
        device = next(iter(parameters.values())).device
        try:
            shared = open_handles(handles)
        except SharedMemoryError as error:
            raise BridgeError(str(error)) from error
        require_gpu(str(handles.get("gpu_uuid") or ""), device, self._ranks.rank)
        for name, parameter in parameters.items():
            if (
                shared[name].shape[1:] != parameter.shape[1:]
                or shared[name].shape[0] < parameter.shape[0]
            ):
                raise BridgeError(
                    f"{name}: shape {tuple(parameter.shape)} on the trainer's rank {self._ranks.rank}, "
                    f"{tuple(shared[name].shape)} on vLLM's; start both with the same model"
                )
        return shared

    def _ask(self) -> dict[str, Any]:
        info = self._ranks.on_main(
            "asking the vLLM server", self._server.wait_for_info, self._server.longest_wait
        )
        require_one_replica(info, self._server.url)
        size = self._ranks.world_size
        if info["tp_degree"] != size:
            command = f"`torchrun --nproc-per-node {info['tp_degree']} example_trainer/grpo.py …`"
            require_ranks(
                info,
                size,
                f"this trainer has {size}",
                f"start it without torchrun, or with {command}",
            )
        if self._turns is not None:
            self.lent_bytes = require_turns(info, self._server.url)
        return info

    def _post(self, step: str, post: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let rank 0 send a step to the server; every rank gets the answer, or the error."""
        return self._ranks.on_main(
            f"{step} of the vLLM server's update", post, self._server.longest_wait
        )

    def _update(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        if self._sums is None:
            raise BridgeError("connect() must come before sync()")
        seconds: dict[str, float] = {}
        found: list[tuple[str, str]] = []
        before = None if masters is None else self._sums_of(masters)
        if before is not None:
            with timed(seconds, "checksum"):
                found = self._summary(before)
        require_finite(next((name for _, name in found if name), ""), version)
        self._owes_lease = True
        try:
            with timed(seconds, "begin"):
                lease = self._post("begin", lambda: self._server.begin(self._epoch, version) or {})
            first_byte = time.perf_counter()
            with timed(seconds, "write"):
                self._ranks.together(
                    "writing the weights", lambda: self._write(write_weights, lease)
                )
            if before is None:
                with timed(seconds, "checksum"):
                    found = self._summary(self._sums)
            checksums = [checksum for checksum, _ in found]
            with timed(seconds, "commit"):
                answer = self._post(
                    "commit", lambda: self._server.commit(self._epoch, version, checksums)
                )
        except BaseException as error:
            self._give_back(f"version {version}: {error or type(error).__name__}")
            raise
        self._owes_lease = False
        return SyncReport(
            version=version,
            checksum=checksums[0],
            bytes_moved=0,
            seconds=seconds,
            first_byte_to_verified=time.perf_counter() - first_byte - answer["seconds"]["resume"],
            server_seconds=answer["seconds"],
        )

    def _give_back(self, reason: str) -> None:
        """Promise the server that nothing of any rank is on the way to its memory any more.
        Collective. If that cannot be confirmed, the lease stays out until these processes have
        ended, and the server serves nothing until then.
        """
        try:
            self._ranks.together("finishing the writes", self._finish_writes)
            heard = self._ranks.on_main(
                "giving the lease back",
                lambda: self._server.abort(self._epoch, reason),
                self._server.longest_wait,
            )
            self._owes_lease = not heard
        except (TrainerError, RuntimeError) as error:
            logger.warning(
                "[Bridge] the server's lease could not be given back, it waits for this trainer's end: %s",
                error,
            )

    def _finish_writes(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, write_weights: Callable[[], None], lease: Mapping[str, Any]) -> None:
        require_in_time(lease)
        write_weights()
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self._device))
            if not self._server_follows:
                self._written.synchronize()

    def _summary(self, sums: WeightSums) -> list[tuple[str, str]]:
        """(checksum, name of a parameter that is not finite) of every rank."""
        mine = sums.all()
        return [
            (c, n)
            for c, n in self._ranks.gather(
                [mine.checksum, mine.not_finite], "summing up the weights"
            )
        ]

    def _sums_of(self, masters: Weights) -> WeightSums | None:
        """Over what will be written, as it will be: in the order, the parts and the dtype of the
        server's. None if the masters are not all there, on the weights' device. A CPU would take
        longer to sum up what an optimizer keeps in host memory. The server stands still for less
        time, while it sums the written weights.
        """
        here = {
            item.name
            for item in self._layout
            if item.name in masters and masters[item.name].device == self._device
        }
        if any(item.name not in here for item in self._layout):
            return None
        named = [(item.name, local_view(item, masters[item.name])) for item in self._layout]
        place = tuple(tensor.data_ptr() for _, tensor in named)
        if place not in self._master_sums:
            if len(self._master_sums) == _MOST_MASTER_SUMS:
                self._master_sums.clear()
            self._master_sums[place] = WeightSums(named, rounded=self._layout[0].dtype)
        return self._master_sums[place]


def require_one_replica(info: Mapping[str, Any], url: str) -> None:
    """Raise BridgeError if the server of /bridge/info has several replicas."""
    if info.get("replicas", 1) != 1:
        raise BridgeError(
            f"vLLM at {url} has {info['replicas']} replicas (--data-parallel-size), and a single "
            "copy is the memory of one. Train with --use-shared-memory (broadcast), or start it "
            "without that flag"
        )


def require_ranks(info: Mapping[str, Any], ranks: int, reason: str, remedy: str) -> None:
    """Raise BridgeError unless the trainer has a rank for each of vLLM's.

    Args:
        info: the server's /bridge/info.
        ranks: the trainer has, or can have, so many.
        reason: where that number comes from.
        remedy: what to do.
    """
    if info["tp_degree"] != ranks:
        raise BridgeError(
            f"single copy needs one trainer rank for each of vLLM's {info['tp_degree']} ranks, "
            f"and {reason}: {remedy}, or train with --use-shared-memory (broadcast), for any "
            "number of ranks"
        )


def require_gpu(theirs: str, device: torch.device, rank: int) -> None:
    """Raise BridgeError unless a trainer rank computes on the GPU of vLLM's rank of the same
    number.

    Args:
        theirs: UUID of vLLM's GPU; empty if vLLM computes on the CPU.
        device: the trainer's.
    """
    mine = gpu_uuid(device)
    if theirs != mine:
        raise BridgeError(
            f"the weights of vLLM's rank {rank} are on "
            f"{f'GPU {theirs}' if theirs else 'the CPU'}, and trainer rank {rank} computes on "
            f"{device}{f', which is {mine}' if mine else ''}. Give both equal "
            "CUDA_VISIBLE_DEVICES (a trainer of one rank can also be given --device cuda:N)"
        )


def read_handles(info: dict[str, Any], url: str, rank: int) -> dict[str, Any]:
    """The storage handles of one of vLLM's ranks from the server's config file, which only this
    user on this machine reads.

    Raises:
        BridgeError: the file does not exist, or it is another server's, whose memory this trainer
            must not open.
    """
    path = Path(info["config_path"])
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BridgeError(
            f"cannot read {path}, where {url} (host {info['hostname']}) keeps the handles of its weights: {error}. "
            "Single copy needs the trainer on the server's machine and under its user; use --use-shared-memory otherwise."
        ) from error
    if not isinstance(config, dict) or config.get("instance") != info["instance"]:
        other = (
            f"instance {config.get('instance')}, port {config.get('port')}"
            if isinstance(config, dict)
            else "no server"
        )
        raise BridgeError(
            f"{path} is of another server ({other}) than {url} (instance {info['instance']}, host "
            f"{info['hostname']}), whose memory must not be written. If that one was restarted "
            "just now, start the trainer again with --resume auto. If it runs on another "
            "machine, use --use-shared-memory (broadcast)"
        )
    handles: dict[str, Any] = config["ranks"][rank]["handles"]
    return handles
