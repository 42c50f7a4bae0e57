"""How a trainer meets one vLLM server: layouts are compared, an epoch begins, and groups are formed to send weights over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.server import BridgeServer, Shapes, check_layout, manifests_of
from example_trainer.weight_bridge.slices import WeightSlices
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.transport.groups import SENDER, BridgeGroups, Rendezvous

logger = logging.getLogger(__name__)


class ServerSession:
    """One server: its layout, and a pair of groups with each of its ranks that this trainer process sends to.

    vLLM's rank r is sent to by the trainer's rank r modulo their number; the others only help to put the weights together.
    """

    def __init__(self, server: BridgeServer, number: int, ranks: Ranks) -> None:
        """
        Args:
            server: what rank 0 asks; the other ranks do not use it.
            number: of this server among the trainer's; separates their keys in the store.
        """
        self.server = server
        self.manifests: list[Manifest] = []
        self.info: dict[str, Any] = {}
        self.num_bytes = 0
        self.epoch = 0
        self.transfer = ""
        self.joined = False
        self._cohort = ""
        self._number, self._attempts = number, 0
        self._ranks = ranks
        self._groups: dict[int, BridgeGroups] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def mine(self) -> list[int]:
        """vLLM's ranks that this process sends to."""
        return [m.tp_rank for m in self.manifests if m.tp_rank % self._ranks.world_size == self._ranks.rank]

    def ask(self) -> None:
        """Ask the server what it holds, into `info` and `manifests`. Collective."""
        self.info = self._ranks.on_main("asking the vLLM server", self.server.wait_for_info, self.server.longest_wait)
        self.manifests = manifests_of(self.info)

    def compare(self, shapes: Shapes) -> int:
        """Compare with what the server holds (`ask`). Returns the number of parameters mapped, which is all of them."""
        self.num_bytes = sum(item.num_bytes for manifest in self.manifests for item in flat_layout(manifest)[0])
        return check_layout(self.info, shapes)

    def join(
        self, shapes: Shapes, host: str, port: int, store: torch.distributed.TCPStore, device: torch.device, transfer: str
    ) -> None:
        """Begin an epoch and form the groups.

        Args:
            shapes: of the trainer's parameters.
            host, port, store: the trainer's store, and where it is.
            device: this process's.
            transfer: auto, direct or overlapped.
        """
        self.leave()
        self._attempts += 1
        key = f"server{self._number}.{self._attempts}"
        answer = self._ranks.on_main(
            "joining the vLLM server",
            lambda: self.server.init("broadcast", shapes, transfer),
            self.server.longest_wait,
        )
        self.epoch, self.transfer = answer["epoch"], answer["transfer"]
        self._cohort = f"{key}/epoch{self.epoch}"
        self._ranks.on_main(
            "forming a cohort with vLLM",
            lambda: self.server.cohort(self.epoch, host, port, self._cohort, members=1),
            self.server.longest_wait,
        )

        def form() -> None:
            for rank in self.mine:
                place = Rendezvous(
                    host, port, f"{self._cohort}/rank{rank}", self.epoch, rank, answer["data_backend"], self.server.timeout
                )
                self._groups[rank] = self._meet(place, store, device)
                if device.type == "cuda":
                    self._streams[rank] = torch.cuda.Stream(device)

        self._ranks.together("forming the groups with vLLM", form, self.server.longest_wait)
        self.joined = True

    def begin(self, version: int) -> None:
        """Begin an update; the server receives from then on, beside its weights or (direct) into them, standing still."""
        self.server.begin(self.epoch, version, self._cohort)

    def send(self, version: int, slices: Mapping[int, WeightSlices]) -> None:
        """Send this process's share of the weights. Returns when they have arrived.

        Raises:
            BridgeError: they have not; the groups must be formed anew.
        """
        rank = -1
        try:
            # Part by part in turns, so that several ranks receive at the same time.
            longest = max((len(slices[rank].parts) for rank in self.mine), default=0)
            for index in range(longest):
                for rank in self.mine:
                    weights = slices[rank]
                    if index < len(weights.parts):
                        with self._stream(rank):
                            self._groups[rank].broadcast(weights.tensors(*weights.parts[index]))
            for rank in self.mine:
                with self._stream(rank):
                    self._groups[rank].finish(self._lost)
        except RuntimeError as error:
            self.joined = False
            # The one that was being sent to, or waited for: the others have done their part so far.
            raise BridgeError(
                f"sending version {version} to vLLM rank {rank} of {self.server.url} failed: {str(error).splitlines()[0]}"
            ) from error

    def commit(self, version: int, checksums: Sequence[str]) -> dict[str, Any]:
        """Have the server check and take over what it received, and serve it. Returns its answer."""
        return self.server.commit(self.epoch, version, checksums)

    def check_gpus(self, own: str) -> None:
        """Refuse what NCCL would refuse in the first transfer, with a message that few understand.

        Args:
            own: UUID of the GPU that this process sends from.

        Raises:
            BridgeError: one of vLLM's ranks that it sends to is on that GPU.
        """
        for rank in self.mine:
            if self.info["gpu_uuids"][rank] == own:
                raise BridgeError(
                    f"vLLM rank {rank} of {self.server.url} and the trainer that sends to it are on the same GPU ({own}), "
                    "between which NCCL cannot send; share one copy (--single-copy instead of --use-shared-memory), or put the "
                    "trainer on another GPU (--device cuda:N or CUDA_VISIBLE_DEVICES)"
                )

    def leave(self) -> None:
        """Drop the groups; the server keeps what it has."""
        for groups in self._groups.values():
            groups.close()
        self._groups, self.joined = {}, False

    def _stream(self, rank: int) -> Any:
        return torch.cuda.stream(self._streams[rank]) if rank in self._streams else nullcontext()

    def _lost(self) -> str:
        """Why the server will not receive any more; empty while it may. Only rank 0 can ask."""
        return self.server.lost_update(self.epoch) if self._ranks.is_main else ""

    def _meet(self, place: Rendezvous, store: torch.distributed.TCPStore, device: torch.device) -> BridgeGroups:
        """Form the groups in a thread: NCCL's own waits have no deadline."""
        result: list[BridgeGroups | BaseException] = []

        def form() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                result.append(BridgeGroups(place, store, device, SENDER))
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                result.append(error)

        thread = threading.Thread(target=form, name="bridge rendezvous", daemon=True)
        thread.start()
        thread.join(self.server.timeout + 5)
        outcome = result[0] if result else None
        if isinstance(outcome, BridgeGroups):
            return outcome
        why = self.server.worker_error() if self._ranks.is_main else ""
        raise BridgeError(
            f"vLLM rank {place.tp_rank}'s weight updater thread did not join epoch {place.epoch} at {place.host}:{place.port} "
            f"within {self.server.timeout:g} s ({outcome or 'still waiting'}; server: {why or 'no error'}). "
            "Look for `Weight updater thread started` and for errors in the server's log."
        )
