"""A vLLM server's routes for the bridge, and the layout of its weights, which must be that of the
trainer's.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from atroposlib.web.addresses import host_and_port
from example_trainer.api_keys import revealed
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError
from example_trainer.models.shards import Shards
from example_trainer.process import StopSignal
from example_trainer.vllm_client import ServerRefused, ServerSilent, VLLMClient
from example_trainer.weight_bridge.base import LeaseLost
from example_trainer.weight_bridge.checkpoint_sources import Shapes, as_compared, held_tensors
from vllm_patching.protocol.manifest import Manifest, dtype_name, mismatches
from vllm_patching.protocol.messages import OCCUPIED, Route, Writer, this_process
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.weights.families import Geometry, parameters
from vllm_patching.weights.sharding import sources

logger = logging.getLogger(__name__)

_STATE_SECONDS = 2.0
"""For /bridge/state, which is asked in the middle of a transfer."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""Between two tries to join a server that another trainer occupies."""
_LOG_EVERY_SECONDS = 10.0

LEASE_LOST = 410
"""The HTTP status of a server that has given the update up, or that refuses a lease."""

Server = TypeVar("Server", bound="WeightServer")


class WeightServer(VLLMClient):
    """A server that weights or adapters are handed to, by its place.

    Attributes:
        weight_epoch: what they belong to, this trainer's life: Unix milliseconds of its start, and
            more than any before it of the same run.
    """

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
            timeout: seconds for each phase of an update, or for loading an adapter.
            api_key, startup_timeout, sleep: see VLLMClient.
            weight_epoch: see the class.
        """
        super().__init__(f"http://{host}:{port}", timeout, api_key, startup_timeout, sleep)
        self.weight_epoch = weight_epoch


class BridgeServer(WeightServer):
    """The /bridge routes of one server: its trainer, its weights, and the steps of an update."""

    role = "trainer"
    """The role of this process, for messages."""
    start_command = (
        "`VLLM_ENABLE_SHARED_WEIGHTS=1 python -u example_trainer/vllm_api_server.py --model …`"
    )
    instead = ", or train with --weight-bridge-mode none"
    """The remedies for a server that is not there."""
    _lease: str | None = None
    _instance: str | None = None

    def wait_for_info(self) -> dict[str, Any]:
        """GET /bridge/info, waiting for a server that is still loading.

        Raises:
            BridgeError: it is not there after the deadline, or it is there and does not share its
                weights.
        """
        info = self.wait_for("/bridge/info", "the bridge", self.start_command, self.instead)
        self._instance = info["instance"]
        return info

    def init(
        self,
        mode: str,
        shapes: Shapes,
        transfer: str = "auto",
        events: Sequence[str] = (),
        writers: Sequence[Writer] = (),
        kernels: Mapping[str, str] | None = None,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Join the server as a new epoch. Waits while another trainer's update, lease or turn is
        not over: the server ends them some time after that trainer was killed.

        Args:
            kernels: of a trainer in deterministic mode.
            may_wait: whether to wait, and to go on waiting.

        Returns:
            instance, epoch, transfer, weight_version, replicas and follows_writes.

        Raises:
            BridgeError: the server refuses, or is not the one whose layout was asked for, or is
                still occupied after `startup_timeout`.
        """
        body = {
            "trainer": f"{self.role} {socket.gethostname()}:{os.getpid()}",
            "mode": mode,
            "transfer": transfer,
            "weight_epoch": self.weight_epoch,
            "events": list(events),
            "writers": [writer.to_json() for writer in writers or [this_process()]],
            "parameters": shapes,
        }
        if kernels is not None:
            body["kernels"] = dict(kernels)
        answer = self._post_init(body, may_wait)
        self.require_same(answer["instance"], "the server that was joined")
        return answer

    def _post_init(self, body: dict[str, Any], may_wait: Callable[[], bool]) -> dict[str, Any]:
        """POST /bridge/init, again and again while another trainer occupies the server."""
        begun, next_log, pause = time.monotonic(), 0.0, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self.post("init", body)
            except ServerRefused as error:
                if error.status != OCCUPIED or not may_wait():
                    raise
                waited = time.monotonic() - begun
                if waited > self.startup_timeout:
                    raise BridgeError(
                        f"{error}; this was so for {self.startup_timeout:g} s (--service-timeout): end the "
                        "other trainer, then start this one again with --resume auto"
                    ) from error
                if waited >= next_log:
                    logger.warning(
                        "[Bridge] Waiting to join the %s at %s: %s", self.what, self.url, error
                    )
                    next_log = waited + _LOG_EVERY_SECONDS
            self.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def require_same(self, instance: str, what: str) -> None:
        """Raise BridgeError unless `instance` is that of the server which has answered /bridge/info
        last, if one has.
        """
        if self._instance not in (None, instance):
            raise BridgeError(
                f"{what} is instance {instance}, and {self.url} was instance {self._instance} "
                "when asked for its layout. It was restarted since, or another server is mixed "
                "up with it. Start the trainer again with --resume auto"
            )

    def cohort(
        self,
        epoch: int,
        meeting: Meeting | None = None,
        key: str = "",
        members: int = 0,
        index: int = 0,
        lanes: int = 1,
        route: Route = Route.GLOO,
    ) -> dict[str, Any]:
        """Have the server's ranks leave the lanes that they are in and, if there are members, meet
        a cohort. Answers at once.

        Args:
            meeting: the trainer's store; not needed to leave.
            key: the cohort's prefix in it.
            members: receivers in each lane, of all servers; 0: only leave.
            index: of this server's first replica among them.
            lanes: communicators for each of vLLM's ranks.
            route: how the weights travel in them.
        """
        at = (
            {}
            if meeting is None
            else {"host": meeting.host, "port": meeting.port, "secret": meeting.secret}
        )
        place = at | {
            "key": key,
            "members": members,
            "index": index,
            "lanes": lanes,
            "route": route,
        }
        return self.post("cohort", {"epoch": epoch, **place})

    def begin(self, epoch: int, version: int, cohort: str = "") -> dict[str, Any] | None:
        """Begin an update: the server's ranks receive from then on, or it stands still to be
        written.

        Args:
            cohort: key of the sending cohort; empty for a single copy.

        Returns:
            the server's lease, whose `deadline` ends the right to write (see `require_in_time`);
            None if it goes on generating (an overlapped transfer).
        """
        self._lease = None
        lease: dict[str, Any] | None = self.post(
            "begin", {"epoch": epoch, "version": version, "cohort": cohort}
        )["lease"]
        self._lease = None if lease is None else lease["id"]
        return lease

    def commit(self, epoch: int, version: int, checksums: Sequence[str]) -> dict[str, Any]:
        """Have the server check the new weights and serve them; hands in the lease, if there is
        one. Returns its answer.
        """
        body = {
            "epoch": epoch,
            "version": version,
            "checksums": list(checksums),
            "lease": self._lease,
        }
        answer = self.post("commit", body)
        self._lease = None
        return answer

    def quarantine(self, epoch: int, reason: str) -> None:
        """Have the server stand still and refuse every request until a full update.

        Raises BridgeError as `post` does.
        """
        self.post("quarantine", {"epoch": epoch, "reason": reason})

    def post(self, step: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST /bridge/<step>.

        Raises:
            LeaseLost: the server has given this update up, or the lease shown does not count any
                more.
            BridgeError: the server refused (with its reason), or did not answer in time.
        """
        what = f"/bridge/{step}" + (f" of version {body['version']}" if "version" in body else "")
        try:
            return self.call(f"/bridge/{step}", body, what)
        except ServerRefused as error:
            if error.status == LEASE_LOST:
                raise LeaseLost(str(error)) from error
            raise

    def abort(self, epoch: int, reason: str) -> bool:
        """Call an update off at the server at once, and give the lease back. Otherwise the server
        gives the update up only at its deadline. It serves nothing for as long as this process
        lives and might still write.

        Call when nothing of this trainer is on the way to the server's memory any more.

        Returns:
            whether the server has confirmed it.
        """
        try:
            self.post("abort", {"epoch": epoch, "reason": reason, "lease": self._lease})
        except ServerSilent as error:
            logger.warning(
                "[Bridge] could not call the update off and give the lease back: %s", error
            )
            return False
        except BridgeError as error:
            logger.warning("[Bridge] there was nothing to call off: %s", error)
        self._lease = None
        return True

    def has_restarted(self) -> bool:
        """Return whether another process than the joined one answers here, ready to be joined.

        Does not wait.
        """
        state = self.watch("/bridge/state", "the weights", _STATE_SECONDS)
        return state is not None and state["instance"] != self._instance

    def wait_for_engine(self, message: str) -> bool:
        """After an update failed: whether the server's engine hung. Waits until it goes on, or the
        server is gone.

        Args:
            message: logged if it hangs.

        Raises:
            BridgeError: it did not go on in time.
        """
        deadline, hung = time.monotonic() + self.startup_timeout, False
        while (state := self._state()) is not None and state.get("engine_trouble"):
            if not hung:
                logger.warning("%s: %s", message, state["engine_trouble"])
            hung = True
            if time.monotonic() > deadline:
                raise BridgeError(
                    f"{self.url} still after {self.startup_timeout:g} s: {state['engine_trouble']}"
                )
            self.sleep(0.5)
        return hung

    def wait_for_restart(self, message: str) -> bool:
        """After an update failed: whether the server has gone and come back. Waits for it if it is
        away.

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
        deadline = time.monotonic() + self.startup_timeout
        while True:
            self.wait_for_info()
            if self._instance != before:
                return True
            # The old process still answers though its engine is dead: it is about to end.
            if time.monotonic() > deadline:
                raise BridgeError(
                    f"vLLM's engine behind {self.url} has died, and the server was not restarted; restart it"
                )
            self.sleep(0.5)

    def _state(self) -> dict[str, Any] | None:
        """GET /bridge/state; None without an answer now."""
        return self.look("/bridge/state", _STATE_SECONDS)


class ParameterServer(BridgeServer):
    """The /bridge routes of a parameter server. They equal a vLLM server's."""

    what = "parameter server"
    options = "--parameter-servers"
    start_command = "`python -m example_trainer.parameter_server --model-name … --vllm-servers …`"
    instead = ", or train with --weight-bridge-mode shared_vllm"

    def wait_for_report(self) -> dict[str, Any]:
        """Return the report of deterministic mode of the first of its vLLM servers that answers,
        and that `server`'s address. Waits until one does.

        Raises:
            BridgeError: none does in time, or none is in that mode.
        """
        return self.wait_for(
            "/deterministic", "deterministic mode", self.start_command, self.instead
        )


def configured_servers(
    kind: Callable[..., Server],
    config: TrainerConfig,
    stop: StopSignal | None = None,
    weight_epoch: int = 0,
) -> list[Server]:
    """The vLLM servers or parameter servers that the options name; nothing is asked of them.

    Args:
        kind: BridgeServer or LoraServer, which take the same arguments.
        stop: ends the waits for a server.
        weight_epoch: see BridgeServer.
    """
    return [
        configured_server(kind, host, port, config, stop, weight_epoch)
        for host, port in list(map(host_and_port, config.parameter_servers))
        or config.vllm_addresses
    ]


def configured_server(
    kind: Callable[..., Server],
    host: str,
    port: int,
    config: TrainerConfig,
    stop: StopSignal | None,
    weight_epoch: int,
) -> Server:
    """Return the client of one server, with the deadlines and the key that the options give."""
    sleep: Callable[[float], None] = time.sleep
    if stop is not None:
        sleep = stop.wait
    key = revealed(config.vllm_api_key)
    return kind(host, port, config.bridge_timeout, key, config.service_timeout, sleep, weight_epoch)


@contextmanager
def timed(table: dict[str, float], phase: str) -> Iterator[None]:
    """Add to `table[phase]` the seconds that the with block took, whether it succeeded or not."""
    started = time.perf_counter()
    try:
        yield
    finally:
        table[phase] = table.get(phase, 0.0) + time.perf_counter() - started


def require_in_time(lease: Mapping[str, Any]) -> None:
    """Look at the clock, which is the server's too, right before a write.

    Args:
        lease: as BridgeServer.begin returns it.

    Raises:
        LeaseLost: the server does not expect a write any more.
    """
    late = time.monotonic() - lease["deadline"]
    if late > 0:
        raise LeaseLost(
            f"the server's lease ran out {late:.1f} s before the weights were written. This "
            "trainer was stopped or held up (its --bridge-timeout and the server's are the time "
            "it has)"
        )


def require_finite(spoilt: str, version: int) -> None:
    """Raise BridgeError if a parameter (its name, or an empty string) was found to hold NaN or
    infinity.
    """
    if spoilt:
        raise BridgeError(
            f"version {version} is not sent: {spoilt} holds NaN or infinity; the server keeps what it serves"
        )


def manifests_of(info: dict[str, Any]) -> list[Manifest]:
    """The manifests in /bridge/info, by rank."""
    return [Manifest.from_json(rank) for rank in info["ranks"]]


def served_dtype(info: dict[str, Any]) -> torch.dtype:
    """The dtype in which the server of /bridge/info holds its weights."""
    return manifests_of(info)[0].entries[0].torch_dtype


def shapes_of(model: torch.nn.Module) -> Shapes:
    """Return the shapes of every parameter, in the model's order, as the server gets them; the same
    on every rank, nothing is sent.
    """
    shards = getattr(model, "shards", None) or Shards()
    shapes = {
        name: (shards.whole_shape(name, p), dtype_name(p.dtype))
        for name, p in held_tensors(model).items()
    }
    geometry = getattr(model, "geometry", None)
    return shapes if geometry is None else as_compared(geometry, shapes)


def planned_shapes(geometry: Geometry, dtype: torch.dtype) -> Shapes:
    """As `shapes_of`, of a model that is not loaded yet."""
    shapes = {
        name: (parameter.shape, dtype_name(dtype))
        for name, parameter in parameters(geometry).items()
    }
    return as_compared(geometry, shapes)


def as_served(shapes: Shapes, dtype: torch.dtype) -> Shapes:
    """The parameters as a bridge that converts sends them: in the server's dtype."""
    return {name: (shape, dtype_name(dtype)) for name, (shape, _) in shapes.items()}


def as_held(
    shapes: Shapes, manifests: Sequence[Manifest], may_lack: AbstractSet[str] = frozenset()
) -> Shapes:
    """The shapes without tensors of `may_lack` that none of these ranks has."""
    served = served_names(manifests)
    return {name: shape for name, shape in shapes.items() if name in served or name not in may_lack}


def served_names(manifests: Sequence[Manifest]) -> set[str]:
    """The names of the trainer's tensors that vLLM's ranks take."""
    return {
        name
        for manifest in manifests
        for entry in manifest.entries
        for name, _ in sources(entry.shard)
    }


def require_layout(manifests: Sequence[Manifest], shapes: Shapes, server: str = "") -> None:
    """Compare the parameters of vLLM's ranks with the model's.

    Args:
        manifests: of vLLM's ranks.
        shapes: of the model's parameters.
        server: names the server and its model in the message, behind the rank.

    Raises:
        BridgeError: names the parameters that differ and both values.
    """
    for manifest in manifests:
        problems = mismatches(manifest, shapes)
        if problems:
            shown = "; ".join(problems[:5]) + ("; …" if len(problems) > 5 else "")
            raise BridgeError(
                f"{len(problems)} parameter(s) differ between the trainer and vLLM rank {manifest.tp_rank}{server}: {shown}. "
                "Start both with the same model."
            )


def check_layout(info: dict[str, Any], shapes: Shapes) -> int:
    """Compare the server's parameters with the model's.

    Returns:
        The number of parameters mapped: all of them, or an error is raised.

    Raises:
        BridgeError: names the parameters that differ and both values.
    """
    require_layout(manifests_of(info), shapes, f", which serves {info['model']}")
    mapped = len(served_names(manifests_of(info)) & shapes.keys())
    logger.info("[Bridge] Mapped %d/%d params from vLLM to trainer", mapped, len(shapes))
    return mapped
