"""A trainer that stops at a chosen point of an update and waits. Then a fault can be done to it, or
to the server.

Points: `begin` (begun: the engine stands still, but for an overlapped transfer; nothing has been
sent or written). Others are `transfer` (some of the weights have been handed over), and `write`
(half of them are written). At `commit` all of them are; nothing has been taken over.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.gpu.processes import Answers, free_port
from bench.gpu.shapes import SHAPES
from bench.gpu.spread_trainer import SpreadTrainer
from bench.gpu.spread_trainer import main as spread_main
from bench.gpu.trainer import BenchTrainer, main
from example_trainer.errors import BridgeError
from example_trainer.models.decoder import Decoder
from example_trainer.weight_bridge.broadcast import BroadcastBridge, Line
from example_trainer.weight_bridge.server import BridgeServer, check_layout, shapes_of
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from example_trainer.weight_bridge.stream import Cohort
from vllm_patching.weights.families import Geometry

RESTART_SECONDS = 240.0
"""Seconds that a trainer waits for a server that has gone: a GPU server's first start takes 130
s.
"""


class FaultTrainer(BenchTrainer):
    """BenchTrainer with commands that go wrong."""

    def __init__(self, shape: str, port: int, device: str, timeout: float) -> None:
        super().__init__(shape, port, device, timeout)
        self.startup_timeout = RESTART_SECONDS

    def sync_held(self, at: str) -> dict[str, Any]:
        """One update that stops at a point, reports it ({"event": point}), and goes on when it
        reads a line.
        """

        def wait() -> None:
            assert self.answers is not None
            if not told_to_go_on(self.answers, at):
                os._exit(1)  # the parent has gone

        hold = once(wait)
        with replaced(self._arm(at, hold)):
            return self._update(lambda: self._write_half_and_half(hold if at == "write" else None))

    def sync_nan(self) -> dict[str, Any]:
        """One update with a single NaN in it."""
        assert self.model is not None

        def write() -> None:
            self.write(1 - self.served_set)
            parameter = list(self.model.parameters())[3]  # type: ignore[union-attr]
            with torch.no_grad():
                parameter.view(-1)[7] = float("nan")

        return self._update(write)

    def connect_wrong(self, what: str) -> dict[str, Any]:
        """Try to join with a model that differs by one `dtype`, `shape` or `name`.

        A broadcast converts each parameter to the server's dtype, so that only a single copy
        refuses another dtype. Its check is made here without its memory, which needs a shared GPU.

        Returns:
            the trainer's own check's message, the server's message to a trainer that does not
            check, and the parameter's name.
        """
        model = Decoder(Geometry.from_config(SHAPES[self.shape]), self.dtype, torch.device("meta"))
        norm: Any = model.model.layers[1].input_layernorm
        name = "model.layers.1.input_layernorm.weight"
        if what == "dtype":
            norm.weight.data = norm.weight.data.to(torch.float16)
        elif what == "shape":
            norm.weight = torch.nn.Parameter(norm.weight.data.new_empty(norm.weight.shape[0] + 1))
        elif what == "name":
            norm.scale = norm.weight
            del norm.weight
        else:
            raise ValueError(f"{what!r} is none of dtype, shape, name")
        os.environ["MASTER_PORT"] = str(free_port())
        client = BridgeServer("localhost", self.port, self.timeout)
        bridge = BroadcastBridge(client)
        told = {"parameter": name, "trainer": "", "server": ""}
        try:
            if what == "dtype":
                check_layout(client.wait_for_info(), shapes_of(model))
            else:
                bridge.connect(model)
        except BridgeError as error:
            told["trainer"] = str(error)
        finally:
            bridge.close()
        careless = BridgeServer("localhost", self.port, self.timeout)
        try:
            careless.init("broadcast", shapes_of(model))
        except BridgeError as error:
            told["server"] = str(error)
        finally:
            careless.close()
        return told

    def connect_at_port(self, master_port: int) -> dict[str, Any]:
        """Try to join with a rendezvous port that may be taken; returns the error, empty if there
        was none.
        """
        assert self.model is not None
        os.environ["MASTER_PORT"] = str(master_port)
        bridge = BroadcastBridge(BridgeServer("localhost", self.port, self.timeout))
        try:
            bridge.connect(self.model)
        except BridgeError as error:
            return {"error": str(error)}
        finally:
            bridge.close()
        return {"error": ""}

    def connect_impatiently(self, **options: Any) -> dict[str, Any]:
        """As `connect`; wait for a second only while another trainer occupies the server."""
        self.startup_timeout = 1.0
        try:
            return self.connect(**options)
        finally:
            self.startup_timeout = RESTART_SECONDS

    def commands(self) -> dict[str, Callable[..., Any]]:
        wrong = (self.connect_wrong, self.connect_at_port, self.connect_impatiently)
        mine = (self.sync_held, self.sync_nan, *wrong)
        return super().commands() | {method.__name__: method for method in mine}

    def _write_half_and_half(self, hold: Callable[[], None] | None) -> None:
        assert self.model is not None
        which = 1 - self.served_set
        if hold is not None:
            parameters = list(self.model.named_parameters())
            with torch.no_grad():
                for name, parameter in parameters[: len(parameters) // 2]:
                    parameter.copy_(self.sets[which][name])
            hold()
        self.write(which)

    def _arm(self, at: str, hold: Callable[[], None]) -> list[Replacement]:
        """Wrap the method of the bridge in which the point lies."""
        if isinstance(self.bridge, SingleCopyBridge):
            if at == "write":
                return []
            server = self.bridge._server
            post = server.post

            def post_and_hold(step: str, body: dict[str, Any]) -> dict[str, Any]:
                if at == step == "commit":
                    hold()
                answer = post(step, body)
                if at == step != "commit":
                    hold()
                return answer

            return [(server, "post", post_and_hold)]
        assert isinstance(self.bridge, BroadcastBridge)
        (member,) = self.bridge._keeper.members.values()
        if at == "begin":
            begin = member.server.begin

            def begin_and_hold(*step: Any) -> Any:
                answer = begin(*step)
                hold()
                return answer

            return [(member.server, "begin", begin_and_hold)]
        if at == "commit":
            commit = member.server.commit

            def hold_and_commit(*step: Any) -> Any:
                hold()
                return commit(*step)

            return [(member.server, "commit", hold_and_commit)]
        return broken_transfer(self.bridge, hold)


Replacement = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its methods, and what is called in that method's place."""


@contextmanager
def replaced(methods: Sequence[Replacement]) -> Iterator[None]:
    """Put other functions in these methods' places for the time of the block."""
    for owner, name, method in methods:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, _ in methods:
            delattr(owner, name)


def once(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` whose first call alone does something."""
    todo = [work]
    return lambda: todo.pop()() if todo else None


def told_to_go_on(answers: Answers, at: str) -> bool:
    """Report that a point has been reached and wait for the parent's line; False if the parent has
    gone.
    """
    answers.write({"event": at})
    return bool(sys.stdin.readline())


def broken_transfer(bridge: BroadcastBridge, hold: Callable[[], None]) -> list[Replacement]:
    """Have `hold` called in the middle of a transfer: before the last bucket, while the servers
    receive.
    """

    def broken(line: Line) -> Callable[..., list[str]]:
        send = line.stream.send

        def send_and_hold(cohort: Cohort, lost: Callable[[], str]) -> list[str]:
            # Formed again in every try, so that its lanes are known only now.
            for lane in cohort.own_lanes:
                vars(lane)["begin"] = held_begin(lane.begin, hold)
            try:
                return send(cohort, lost)
            finally:
                for lane in cohort.own_lanes:
                    vars(lane).pop("begin", None)

        return send_and_hold

    return [(line.stream, "send", broken(line)) for line in bridge._lines.values()]


def held_begin(begin: Callable[..., Any], hold: Callable[[], None]) -> Callable[..., Any]:
    """A lane's `begin`, with `hold` before it."""

    def held(pieces: Any, buffer: Any) -> Any:
        hold()
        return begin(pieces, buffer)

    return held


HELD_SECONDS = 120.0


class SpreadFaultTrainer(SpreadTrainer):
    """SpreadTrainer that stops in the middle of a transfer: every rank does, and rank 0 asks the
    parent when to go on.
    """

    def sync_held(self, at: str) -> dict[str, Any]:
        """One update that stops in `transfer`, reports it ({"event": "transfer"}), and goes on when
        rank 0 reads a line.
        """
        if at != "transfer":
            raise ValueError(f"a trainer of several ranks can be held in transfer, not in {at!r}")

        def wait() -> None:
            # A rank of vLLM's that is stopped before its half has arrived would keep its sender
            # from ever coming here.
            self.ranks.barrier("holding the transfer")
            heard = self.answers is None or told_to_go_on(self.answers, at)
            if not self.ranks.broadcast(heard, "the word to go on", timeout=HELD_SECONDS):
                os._exit(1)  # the parent has gone

        assert isinstance(self.bridge, BroadcastBridge)
        with replaced(broken_transfer(self.bridge, once(wait))):
            return self._update(lambda: self.write(1 - self.served_set))

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "sync_held": self.sync_held}


if __name__ == "__main__":
    main(FaultTrainer) if os.environ.get("WORLD_SIZE", "1") == "1" else spread_main(
        SpreadFaultTrainer
    )
