"""The trainer's view of a vLLM server: its routes for the bridge, with deadlines and errors that say what to do."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import torch

from example_trainer.http_client import direct_client
from example_trainer.weight_bridge.base import BridgeError, LeaseLost
from vllm_patching.manifest import Manifest, dtype_name, mismatches
from vllm_patching.writers import Writer, this_process

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_QUICK_SECONDS = 2.0

LEASE_LOST = 410
"""The HTTP status of a server that has given the update up, or that refuses a lease."""


class ServerSilent(BridgeError):
    """There was no answer: whether the server has heard is not known."""


Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Whole shape and dtype name of each of the trainer's parameters, by name."""


class BridgeServer:
    """Speaks HTTP to one server."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        api_key: str | None = None,
        startup_timeout: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        weight_epoch: int = 0,
    ) -> None:
        """
        Args:
            host, port: where vllm_api_server.py listens.
            timeout: seconds for each phase of an update.
            api_key: bearer token, if the server asks for one.
            startup_timeout: seconds for the server to be there at first, and to come back; by default the same as `timeout`.
            sleep: how to wait between two questions; may raise to end the wait.
            weight_epoch: this trainer's life: Unix milliseconds of its start, and more than any before it of the same run.
        """
        self.url = f"http://{host}:{port}"
        self.timeout = timeout
        self._startup_timeout = timeout if startup_timeout is None else startup_timeout
        self._sleep, self._weight_epoch = sleep, weight_epoch
        self._lease: str | None = None
        self._instance: str | None = None
        self._said_away = False
        # The server answers within its own deadline; the margin lets its explanation arrive before ours.
        self._client = direct_client(self.url, timeout + 10, api_key)

    @property
    def longest_wait(self) -> float:
        """Seconds after which any of the methods has returned or raised."""
        return self._startup_timeout + self.timeout + 15

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
                    self._instance, self._said_away = info["instance"], False
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
            self._sleep(0.5)

    def init(
        self,
        mode: str,
        shapes: Shapes,
        master_addr: str = "localhost",
        master_port: int = 1,
        key: str = "",
        transfer: str = "auto",
        events: Sequence[str] = (),
        writers: Sequence[Writer] = (),
    ) -> dict[str, Any]:
        """Join the server as a new epoch.

        Returns:
            instance, epoch, key, data_backend, transfer, weight_version and follows_writes.

        Raises:
            BridgeError: the server refuses, or is not the one whose layout was asked for.
        """
        body = {
            "trainer": f"trainer {socket.gethostname()}:{os.getpid()}",
            "mode": mode,
            "master_addr": master_addr,
            "master_port": master_port,
            "key": key,
            "transfer": transfer,
            "weight_epoch": self._weight_epoch,
            "events": list(events),
            "writers": [writer.to_json() for writer in writers or [this_process()]],
            "parameters": shapes,
        }
        answer = self.post("init", body)
        self.require_same(answer["instance"], "the server that was joined")
        return answer

    def require_same(self, instance: str, what: str) -> None:
        """Raise BridgeError unless `instance` is that of the server which has answered /bridge/info last, if one has."""
        if self._instance not in (None, instance):
            raise BridgeError(
                f"{what} is instance {instance}, and {self.url} was instance {self._instance} when asked for its layout: "
                "it was restarted meanwhile, or another server is mixed up with it; start the trainer again with --resume auto"
            )

    def pause(self, epoch: int, version: int) -> dict[str, Any]:
        """Have the server stand still. Returns its lease: `deadline` says until when may be written (see `require_in_time`)."""
        self._lease = None
        lease: dict[str, Any] = self.post("pause", {"epoch": epoch, "version": version})["lease"]
        self._lease = lease["id"]
        return lease

    def commit(self, epoch: int, version: int, checksums: Sequence[str]) -> dict[str, Any]:
        """Have the server check the new weights and serve them; hands in the lease, if there is one. Returns its answer."""
        body = {"epoch": epoch, "version": version, "checksums": list(checksums), "lease": self._lease, "resume": True}
        answer = self.post("commit", body)
        self._lease = None
        return answer

    def post(self, step: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST /bridge/<step>.

        Raises:
            LeaseLost: the server has given this update up, or the lease shown does not count any more.
            BridgeError: the server refused (with its reason), or did not answer in time.
        """
        what = f"/bridge/{step}" + (f" of version {body['version']}" if "version" in body else "")
        try:
            response = self._client.post(f"/bridge/{step}", json=body)
        except httpx.TransportError as error:
            raise ServerSilent(
                f"{self.url} did not answer {what} ({str(error) or type(error).__name__}); see the server's log, "
                "restart it if it has ended, then start the trainer again with --resume auto"
            ) from error
        if response.status_code != 200:
            kind = LeaseLost if response.status_code == LEASE_LOST else BridgeError
            raise kind(f"{self.url} refused {what}: {_reason(response)}")
        answer: dict[str, Any] = response.json()
        return answer

    def abort(self, epoch: int, reason: str) -> bool:
        """Tell the server at once that an update will not be finished, and give the lease back: without it the server gives the
        update up at its deadline, and serves nothing for as long as this process lives and might still write.

        Call when nothing of this trainer is on the way to the server's memory any more.

        Returns:
            whether the server has heard it.
        """
        try:
            self.post("abort", {"epoch": epoch, "reason": reason, "lease": self._lease})
        except ServerSilent as error:
            logger.warning("[Bridge] could not call the update off and give the lease back: %s", error)
            return False
        except BridgeError as error:
            logger.warning("[Bridge] there was nothing to call off: %s", error)
        self._lease = None
        return True

    def give_up(self, epoch: int, error: Exception) -> BridgeError:
        """Call an update off because of `error`. Returns that error with what the server says, and what it serves now."""
        why = self.worker_error()
        self.abort(epoch, str(error))
        state = self._state()
        if state is None:
            outcome = "the server does not answer"
        elif state["healthy"]:
            outcome = f"the server keeps version {state['weight_version']}"
        else:
            outcome = "the server is unhealthy until a full update succeeds"
        return BridgeError(f"{error} ({why or 'the server reports no error'}); {outcome}; --resume auto goes on from here")

    def worker_error(self) -> str:
        """What the server says went wrong with the present update; empty if nothing, or if it cannot be asked."""
        state = self._state()
        return "the server does not answer /bridge/state" if state is None else str(state["last_error"])

    def lost_update(self, epoch: int) -> str:
        """Why the server will not go on with the update of this epoch; empty while it will."""
        state = self._state()
        if state is None:
            return "the server does not answer"
        if state["instance"] != self._instance:
            return "the server was restarted"
        if state["engine_dead"]:
            return "vLLM's engine process has died"
        if state["epoch"] != epoch:
            return f"{state['trainer']} has taken over as epoch {state['epoch']}"
        return "" if state["target_version"] is not None else f"the server gave it up: {state['last_error']}"

    def has_restarted(self) -> bool:
        """Whether another process than the one joined answers here, ready to be joined. Does not wait."""
        state = self._state()
        if state is None and not self._said_away:
            logger.warning("[Bridge] the vLLM server at %s does not answer; start it again, it will get the weights", self.url)
            self._said_away = True
        return state is not None and state["instance"] != self._instance

    def wait_for_restart(self, message: str) -> bool:
        """After an update failed: whether the server has gone and come back. Waits for it if it is away.

        Args:
            message: logged if it is away.

        Raises:
            BridgeError: it did not come back in time.
        """
        state = self._state()
        if state is not None and not state["engine_dead"]:
            return bool(state["instance"] != self._instance)
        logger.warning("%s", message)
        before = self._instance
        deadline = time.monotonic() + self._startup_timeout
        while True:
            self.wait_for_info()
            if self._instance != before:
                return True
            # The old process still answers though its engine is dead: it is about to end.
            if time.monotonic() > deadline:
                raise BridgeError(f"vLLM's engine behind {self.url} has died, and the server was not restarted; restart it")
            self._sleep(0.5)

    def _state(self) -> dict[str, Any] | None:
        """GET /bridge/state; None if there is no such answer now."""
        try:
            response = self._client.get("/bridge/state", timeout=_QUICK_SECONDS)
            state = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError) as error:
            logger.debug("no answer to /bridge/state: %s", error)
            return None
        return state if isinstance(state, dict) else None

    def close(self) -> None:
        self._client.close()


def require_in_time(lease: Mapping[str, Any]) -> None:
    """Look at the clock, which is the server's too, right before a write.

    Args:
        lease: as BridgeServer.pause returns it.

    Raises:
        LeaseLost: the server does not expect a write any more.
    """
    late = time.monotonic() - lease["deadline"]
    if late > 0:
        raise LeaseLost(
            f"the server's lease ran out {late:.1f} s before the weights were written: this trainer was stopped or held up "
            "(its --bridge-timeout and the server's are the time it has)"
        )


def manifests_of(info: dict[str, Any]) -> list[Manifest]:
    """The manifests in /bridge/info, by rank."""
    return [Manifest.from_json(rank) for rank in info["ranks"]]


def served_dtype(info: dict[str, Any]) -> torch.dtype:
    """The dtype in which the server of /bridge/info holds its weights."""
    return manifests_of(info)[0].entries[0].torch_dtype


def shapes_of(parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Shapes:
    """Shapes with the dtypes' names, as they are told to the server."""
    return {name: (shape, dtype_name(dtype)) for name, (shape, dtype) in parameters.items()}


def check_layout(info: dict[str, Any], shapes: Shapes) -> int:
    """Compare the server's parameters with the model's.

    Returns:
        The number of parameters mapped: all of them, or an error is raised.

    Raises:
        BridgeError: names the parameters that differ and both values.
    """
    for manifest in manifests_of(info):
        problems = mismatches(manifest, shapes)
        if problems:
            shown = "; ".join(problems[:5]) + ("; …" if len(problems) > 5 else "")
            raise BridgeError(
                f"{len(problems)} parameter(s) differ between the trainer and vLLM rank {manifest.tp_rank}, which serves "
                f"{info['model']}: {shown}. Start both with the same model."
            )
    mapped = len({entry.shard.name for manifest in manifests_of(info) for entry in manifest.entries} & shapes.keys())
    logger.info("[Bridge] Mapped %d/%d params from vLLM to trainer", mapped, len(shapes))
    return mapped


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return f"{response.status_code} {response.text[:200]}"
    if isinstance(body, dict):
        return str(body.get("error") or body.get("detail") or body)
    return str(body)
