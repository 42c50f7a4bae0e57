"""The trainer's view of a vLLM server: its routes for the bridge, with deadlines and errors that say what to do."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

import httpx
import torch

from example_trainer.weight_bridge.base import BridgeError
from vllm_patching.manifest import Manifest, dtype_name, mismatches

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0


class BridgeServer:
    """Speaks HTTP to one server."""

    def __init__(
        self, host: str, port: int, timeout: float, api_key: str | None = None, startup_timeout: float | None = None
    ) -> None:
        """
        Args:
            host, port: where vllm_api_server.py listens.
            timeout: seconds for each phase of an update.
            api_key: bearer token, if the server asks for one.
            startup_timeout: seconds for the server to be there at first; by default the same as `timeout`.
        """
        self.url = f"http://{host}:{port}"
        self.timeout = timeout
        self._startup_timeout = timeout if startup_timeout is None else startup_timeout
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The server answers within its own deadline; the margin lets its explanation arrive before ours.
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout + 10)

    def wait_for_info(self) -> dict[str, Any]:
        """GET /bridge/info, waiting for a server that is still loading.

        Raises:
            BridgeError: it is not there after the deadline, or it is there and does not share its weights.
        """
        deadline = time.monotonic() + self._startup_timeout
        next_log = time.monotonic() + 1
        while True:
            try:
                response = self._client.get("/bridge/info", timeout=5)
                if response.status_code == 200:
                    info: dict[str, Any] = response.json()
                    return info
                if response.status_code == 404:
                    raise BridgeError(
                        f"{self.url} is a server without /bridge routes; start it with "
                        "`python example_trainer/vllm_api_server.py`, or train with --weight-bridge-mode none"
                    )
                if response.status_code != 503:
                    raise BridgeError(f"{self.url} refuses the bridge: {_reason(response)}")
                reason = _reason(response)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise BridgeError(
                    f"no vLLM server at {self.url} after {self._startup_timeout:g} s ({reason}); start it "
                    "(`VLLM_ENABLE_SHARED_WEIGHTS=1 python -u example_trainer/vllm_api_server.py --model …`), or correct "
                    "--vllm-host and --vllm-port, or wait longer with --service-timeout"
                )
            if time.monotonic() >= next_log:
                logger.info("[Bridge] Waiting for the vLLM server at %s (%s)", self.url, reason)
                next_log = time.monotonic() + _LOG_EVERY_SECONDS
            time.sleep(0.5)

    def init(self, mode: str, model: torch.nn.Module, master_addr: str, master_port: int) -> dict[str, Any]:
        """Join the server as a new epoch. Returns epoch, world_size, data_backend and weight_version."""
        parameters = {name: (list(p.shape), dtype_name(p.dtype)) for name, p in model.named_parameters()}
        trainer = f"trainer {socket.gethostname()}:{os.getpid()}"
        body = {
            "trainer": trainer,
            "mode": mode,
            "master_addr": master_addr,
            "master_port": master_port,
            "parameters": parameters,
        }
        return self.post("init", body)

    def post(self, step: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST /bridge/<step>.

        Raises:
            BridgeError: the server refused (with its reason), or did not answer in time.
        """
        what = f"/bridge/{step}" + (f" of version {body['version']}" if "version" in body else "")
        try:
            response = self._client.post(f"/bridge/{step}", json=body)
        except httpx.TransportError as error:
            raise BridgeError(
                f"{self.url} did not answer {what} ({str(error) or type(error).__name__}); see the server's log, "
                "restart it if it has ended, then start the trainer again with --resume auto"
            ) from error
        if response.status_code != 200:
            raise BridgeError(f"{self.url} refused {what}: {_reason(response)}")
        answer: dict[str, Any] = response.json()
        return answer

    def abort(self, epoch: int, reason: str) -> None:
        """Tell the server at once that an update will not be finished; without it the server notices at its deadline."""
        try:
            self.post("abort", {"epoch": epoch, "reason": reason})
        except BridgeError as error:
            logger.warning("[Bridge] could not call the update off, the server gives it up at its deadline: %s", error)

    def worker_error(self) -> str:
        """What the server says went wrong with the present update; empty if nothing, or if it cannot be asked."""
        try:
            state = self._client.get("/bridge/state", timeout=5).json()
        except (httpx.HTTPError, ValueError) as error:
            return f"the server does not answer /bridge/state ({error})"
        return str(state.get("last_error", ""))

    def close(self) -> None:
        self._client.close()


def manifests_of(info: dict[str, Any]) -> list[Manifest]:
    """The manifests in /bridge/info, by rank."""
    return [Manifest.from_json(rank) for rank in info["ranks"]]


def served_dtype(info: dict[str, Any]) -> torch.dtype:
    """The dtype in which the server of /bridge/info holds its weights."""
    return manifests_of(info)[0].entries[0].torch_dtype


def check_layout(info: dict[str, Any], model: torch.nn.Module) -> tuple[int, int]:
    """Compare the server's parameters with the model's.

    Returns:
        (parameters mapped, parameters of the model); equal, or an error is raised.

    Raises:
        BridgeError: names the parameters that differ and both values.
    """
    mine = {name: (tuple(p.shape), dtype_name(p.dtype)) for name, p in model.named_parameters()}
    for manifest in manifests_of(info):
        problems = mismatches(manifest, mine)
        if problems:
            shown = "; ".join(problems[:5]) + ("; …" if len(problems) > 5 else "")
            raise BridgeError(
                f"{len(problems)} parameter(s) differ between the trainer and vLLM rank {manifest.tp_rank}, which serves "
                f"{info['model']}: {shown}. Start both with the same model."
            )
    mapped = len({entry.shard.name for manifest in manifests_of(info) for entry in manifest.entries} & mine.keys())
    logger.info("[Bridge] Mapped %d/%d params from vLLM to trainer", mapped, len(mine))
    return mapped, len(mine)


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return f"{response.status_code} {response.text[:200]}"
    if isinstance(body, dict):
        return str(body.get("error") or body.get("detail") or body)
    return str(body)
