"""A vLLM server that the trainer starts, watches and stops: this project's own, or any other that
takes a model and a port.

The server runs under `child_processes/guard.py`, which ends it, with every process that it started,
when the trainer's end of a pipe closes. The kernel closes it however the trainer dies, so `kill -9`
of the trainer leaves no server behind.
"""

from __future__ import annotations

import logging
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from example_trainer.child_processes.ports import is_free
from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.errors import BridgeError
from example_trainer.launcher import roles
from example_trainer.vllm_client import VLLMClient
from example_trainer.weight_bridge.server_record import remove_record, write_record

logger = logging.getLogger(__name__)

OWN_FLAGS = roles.flags(
    served_model_name="{name}", weight_version="{version}", weight_epoch="{epoch}"
)
OWN_COMMAND = shlex.join(roles.anywhere(roles.vllm_server("{model}", "{port}", OWN_FLAGS)))
STOP_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL."""
_POLL_SECONDS = 0.2
_LOG_EVERY_SECONDS = 15.0

# The server does not get torchrun's variables for the trainer's ranks.
_NOT_INHERITED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "VLLM_ENABLE_SHARED_WEIGHTS",
)  # fmt: skip


class ServerDied(BridgeError):
    """The server's process has ended.

    The message holds its exit status and the last lines of its log.
    """


@dataclass(frozen=True)
class Served:
    """The checkpoint that a server was started on: a folder or a model's name, and the weight
    version and epoch that it holds.
    """

    model: str
    version: int
    epoch: int = 0


class OwnedServer:
    """At most one running server.

    Attributes:
        served: what the server was started on last; None before the first start.
        computed_flags: further flags of the next start, in front of `arguments`.

    Args:
        command: what starts it, with {model}, {name}, {port}, {version} and {epoch} in it.
        arguments: further flags.
        name: under which the server offers the model whatever checkpoint it holds, so that clients
            need not follow.
        host, port: where it will listen.
        log_path: gets its output; each start is appended.
        gpus: its CUDA_VISIBLE_DEVICES; None for the trainer's own.
        api_key: bearer token that it shall ask for.
        start_timeout: seconds that loading may take.
    """

    def __init__(
        self,
        command: str,
        arguments: str,
        name: str,
        host: str,
        port: int,
        log_path: Path,
        gpus: str | None,
        api_key: str | None,
        start_timeout: float,
    ) -> None:
        self._template, self._arguments, self._name = command, arguments, name
        self.port, self._log_path, self._start_timeout = port, log_path, start_timeout
        self.url = f"http://{host}:{port}"
        self._environment: dict[str, str | None] = dict.fromkeys(_NOT_INHERITED)
        if gpus is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpus
        if api_key:
            self._environment["VLLM_API_KEY"] = api_key
        self._client = VLLMClient(self.url, start_timeout, api_key)
        self._process: ManagedProcess | None = None
        self.served: Served | None = None
        self.computed_flags: tuple[str, ...] = ()

    def use_gpus(self, gpus: str) -> None:
        """Start it on these GPUs from now on; as CUDA_VISIBLE_DEVICES."""
        self._environment["CUDA_VISIBLE_DEVICES"] = gpus

    def require_free_port(self) -> None:
        """Raise BridgeError if another process listens where the server is to listen."""
        if not is_free(self.port):
            raise BridgeError(
                f"--vllm-port {self.port} was free when this trainer began and is now taken by a "
                "process that it did not start. Stop that process (`ss -ltnp` shows it) or give "
                "another --vllm-port, then use --resume auto"
            )

    def command(self, served: Served) -> list[str]:
        """Return the command for this checkpoint.

        Raises:
            BridgeError: the command has an unknown placeholder, or cannot be split into shell
                words.
        """
        values: dict[str, str | int] = {
            "model": served.model,
            "name": self._name,
            "port": self.port,
        }
        values |= {"version": served.version, "epoch": served.epoch}
        try:
            words = [word.format(**values) for word in shlex.split(self._template)]
            return [*words, *self.computed_flags, *shlex.split(self._arguments)]
        except (KeyError, IndexError, ValueError) as error:
            raise BridgeError(
                f"--vllm-command {self._template!r} or --vllm-args {self._arguments!r} cannot be used ({error}); "
                "the placeholders are {model}, {name}, {port}, {version} and {epoch}"
            ) from error

    def start(self, served: Served) -> None:
        """Start on a checkpoint; returns at once.

        Raises:
            BridgeError: the port is taken, or the log cannot be written.
        """
        self.require_free_port()
        command = self.command(served)
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("a", encoding="utf-8") as log:
                log.write(f"==== weight version {served.version}: {shlex.join(command)}\n")
            self._process = ManagedProcess(
                "the vLLM server",
                command,
                self._log_path,
                self._environment,
                grace=STOP_SECONDS,
                append=True,
            )
        except OSError as error:
            raise BridgeError(
                f"cannot start the vLLM server with its log in {self._log_path}: {error}"
            ) from error
        self._record(self._process)
        self.served = served
        logger.info(
            "[Bridge] Starting vLLM on %s (weight version %d), log: %s",
            served.model,
            served.version,
            self._log_path,
        )

    def _record(self, process: ManagedProcess) -> None:
        """Let the next trainer recognise this server if this trainer is killed."""
        try:
            write_record(self.port, process.guard.pid, self._log_path)
        except OSError as error:
            logger.warning(
                "[Bridge] This server is not recorded (%s). If this trainer is killed, wait until "
                "its vLLM has ended before the next start, or the next trainer takes it for a "
                "foreign server", error,
            )  # fmt: skip

    def wait_until_ready(self, pause: Callable[[float], None]) -> float:
        """Wait until it is healthy and offers a model; returns the seconds it took.

        Args:
            pause: sleeps, and raises whatever should end the waiting.

        Raises:
            ServerDied: it ended.
            BridgeError: it was not ready at the deadline.
        """
        started = time.monotonic()
        next_log = started + _LOG_EVERY_SECONDS
        process, missing = self._process, self._client.missing
        assert process is not None, "start it first"
        while reason := missing("/health") or missing("/v1/models"):
            self.require_alive()
            waited = time.monotonic() - started
            if waited > self._start_timeout:
                raise BridgeError(
                    f"the vLLM server did not answer at {self.url} within {self._start_timeout:g} s ({reason}); look at "
                    f"{self._log_path}, which ends with: {' | '.join(process.tail(3))}; or raise --vllm-start-timeout"
                )
            if time.monotonic() > next_log:
                logger.info("[Bridge] Waiting for the vLLM server for %.0f s (%s)", waited, reason)
                next_log += _LOG_EVERY_SECONDS
            pause(_POLL_SECONDS)
        self.require_alive()
        return time.monotonic() - started

    def died(self) -> ServerDied | None:
        """Why a server that was started and not stopped no longer runs; None while it runs."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        return ServerDied(" | ".join(line.strip() for line in str(process.died()).splitlines()))

    def require_alive(self) -> None:
        """Raise ServerDied if it has ended."""
        error = self.died()
        if error is not None:
            raise error

    def stop(self) -> None:
        """End it, with all that it started: SIGTERM, then SIGKILL after STOP_SECONDS. Nothing
        happens if none runs.
        """
        process, self._process = self._process, None
        if process is not None:
            process.stop()
            remove_record(self.port)

    def close(self) -> None:
        """End it and hang up."""
        self.stop()
        self._client.close()


def is_this_machine(host: str) -> bool:
    """Return whether a server started here can be reached under this name, which is as in a URL."""
    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "0.0.0.0", "::1", socket.gethostname()):
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None)[0]
        with socket.socket(family) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True
