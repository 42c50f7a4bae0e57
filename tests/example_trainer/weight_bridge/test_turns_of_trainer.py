"""The trainer's side of taking turns, against a server with scripted answers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from example_trainer.command_line import parse_config
from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.memory_plan import MemoryPlan, MemoryShortage, require_between_turns
from example_trainer.vllm_client import ServerRefused, ServerSilent
from example_trainer.weight_bridge import turns as turns_module
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.turns import Turns, require_turns


class Server(BridgeServer):
    """Each answer of `answers` is given once, for its step; then all is well."""

    seconds = 60.0

    def __init__(self, **answers: list[Exception]) -> None:
        super().__init__("localhost", 1, self.seconds, sleep=lambda seconds: None)
        self.answers, self.steps, self.restarted = answers, list[str](), False

    def call(self, path: str, body: dict[str, Any], what: str | None = None) -> dict[str, Any]:
        step = path.rpartition("/")[2]
        self.steps.append(f"{step} {body['epoch']}")
        if self.answers.get(step):
            raise self.answers[step].pop(0)
        return {"turn": "training", "bytes": 7, "seconds": 0.0}

    def wait_for_restart(self, message: str) -> bool:
        return self.restarted


def take(server: Server, work: Any = None) -> Turns:
    turns, epochs = Turns(server, Ranks()), [1]
    with turns.taken(lambda: epochs[-1], lambda: epochs.append(2)):
        server.steps.append("computes")
        if work is not None:
            work()
    return turns


NO_ROOM = ServerRefused("9 bytes wanted, 8 free", 507)


def test_a_turn_is_begun_and_ended_and_told() -> None:
    server = Server()
    figures = take(server).figures
    assert server.steps == ["rest 1", "computes", "wake 1"]
    assert set(figures) == {"freed_bytes", "rest", "wake", "seconds"}
    assert figures["freed_bytes"] == 7
    assert figures["seconds"] >= figures["rest"] + figures["wake"]


def test_the_trainers_memory_is_given_back_before_the_server_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(wake=[NO_ROOM, NO_ROOM])
    monkeypatch.setattr(turns_module, "release_memory", lambda: server.steps.append("releases"))
    take(server)
    again = ["releases", "wake 1"]
    assert server.steps == ["rest 1", "computes", *again, *again, *again]


def test_memory_that_does_not_come_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "seconds", 0.2)
    begun = time.monotonic()
    with pytest.raises(BridgeError, match="9 bytes wanted, 8 free"):
        take(Server(wake=[NO_ROOM] * 10**6))
    assert time.monotonic() - begun > 0.2


def test_an_error_in_the_turn_is_the_one_that_is_raised() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    server = Server(wake=[ServerSilent("gone")])
    with pytest.raises(ZeroDivisionError):
        take(server, fail)
    assert server.steps == ["rest 1", "computes", "wake 1"]


def test_a_rest_that_is_not_answered_is_called_off() -> None:
    server = Server(rest=[ServerSilent("nothing came")])
    with pytest.raises(BridgeError, match="nothing came"):
        take(server)
    assert server.steps == ["rest 1", "wake 1"], "nothing is computed"


def test_a_restarted_server_is_joined_before_it_rests_and_left_alone_when_it_samples() -> None:
    server = Server(
        rest=[ServerRefused("epoch 1 is over", 409)],
        wake=[ServerRefused("epoch 1 is over", 409)] * 2,
    )
    server.restarted = True
    take(server)
    assert server.steps == ["rest 1", "wake 1", "rest 2", "computes", "wake 2"]


def test_a_server_without_turns_is_refused() -> None:
    assert require_turns({"cache_bytes": 5}, "http://h:1") == 5
    for info in ({"cache_bytes": 0}, {}):
        with pytest.raises(
            BridgeError, match=r"http://h:1 does not: stop it and start it with --colocate"
        ):
            require_turns(info, "http://h:1")


def test_the_flag_means_one_copy_and_fresh_rollouts() -> None:
    config = parse_config(["--model-name", "m", "--colocate"])
    assert (config.weight_bridge_mode, config.single_copy, config.max_staleness) == (
        "shared_vllm",
        True,
        0,
    )
    assert not config.fetches_ahead


def test_what_lasts_must_fit_beside_keys_and_values() -> None:
    plan = MemoryPlan({"masters": 6 << 30}, {"backward": {"activations": 20 << 30}})
    require_between_turns(plan, 7 << 30, 30 << 30)
    require_between_turns(plan, 5 << 30, 0)
    with pytest.raises(
        MemoryShortage, match=r"keeps 6.00 GiB.*only 5.00 are free.*--optimizer-offload"
    ):
        require_between_turns(plan, 5 << 30, 30 << 30)
