"""Two copies of the weights: the trainer sends its own to every rank of every server, NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from example_trainer.errors import BridgeError
from example_trainer.models.shards import Shards
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.base import LeaseLost, SyncReport, WeightBridge, Weights, timed
from example_trainer.weight_bridge.handshake import ServerSession
from example_trainer.weight_bridge.send_plan import distinct_layouts
from example_trainer.weight_bridge.server import BridgeServer, Shapes, require_finite, served_dtype, shapes_of
from example_trainer.weight_bridge.slices import WeightSlices
from vllm_patching.protocol.checksum import WeightSummary
from vllm_patching.protocol.manifest import Manifest, dtype_name
from vllm_patching.transport.addresses import RendezvousError, rendezvous_address
from vllm_patching.transport.rendezvous import host_store
from vllm_patching.transport.shared_memory import gpu_uuid

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class BroadcastBridge(WeightBridge):
    """Sends each rank of each server the shards that it holds, one server after the other.

    A server that is killed and started again is found, and gets the weights of the present version before it serves. A float32
    model is rounded to the server's dtype.
    """

    converts = True

    def __init__(
        self, servers: BridgeServer | Sequence[BridgeServer], transfer: str = "auto", ranks: Ranks | None = None
    ) -> None:
        """
        Args:
            servers: one or several that serve the same model.
            transfer: `direct` into the live weights of a paused server; `overlapped`, beside them while it generates; `auto`
                overlaps where the server's GPUs have room for a second copy.
            ranks: the trainer's processes, if it has several.
        """
        self._ranks = ranks or Ranks()
        given = [servers] if isinstance(servers, BridgeServer) else list(servers)
        self._sessions = [ServerSession(server, number, self._ranks) for number, server in enumerate(given)]
        self._transfer = transfer
        self._model: torch.nn.Module | None = None
        self._shapes: Shapes = {}  # as sent to the server that was joined last
        self._device = torch.device("cpu")
        self._address = ("", 0)
        self._store: torch.distributed.TCPStore | None = None
        self._slices: dict[str, WeightSlices] = {}
        self._version = 0

    def serving_dtype(self) -> torch.dtype | None:
        for session in self._sessions:
            session.ask()
        return served_dtype(self._sessions[0].info)

    def layouts(self) -> tuple[tuple[Manifest, ...], ...]:
        return distinct_layouts(session.manifests for session in self._sessions)

    def connect(self, model: torch.nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        hosts = [str(urlsplit(session.server.url).hostname) for session in self._sessions]
        # Rank 0's: another machine's way to the servers may begin at another address.
        host, port = self._ranks.on_main("finding the rendezvous", lambda: _translate(lambda: rendezvous_address(hosts)))
        self._address = (host, port)
        timeout = self._sessions[0].server.timeout
        # Rank 0 hosts the store: the others come after it.
        if self._ranks.is_main:
            self._store = _translate(lambda: host_store(*self._address, timeout))
        self._ranks.barrier("opening the rendezvous with vLLM")
        if not self._ranks.is_main:
            self._store = _translate(lambda: host_store(*self._address, timeout, is_host=False))
        for session in self._sessions:
            self._join(session)

    def sync(self, version: int, write_weights: Callable[[], None], masters: Weights | None = None) -> SyncReport:
        """See WeightBridge.sync. The model's weights are this process's own, so they are written before any server pauses."""
        seconds: dict[str, float] = {}
        with timed(seconds, "write"):
            write_weights()
        self._version = version
        summaries = self._pack(seconds)
        reports = [self._deliver(session, version, summaries, seconds) for session in self._sessions]
        return SyncReport(
            version=version,
            checksum=reports[0].checksum,
            bytes_moved=sum(report.bytes_moved for report in reports),
            seconds=seconds,
            first_byte_to_verified=max(report.first_byte_to_verified for report in reports),
            server_seconds=reports[-1].server_seconds,
        )

    def server_restarted(self) -> bool:
        return any([session.server.has_restarted() for session in self._sessions])  # a list: each says that it is away

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """See WeightBridge.keep_serving. The model's weights are the present ones already."""
        for session in self._sessions:
            if not self._ranks.on_main("looking for restarted servers", session.server.has_restarted):
                continue
            logger.warning("[Bridge] %s was restarted: sending it version %d", session.server.url, self._version)
            seconds: dict[str, float] = {}
            self._join(session)
            self._update(session, self._version, self._pack(seconds), seconds)

    def close(self) -> None:
        for session in self._sessions:
            session.leave()
            session.server.close()

    def _join(self, session: ServerSession) -> None:
        assert self._store is not None
        assert self._model is not None
        session.ask()
        self._shapes = _as_sent(self._model, session.info)
        self.params_mapped, self.params_total = session.compare(self._shapes), len(self._shapes)
        if self._device.type != session.info["device"]:
            raise BridgeError(
                f"vLLM's weights are on {session.info['device']}, the trainer's on {self._device.type}; "
                f"start the trainer with --device {session.info['device']}"
            )
        if self._device.type == "cuda":
            own = gpu_uuid(self._device)
            self._ranks.together("comparing the GPUs with vLLM's", lambda: session.check_gpus(own))
        parameters = dict(self._model.named_parameters())
        whole = self._ranks.world_size == 1
        for rank in session.mine:
            manifest = session.manifests[rank]
            if manifest.digest() not in self._slices:
                self._slices[manifest.digest()] = WeightSlices(manifest, parameters, whole, self._device)
        session.join(self._shapes, *self._address, self._store, self._device, self._transfer)
        self.joins += 1

    def _pack(self, seconds: dict[str, float]) -> dict[str, WeightSummary]:
        """Put together what will be sent, and sum it up. Returns the summaries by layout, of every rank's share."""
        assert self._model is not None
        shards = getattr(self._model, "shards", None) or Shards()
        with timed(seconds, "pack"):
            wanted = {name for slices in self._slices.values() for name in slices.packed_names}
            for name, parameter in self._model.named_parameters():
                if self._ranks.world_size == 1 and name not in wanted:
                    continue
                full = shards.whole(name, shards.local(parameter))  # collective: also a rank that sends nothing takes part
                for slices in self._slices.values():
                    slices.pack(name, full)
        with timed(seconds, "checksum"):
            mine = [(digest, slices.summary()) for digest, slices in self._slices.items()]
            rows = [[digest, summary.checksum, summary.not_finite] for digest, summary in mine]
            of_all = self._ranks.gather(rows, "summing up the weights")
            return {digest: WeightSummary(checksum, bad) for rows in of_all for digest, checksum, bad in rows}

    def _deliver(
        self, session: ServerSession, version: int, summaries: dict[str, WeightSummary], seconds: dict[str, float]
    ) -> SyncReport:
        """Update one server; if it turns out to have been restarted, or this trainer to have been late, do so anew."""
        server = session.server
        try:
            if not session.joined:
                self._join(session)
            return self._update(session, version, summaries, seconds)
        except BridgeError as error:
            waiting = f"[Bridge] {error}; looking whether the server was restarted"
            if self._ranks.on_main(
                "asking vLLM", lambda: session.server.wait_for_restart(waiting), session.server.longest_wait
            ):
                why = "was restarted"
            elif isinstance(error, LeaseLost):
                why = "did not wait for this trainer"
            else:
                raise
            logger.warning("[Bridge] %s %s: joining it again to send version %d", server.url, why, version)
        self._join(session)
        return self._update(session, version, self._pack(seconds), seconds)

    def _update(
        self, session: ServerSession, version: int, summaries: dict[str, WeightSummary], seconds: dict[str, float]
    ) -> SyncReport:
        found = [summaries[manifest.digest()] for manifest in session.manifests]
        slices = {rank: self._slices[session.manifests[rank].digest()] for rank in session.mine}
        spoilt = next((summary.not_finite for summary in found if summary.not_finite), "")
        require_finite(spoilt, version)
        on_main, longest = self._ranks.on_main, session.server.longest_wait
        with timed(seconds, "begin"):
            on_main("beginning vLLM's update", lambda: session.begin(version), longest)
        first_byte = time.perf_counter()
        with timed(seconds, "transfer"):
            try:
                self._ranks.together("sending the weights", lambda: session.send(version, slices), longest)
            except BridgeError as error:
                session.joined = False
                if not self._ranks.is_main:
                    raise
                raise session.server.give_up(session.epoch, error) from error
        with timed(seconds, "commit"):
            try:
                answer = on_main(
                    "committing on vLLM",
                    lambda: session.commit(version, [s.checksum for s in found]),
                    session.server.longest_wait,
                )
            except LeaseLost as error:
                if self._ranks.is_main:
                    session.server.abort(session.epoch, str(error))
                raise
        return SyncReport(
            version=version,
            checksum=found[0].checksum,
            bytes_moved=session.num_bytes,
            first_byte_to_verified=time.perf_counter() - first_byte - answer["seconds"]["resume"],
            server_seconds=answer["seconds"],
        )


def _translate(step: Callable[[], _T]) -> _T:
    try:
        return step()
    except RendezvousError as error:
        raise BridgeError(str(error)) from error


def _as_sent(model: torch.nn.Module, info: dict[str, Any]) -> Shapes:
    """What a server of this /bridge/info is told of the parameters. If all are float32, they are sent in its own dtype."""
    shapes = shapes_of(model)
    if any(parameter.dtype is not torch.float32 for parameter in model.parameters()):
        return shapes
    served = dtype_name(served_dtype(info))
    return {name: (shape, served) for name, (shape, _) in shapes.items()}
