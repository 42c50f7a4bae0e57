"""A broadcast to several servers whose faults are played: the servers that get the weights, are
left out, and come back.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from example_trainer.errors import BridgeError
from example_trainer.vllm_client import ServerRefused, ServerSilent
from example_trainer.weight_bridge.base import LeaseLost, OneServerRefused
from example_trainer.weight_bridge.fleet import Standing
from tests.example_trainer.weight_bridge.played_fleet import SOON, PlayedServer, World

pytestmark = pytest.mark.nightly


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    one = World(monkeypatch)
    yield one
    for played in one.servers:
        played.freed.set()
    for bridge in one.bridges:
        bridge.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(played: PlayedServer) -> None:
    played.alive = False


def refuse(url: str) -> BridgeError:
    return ServerRefused(f"{url} refused it: another checksum", 500)


def test_all_are_updated_by_one_stream(world: World) -> None:
    bridge = world.trainer()
    report = world.step(bridge, 2)
    assert world.right(2) == [played.url for played in world.servers] == world.streams[-1]
    assert (report.fleet["good"], report.fleet["size"], len(world.streams)) == (3, 3, 2)
    assert [played.heard.count("cohort") for played in world.servers] == [1, 1, 1]
    assert bridge.joins == 3


@pytest.mark.parametrize("where", ["cohort", "begin", "transfer", "commit"])
@pytest.mark.parametrize("what", ["dies", "hangs", "refuses"])
def test_one_that_fails_is_left_out_of_the_step_and_is_right_again_after_the_next_look(
    world: World, where: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if (where, what) == ("transfer", "refuses"):
        pytest.skip("receiving is not asked for")
    bridge = world.trainer()
    faulty = world.servers[1]
    url = faulty.url
    if where == "cohort":
        world.servers[2].restart()  # so that a cohort has to be formed
        bridge.keep_serving(lambda: None)
    if what == "dies" and where != "transfer":
        faulty.faults[where] = ServerSilent(f"{url} did not answer")
        faulty.faults["quarantine"] = ServerSilent(f"{url} did not answer")
    else:
        faulty.faults[where] = {"dies": kill, "hangs": "hangs", "refuses": refuse(url)}[what]
    begun = time.monotonic()
    world.step(bridge, 2)
    assert time.monotonic() - begun < SOON / 2
    others = [played.url for played in world.servers if played is not faulty]
    assert set(others) <= set(world.right(2))
    assert f"[Fleet] {url} {'quarantined' if faulty.alive else 'away'}: " in caplog.text
    assert "training goes on with 2 of 3 servers" in caplog.text
    if what == "refuses":
        assert "another checksum" in faulty.quarantine
    faulty.freed.set()
    faulty.restart() if not faulty.alive else faulty.faults.clear()
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert url in world.right(2)
    assert world.streams[-1] == [url], "only the one that is back is sent to"
    assert f"[Fleet] {url} is back: serves version 2 after " in caplog.text
    world.step(bridge, 3)
    assert len(world.right(3)) == 3


def test_one_that_reloads_other_parameters_is_left_out(world: World) -> None:
    """All have the trainer's weights, and vLLM has made something else of them on one."""
    bridge = world.trainer()
    odd = world.servers[0]
    for played in world.servers:
        played.parameters = ["odd" if played is odd else "same"]
    world.step(bridge, 2)
    assert (
        "reloaded version 2 to parameters with the checksums ['odd'], and others to ['same']"
        in (odd.quarantine)
    )
    assert bridge.server_urls() == [played.url for played in world.servers if played is not odd]


@pytest.mark.parametrize("where", ["begin", "commit"])
def test_one_that_is_sent_to_by_itself_keeps_the_others_waiting_no_longer_either(
    world: World, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No server in its group is ahead of it: it has weights of another kind."""
    caplog.set_level("INFO")
    faulty = world.servers[1]
    faulty.dtype = "bfloat16"
    bridge = world.trainer()
    assert [len(urls) for urls in world.streams] == [2, 1]
    faulty.faults[where] = "hangs"
    world.step(bridge, 2)
    assert len(world.right(2)) == 2
    assert re.search(
        rf"\[Fleet\] {faulty.url} quarantined: is \d+ s behind the others; training goes on with 2 of 3",
        caplog.text,
    )
    faulty.freed.set()
    faulty.faults.clear()
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(2)) == 3


@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_a_float16_server_is_joined_as_if_the_trainer_were_float16(
    world: World, trained: torch.dtype
) -> None:
    for server in world.servers:
        server.dtype = "float16"
    world.model.to(trained)
    bridge = world.trainer()
    assert bridge.converts
    assert bridge.params_mapped == bridge.params_total == 1
    assert len(world.right(1)) == 3


def test_another_model_is_refused_before_the_trainers_is_loaded(world: World) -> None:
    bridge = world.trainer()
    bridge.require_shapes({"weight": ((4,), "bfloat16")})  # it is sent in the server's float32
    with pytest.raises(
        BridgeError,
        match=r"1 parameter\(s\) differ .*weight: .*\(5,\).* Start both with the same model",
    ):
        bridge.require_shapes({"weight": ((5,), "float32")})


def test_a_transfer_that_nobody_is_to_blame_for_is_done_again_one_by_one(world: World) -> None:
    bridge = world.trainer()

    def fails(played: PlayedServer) -> None:
        raise BridgeError("sending failed: Connection reset")

    world.servers[0].faults["transfer"] = fails
    world.step(bridge, 2)
    assert len(world.right(2)) == 3
    assert [len(urls) for urls in world.streams[-4:]] == [3, 1, 1, 1]


@pytest.mark.parametrize("idle", [True, False])
def test_a_stuck_server_holds_up_the_others_for_no_longer_than_the_patience(
    world: World, idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three is stuck, and the third has its bytes from it. The third is lost as well,
    until the next look, where the second does not report that it takes none.
    """
    caplog.set_level("INFO")
    bridge = world.trainer()
    world.handed_on = True
    _, stuck, behind = world.servers
    stuck.faults["transfer"], stuck.idle = "hangs", idle
    world.step(bridge, 2)
    lost = [stuck.url] if idle else [stuck.url, behind.url]
    assert re.findall(r"\[Fleet\] (\S+) (?:quarantined|away)", caplog.text) == lost
    assert world.right(2) == [played.url for played in world.servers if played.url not in lost]
    why = "takes none of its bytes for" if idle else "is"
    assert re.search(
        rf"\[Fleet\] {stuck.url} quarantined: {why} \d+ s.*; training goes on with ", caplog.text
    )
    stuck.freed.set()
    for played in (stuck, behind):
        played.faults.clear()
    until(lambda: set(bridge._keeper.due()) >= set(lost))
    bridge.keep_serving(lambda: None)
    assert len(world.right(2)) == 3


@pytest.mark.parametrize("meanwhile", ["hangs", "is late"])
def test_who_could_not_commit_for_want_of_bytes_is_not_blamed(
    world: World, meanwhile: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same where everything had been sent before a server was missed.

    Who waits may get its bytes after all, and serve.
    """
    caplog.set_level("INFO")
    bridge = world.trainer()
    first, stuck, behind = world.servers
    stuck.faults["commit"], behind.faults["commit"], stuck.idle = "hangs", meanwhile, True
    stuck.faults["abort"] = stuck.faults["init"] = "hangs"
    world.step(bridge, 2)
    assert world.right(2) == [first.url, behind.url]
    assert re.findall(r"\[Fleet\] (\S+) (?:quarantined|away)", caplog.text) == [stuck.url]
    assert "updated one by one" not in caplog.text


def test_a_server_that_did_not_wait_for_the_trainer_joins_anew_and_is_not_blamed(
    world: World,
) -> None:
    bridge = world.trainer()
    late = world.servers[2]
    late.faults["commit"] = LeaseLost(f"{late.url} refused /bridge/commit of version 2: gave it up")
    assert world.step(bridge, 2).fleet["good"] == 3
    assert len(world.right(2)) == 3
    assert late.heard.count("init") == 2
    assert "quarantine" not in late.heard


def test_with_too_few_it_waits_says_for_whom_and_goes_on_when_they_are_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = world.trainer(least=2)
    for played in world.servers[:2]:
        played.alive = False
    waits = "[Fleet] waiting for servers: "
    back = threading.Thread(
        target=lambda: (until(lambda: waits in caplog.text), world.servers[0].restart())
    )
    back.start()
    world.step(bridge, 2)
    back.join()
    assert set(world.right(2)) == {world.servers[0].url, world.servers[2].url}
    assert f"--min-servers 2: {world.servers[0].url} (" in caplog.text
    assert "; until " in caplog.text


def test_with_too_few_for_too_long_training_ends_with_the_reasons(world: World) -> None:
    bridge = world.trainer(limit=1.0)
    for played in world.servers:
        played.alive = False
    with pytest.raises(BridgeError, match=r"0 of 3 vLLM servers are good.*:9001 \(.*--resume auto"):
        world.step(bridge, 2)


def test_a_server_of_another_trainer_is_left_to_it(world: World) -> None:
    bridge = world.trainer()
    taken = world.servers[1]
    taken.epoch, taken.trainer = 9, "trainer elsewhere:7"
    world.step(bridge, 2)
    assert len(world.right(2)) == 2
    heard = len(taken.heard)
    until(lambda: bridge._keeper.fleet.places[taken.url].hopeless)
    world.step(bridge, 3)
    assert taken.heard[heard:] == []
    for played in world.servers:
        played.epoch, played.trainer = 9, "trainer elsewhere:7"
    with pytest.raises(BridgeError, match=r"trainer elsewhere:7 .* has taken it over"):
        world.step(bridge, 4)


def test_a_server_with_another_model_ends_the_start_and_is_kept_out_later(world: World) -> None:
    world.servers[1].name = "other"
    with pytest.raises(BridgeError, match="differ between the trainer and vLLM rank 0"):
        world.trainer()
    world.servers[1].name = "weight"
    bridge = world.trainer()
    world.servers[1].name = "other"
    world.servers[1].restart()
    world.step(bridge, 2)
    until(lambda: not bridge.server_restarted())
    assert len(world.right(2)) == 2


def refusing(url: str, text: str) -> Callable[[str, dict[str, Any]], None]:
    """A check that one server does not pass."""

    def check(asked: str, info: dict[str, Any]) -> None:
        if asked == url:
            raise OneServerRefused(f"{url} {text}")

    return check


def test_a_server_with_other_kernels_is_left_out_from_the_start(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    other = world.servers[1]
    check = refusing(other.url, "runs other kernels: plan: '1' here, '2' there")
    bridge = world.trainer(least=2, check=check)
    assert len(world.right(1)) == 2
    assert other.heard == []
    place = bridge._keeper.fleet.places[other.url]
    assert place.hopeless
    assert "runs other kernels: plan" in place.reason
    assert f"[Fleet] {other.url} quarantined: runs other kernels" in caplog.text
    other.restart()  # the check is repeated: as if it had come back with the right ones
    bridge._updates._checks.clear()
    until(bridge.server_restarted)
    world.step(bridge, 2)
    assert len(world.right(2)) == 3


def test_with_other_kernels_on_too_many_servers_the_start_ends(world: World) -> None:
    with pytest.raises(BridgeError, match="runs other kernels"):
        world.trainer(least=3, check=refusing(world.servers[1].url, "runs other kernels"))


def test_a_server_that_comes_back_with_other_kernels_is_kept_out(world: World) -> None:
    bridge = world.trainer(check=refusing("http://127.0.0.1:9004", "is not there"))
    bridge.require(refusing(world.servers[0].url, "runs other kernels"))
    world.servers[0].restart()
    world.step(bridge, 2)
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(2)) == 2
    assert "runs other kernels" in bridge.server_trouble()
    world.step(bridge, 3)
    assert len(world.right(3)) == 2


def test_a_server_that_is_wanted_joins_and_one_that_leaves_goes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bridge = world.trainer()
    keeper, gone = bridge._keeper, world.servers[2]
    with keeper.lock:
        keeper.change_members([], [gone.url])
    world.step(bridge, 2)
    assert gone.url not in world.right(2)
    with keeper.lock:
        keeper.change_members([], [])
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(2)) == 3
    assert f"[Fleet] {gone.url} joined: serves version 2" in caplog.text


def test_the_start_does_not_wait_for_a_server_that_is_late(world: World) -> None:
    world.servers[1].alive = False
    bridge = world.trainer()
    assert len(world.right(1)) == 2
    assert bridge._keeper.fleet.places[world.servers[1].url].standing is not Standing.GOOD
    world.servers[1].alive = True
    until(bridge.server_restarted)
    bridge.keep_serving(lambda: None)
    assert len(world.right(1)) == 3


def test_an_only_server_that_was_restarted_meets_the_trainer_anew(world: World) -> None:
    """Its first epoch has the number of the one before."""
    del world.servers[1:]
    bridge = world.trainer()
    world.servers[0].restart()
    bridge.keep_serving(lambda: None)
    assert len(world.right(1)) == 1
