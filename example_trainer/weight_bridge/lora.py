"""Hands adapters to running servers: a folder in PEFT's format for each version, and a request to
serve it.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from atroposlib.utils.files import cannot_write, remedy
from example_trainer.errors import BridgeError
from example_trainer.models import Decoder
from example_trainer.models.lora.peft_format import AdapterWriter, WrittenAdapter
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.vllm_client import ServerRefused, ServerSilent
from example_trainer.weight_bridge.base import SyncReport, WeightBridge, Weights
from example_trainer.weight_bridge.server import (
    Shapes,
    WeightServer,
    as_served,
    manifests_of,
    require_layout,
    served_dtype,
)
from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.protocol.manifest import dtype_name, flat_layout, source_view

logger = logging.getLogger(__name__)

SERVING_FOLDER = "serving"
_HOST = socket.gethostname()


class LoraServer(WeightServer):
    """The /lora routes of one server.

    Attributes:
        serves: name of the adapter that this trainer has loaded last; None before the first, and of
            a server that lost it.
        joins: how many times it got an adapter while it had none.
    """

    serves: str | None = None
    joins: int = 0

    def wait_for_info(self) -> dict[str, Any]:
        """GET /lora/info, waiting for a server that is still loading.

        Raises:
            BridgeError: it is not there after the deadline, or it is there and takes no adapters.
        """
        start = "`python -u example_trainer/vllm_api_server.py --model … --enable-lora`"
        return self.wait_for("/lora/info", "LoRA", start)

    def load(self, folder: Path, version: int, checksum: str) -> dict[str, Any]:
        """Have the adapter in `folder` served. Waits for a server that is away.

        Returns:
            name, seconds by phase, and `paths_in_use`: the folders that must stay.

        Raises:
            BridgeError: the server refused, with its reason, or did not answer.
        """
        body = {
            "path": str(folder),
            "version": version,
            "checksum": checksum,
            "weight_epoch": self.weight_epoch,
        }
        what = f"the adapter of version {version}"
        try:
            try:
                answer = self.call("/lora/load", body | {"replaces": self.serves}, what)
            except ServerSilent as error:
                logger.warning(
                    "[Bridge] %s did not answer (%s): waiting for it to be there again",
                    self.url,
                    error.__cause__,
                )
                self.wait_for_info()
                self.serves = None
                answer = self.call("/lora/load", body | {"replaces": None}, what)
        except ServerRefused as error:
            if error.status != 400 or "cannot read" not in str(error):
                raise
            raise BridgeError(
                f"{error}; trainer and server must see the same --save-path: the same machine, or a file system that both mount"
            ) from error
        self.joins += self.serves is None
        self.serves = answer["name"]
        return answer

    def has_lost_adapter(self) -> bool:
        """Return whether the server answers and serves no adapter, as after a restart. Does not
        wait.

        Raises:
            BridgeError: it serves another trainer's adapter.
        """
        status = self.watch("/lora/status", "the adapter")
        if status is None:
            return False
        current = status["current"]
        if isinstance(current, dict) and current["name"] != self.serves:
            raise BridgeError(
                f"{self.url} serves {current['name']}, which is not of this trainer, so two "
                "trainers share a server. Stop the other one, or give this one servers of its own"
            )
        return current is None


class LoraBridge(WeightBridge):
    """Writes each version's adapters into a folder of its own and has every server load it.

    Args:
        servers: each serves the base model with --enable-lora.
        settings: of the adapters.
        folder: where folders of adapters are made; servers must see it under the same path.
        base_model: id or folder of the base model.
    """

    def __init__(
        self, servers: Sequence[LoraServer], settings: LoraSettings, folder: Path, base_model: str
    ) -> None:
        self._servers, self._settings, self._base_model = servers, settings, base_model
        self._folder = folder.resolve() / SERVING_FOLDER
        self._infos: list[dict[str, Any]] = []
        self._writer: AdapterWriter | None = None
        self._mine: list[Path] = []
        self._last: tuple[Path, int, WrittenAdapter] | None = None

    def serving_dtype(self) -> torch.dtype:
        self._infos = [server.wait_for_info() for server in self._servers]
        dtypes = {served_dtype(info) for info in self._infos}
        if len(dtypes) != 1:
            raise BridgeError(
                f"the vLLM servers hold {' and '.join(sorted(map(str, dtypes)))}; give all the same --dtype"
            )
        dtype = dtypes.pop()
        self.converts = dtype is torch.float16  # which a trainer does not compute in
        return dtype

    def require_shapes(self, shapes: Shapes) -> None:
        for server, info in zip(self._servers, self._infos, strict=True):
            _require_rank(server.url, info, self._settings)
            sent = as_served(shapes, served_dtype(info)) if self.converts else shapes
            require_layout(
                manifests_of(info), sent, f" of {server.url}, which serves {info['model']}"
            )

    def connect(self, model: torch.nn.Module) -> None:
        assert isinstance(model, Decoder)
        infos = self._infos or [server.wait_for_info() for server in self._servers]
        for server, info in zip(self._servers, infos, strict=True):
            _require_rank(server.url, info, self._settings)
        compared = [
            _check_base(server.url, info, model, self._base_model)
            for server, info in zip(self._servers, infos, strict=True)
        ]
        self._writer = AdapterWriter(model, self._settings, self._base_model)
        self.params_mapped = self.params_total = self._writer.num_tensors
        logger.info(
            "[Bridge] LoRA: %d tensors, %.1f MB, on a base model %s",
            self._writer.num_tensors, self._writer.num_bytes / 1e6,
            "that is equal on both sides, bit for bit" if all(compared) else "of the same shapes on both sides",
        )  # fmt: skip

    def sync(
        self, version: int, write_weights: Callable[[], None], masters: Weights | None = None
    ) -> SyncReport:
        assert self._writer is not None, "connect first"
        started = time.perf_counter()
        write_weights()
        rounded = time.perf_counter()
        folder = self._folder / f"v{version}-{_HOST}.{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            written = self._writer.write(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            reason = cannot_write(folder, error, self._writer.num_bytes)
            raise BridgeError(f"{reason}; {remedy(error, 'change --save-path')}") from error
        self._mine.append(folder)
        on_disk = time.perf_counter()
        self._last = (folder, version, written)
        answers = [
            self._load(server, folder, version, written.checksum) for server in self._servers
        ]
        loaded = time.perf_counter()
        self._remove_unused({Path(path) for answer in answers for path in answer["paths_in_use"]})
        return SyncReport(
            version=version,
            checksum=written.checksum,
            bytes_moved=written.num_bytes * len(self._servers),
            seconds={
                "write_weights": rounded - started,
                "write_file": on_disk - rounded,
                "load": loaded - on_disk,
            },
            first_byte_to_verified=loaded - rounded,
            server_seconds=answers[-1]["seconds"],
        )

    def server_restarted(self) -> bool:
        return self._last is not None and any(
            [server.has_lost_adapter() for server in self._servers]
        )

    def server_trouble(self) -> str:
        return " ".join(why for server in self._servers if (why := server.why_not_serving()))

    def keep_serving(self, write_weights: Callable[[], None]) -> None:
        """See WeightBridge.keep_serving. The adapter of the present version is on the disk."""
        if self._last is None:
            return
        folder, version, written = self._last
        for server in self._servers:
            if server.has_lost_adapter():
                logger.warning(
                    "[Bridge] %s was restarted: it gets the adapter of version %d again",
                    server.url,
                    version,
                )
                server.serves = None
                self._load(server, folder, version, written.checksum)

    def _load(
        self, server: LoraServer, folder: Path, version: int, checksum: str
    ) -> dict[str, Any]:
        answer = server.load(folder, version, checksum)
        self.joins = sum(server.joins for server in self._servers)
        return answer

    def close(self) -> None:
        # The folders of the last adapters stay: the servers may still serve them. A later trainer
        # removes them.
        for server in self._servers:
            server.close()

    def _remove_unused(self, in_use: set[Path]) -> None:
        unused = [folder for folder in self._mine[:-1] if folder not in in_use]
        if len(self._mine) == 1:
            unused += [folder for folder in _abandoned(self._folder) if folder not in in_use]
        for folder in unused:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning(
                    "[Bridge] could not remove %s, which no server uses any more: %s", folder, error
                )
        self._mine = [folder for folder in self._mine if folder not in unused]


def _abandoned(serving: Path) -> list[Path]:
    """Folders of trainers on this machine that have ended."""
    found = []
    for folder in serving.iterdir():
        _, _, rest = folder.name.partition("-")
        owner, _, _ = rest.rpartition("-")
        host, _, process = owner.rpartition(".")
        if host == _HOST and process.isdigit() and not Path(f"/proc/{process}").exists():
            found.append(folder)
    return found


def _require_rank(url: str, info: dict[str, Any], settings: LoraSettings) -> None:
    """Raise BridgeError if the server does not take adapters of this rank."""
    if settings.rank > info["max_rank"]:
        raise BridgeError(
            f"--lora-r {settings.rank}, and {url} takes ranks up to {info['max_rank']}; start it with a larger --max-lora-rank"
        )


def _check_base(url: str, info: dict[str, Any], model: Decoder, name: str) -> bool:
    """Compare the server's base model with the trainer's: names, shapes, dtypes, and every bit of
    every weight.

    The bits of a float16 server are compared with a float32 model only. A bfloat16 model holds
    other values of the checkpoint.

    Returns:
        whether the bits were compared.

    Raises:
        BridgeError: names what differs.
    """
    parameters = {
        name: p.detach() for name, p in model.named_parameters() if ".adapters." not in name
    }
    shapes = {name: (tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items()}
    served = served_dtype(info)
    narrower = served is torch.float16
    require_layout(
        manifests_of(info),
        as_served(shapes, served) if narrower else shapes,
        f" of {url}, which serves {info['model']}",
    )
    if narrower and next(iter(parameters.values())).dtype is not torch.float32:
        logger.warning(
            "[Bridge] %s holds the base model in float16, and this trainer in bfloat16. They "
            "differ by rounding, and their bits are not compared (--dtype float32 compares them)", url
        )  # fmt: skip
        return False
    for rank, (manifest, theirs) in enumerate(
        zip(manifests_of(info), info["base_checksums"], strict=True)
    ):
        layout, _ = flat_layout(manifest)
        mine = weights_checksum(
            (item.name, source_view(item, parameters[item.name]).to(item.dtype)) for item in layout
        )
        if mine != theirs:
            raise BridgeError(
                f"the weights of --model-name {name} (checksum {mine}) differ from "
                f"{info['model']}, which {url} serves (rank {rank}: {theirs}). The adapter would "
                "be trained on another model than it is served on. Start both with the same "
                "model."
            )
    return True
