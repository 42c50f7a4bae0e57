"""The half that the vLLM servers see: a trainer's broadcast bridge, which sends what is held."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from atroposlib.web.addresses import url_host
from example_trainer.api_keys import ServerKeys, revealed
from example_trainer.deterministic.pairing import pair
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.parallel.ranks import Ranks
from example_trainer.parameter_server.held import HeldWeights, held_model, show
from example_trainer.parameter_server.options import ParameterServerOptions, Share
from example_trainer.vllm_client import QUICK_SECONDS, VLLMClient
from example_trainer.weight_bridge.broadcast import BroadcastBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.service_board import ServiceBoard
from vllm_patching.protocol.timeline import Timeline, open_timeline, unix_ns
from vllm_patching.server.state import Weights

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""After a hand-over that failed altogether."""


class ServedByParameters(BridgeServer):
    """A vLLM server, as a parameter server speaks to it."""

    role = "parameter server"


class ShareBoard(ServiceBoard):
    """The rollout service's /fleet, reduced to the servers of one share."""

    def __init__(
        self, url: str, api_key: str | None, by: str, share: Share, keys: ServerKeys
    ) -> None:
        super().__init__(url, api_key, by, keys)
        self._share = share

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]] | None:
        """See Board.publish."""
        membership = super().publish(rows)
        if membership is None:
            return None
        wanted, left = membership
        return [url for url in wanted if self._share.has(url)], left


class SameSampling:
    """Lets in only servers with the same kind of logprobs, which the trainer gets when
    it asks.
    """

    def __init__(self, api_key: str | None) -> None:
        self.mode = ""
        self._api_key = api_key

    def check(self, url: str, info: dict[str, Any]) -> None:
        """Raise ConfigError if a server's differ from the first one's.

        Servers without the route are let in.
        """
        with closing(VLLMClient(url, QUICK_SECONDS, self._api_key)) as server:
            mode = (server.look("/sampling") or {}).get("logprobs_mode")
        if not isinstance(mode, str):
            return
        if self.mode not in ("", mode):
            raise ConfigError(
                f"{url} hands out {mode}, and the servers that joined before it {self.mode}; start all with the same "
                "--logprobs-mode"
            )
        self.mode = mode


class SameKernels:
    """The check that every server runs the kernels of a trainer in deterministic mode."""

    def __init__(self) -> None:
        self.trainer_kernels: Callable[[], Mapping[str, str] | None] = lambda: None
        """Returns the kernels that the trainer named when it joined; None outside that mode."""

    def check(self, url: str, info: dict[str, Any]) -> None:
        """Raise PairingError if a server runs other kernels."""
        kernels = self.trainer_kernels()
        if kernels is not None:
            pair(kernels, info, url)


@dataclass(frozen=True)
class Order:
    """Work that all shards do together.

    Attributes:
        weights: what is handed out.
        everyone: to all servers, or to those alone that do not serve what they should.
    """

    weights: Weights
    everyone: bool


class Handing:
    """Hands weights out. `due` is for rank 0; `carry_out` is collective."""

    def __init__(
        self, options: ParameterServerOptions, held: HeldWeights, device: torch.device, ranks: Ranks,
        sleep: Callable[[float], None],
    ) -> None:  # fmt: skip
        """
        Args:
            sleep: how to wait; may raise to end the wait.
        """
        name = f"{socket.gethostname()}-{options.port}"
        self._timeline = (
            open_timeline("parameter-server", name) if ranks.is_main else Timeline(None, "", "")
        )
        self._every, self._held, self._ranks = options.pull_every, held, ranks
        key, share = revealed(options.vllm_api_key), options.share
        self.sampling = SameSampling(key)

        def server(url: str) -> BridgeServer:
            place = urlsplit(url)
            return ServedByParameters(
                url_host(str(place.hostname)),
                place.port or 80,
                options.bridge_timeout,
                key,
                None,
                sleep,
            )

        board = None
        if options.atropos_url is not None and ranks.is_main:
            service_key, keys = (
                revealed(options.atropos_api_key),
                ServerKeys(bool(key), share.named()),
            )
            board = ShareBoard(
                options.atropos_url, service_key, f"parameter server {name}", share, keys
            )
        self.bridge = BroadcastBridge(
            [server(url) for url in share.named()], options.weight_transfer, ranks, least=0, patience=options.server_patience,
            make_server=server, board=board, port=options.rendezvous_port,
        )  # fmt: skip
        self._model = held_model(held)
        self.bridge.connect(self._model)
        self.kernels = SameKernels()
        self.bridge.require(self.sampling.check)
        self.bridge.require(self.kernels.check)
        self._handed: Weights | None = None
        self._not_before = 0.0

    def due(self, held: Weights | None) -> Order | None:
        """Return the work that is due now.

        Args:
            held: what may be handed out; None if nothing may.
        """
        if held is None or time.monotonic() < self._not_before:
            return None
        handed = self._handed
        if (
            handed is None
            or handed.epoch != held.epoch
            or abs(held.version - handed.version) >= self._every
        ):
            return Order(held, True)
        return Order(held, False) if self.bridge.server_restarted() else None

    def carry_out(self, order: Order) -> str:
        """Hand the pinned copy out.

        Returns:
            why it must not be handed out; empty if it was.
        """
        copy, weights = self._held.pinned, order.weights
        states = self._ranks.gather(
            [[copy.weight_epoch, copy.version], copy.is_sound()], "looking at what is held"
        )
        if any(held != list(weights) for held, _ in states):
            return ""  # a shard has newer ones by now: there is another order soon
        spoilt = [rank for rank, (_, sound) in enumerate(states) if not sound]
        if spoilt:
            return (
                f"version {weights.version} is not handed out: the data of shard {spoilt[0]} of "
                f"{len(states)} has not the checksum any more with which it came. Is this "
                "machine's memory sound? The trainer's next push mends it"
            )
        show(self._model, copy)
        self.bridge.offer(weights.version, weights.epoch)
        begun = time.monotonic()
        try:
            if order.everyone:
                report = self.bridge.sync(weights.version, _nothing)
                self._handed = weights
                good, size = report.fleet.get("good", 0), report.fleet.get("size", 0)
                logger.info(
                    "[ParameterServer] version %d is with %d of %d servers after %.2f s",
                    weights.version, good, size, time.monotonic() - begun,
                )  # fmt: skip
            else:
                self.bridge.keep_serving(_nothing)
            self._timeline.write("pull", unix_ns(begun), version=weights.version)
        except BridgeError as error:
            self._not_before = time.monotonic() + RETRY_SECONDS
            logger.error(
                "[ParameterServer] version %d could not be handed out: %s", weights.version, error
            )
        return ""

    def report(self) -> dict[str, Any]:
        """Return the report of deterministic mode of the first vLLM server in that mode, with its
        address as `server`, for any thread. It is empty if no vLLM server answers now.

        Raises:
            ConfigError: no server that answers is in that mode.
        """
        infos = self.bridge.infos()
        for url, info in infos.items():
            if report := info.get("deterministic"):
                return {**report, "server": url}
        if infos:
            raise ConfigError(
                f"the vLLM server at {next(iter(infos))} is not in deterministic mode; start it "
                "with --deterministic"
            )
        return {}

    def table(self) -> list[dict[str, Any]]:
        """The servers and how they stand."""
        return self.bridge.fleet_table()


def _nothing() -> None:
    """The weights are there."""
