"""The driver, with a cluster and a clock that tests control."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_trainer.async_grpo.driver import RunFailed
from example_trainer.async_grpo.restarts import State
from tests.example_trainer.async_grpo.fake_cluster import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path, generators=2)
    made.turn(10)
    assert {keeper.state for keeper in made.driver.keepers.values()} == {State.UP}
    return made


def test_roles_are_started_when_what_they_need_is_up(tmp_path: Path) -> None:
    made = Bench(tmp_path, generators=2)
    made.cluster.slow = {"generator-2"}
    made.turn(10)
    # The service comes after the generators' places are known: it sends the key of vLLM to these
    # addresses alone.
    assert made.cluster.order == ["generator-1", "generator-2", "service", "environment-1"]
    assert made.state("trainer") is State.WAITING  # it wants all generators the first time
    made.cluster.slow.clear()
    made.turn(10)
    assert made.cluster.order[4:] == ["trainer", "environment-2"]


def test_a_parameter_server_is_started_when_all_whom_it_serves_have_addresses(
    tmp_path: Path,
) -> None:
    made = Bench(tmp_path, generators=2, parameter_servers=1)
    made.cluster.homeless = {"generator-2"}
    made.turn(10)
    assert made.cluster.order == [
        "generator-1"
    ]  # the service waits for the address of every generator
    assert set(map(str, made.fleet.known)) <= {
        "None"
    }  # which servers are this run's is not known yet
    made.cluster.homeless.clear()
    made.turn(20)
    assert made.fleet.known[-1] == [made.driver.keepers[f"generator-{n}"].place.url for n in (1, 2)]  # type: ignore[union-attr]
    launch = made.cluster.seats["parameter-server-1"].launch
    places = [made.driver.keepers[name].place for name in ("generator-1", "generator-2")]
    assert launch is not None
    assert list(launch.arguments[-2:]) == [place.server for place in places if place is not None]
    assert made.state("trainer") is State.UP


def test_the_end_of_training_ends_everything(tmp_path: Path) -> None:
    made = Bench(tmp_path)

    def end_training(seconds: float) -> None:
        made.sleep(seconds)
        if made.cluster.now > 20 and "trainer" in made.cluster.seats:
            made.cluster.seats["trainer"].code = 0

    made.driver._sleep = end_training
    made.driver.run()
    assert made.cluster.closed
    assert made.cluster.stopped == ["environment-1", "generator-1", "service"]
    assert all(seat.killed for seat in made.cluster.seats.values())
    assert dict(made.cluster.groups[0].bundles["service"]) == {"CPU": 1.0, "node:here": 0.001}


def test_a_process_that_was_killed_is_started_again_at_its_place(bench: Bench) -> None:
    before = bench.driver.keepers["generator-1"].place
    bench.cluster.seats["generator-1"].code = 137
    bench.turn(8)
    assert bench.cluster.order.count("generator-1") == 2
    assert (bench.driver.keepers["generator-1"].place, bench.fleet.told) == (before, [])
    assert bench.cluster.order.count("trainer") == bench.cluster.order.count("environment-1") == 1


def test_a_generator_on_another_node_is_told_to_the_fleet_and_its_environment_follows(
    bench: Bench,
) -> None:
    before = bench.driver.keepers["generator-1"].place
    assert before is not None
    bench.cluster.node_of = {"generator-1": "n2", "trainer": "n1"}
    bench.cluster.seats["generator-1"].lost = bench.cluster.seats["environment-1"].lost = True
    bench.turn(12)
    now = bench.driver.keepers["generator-1"].place
    assert now is not None
    assert now.host == "n2"
    assert bench.fleet.told == [(before.server, now.server)]
    assert bench.fleet.known[-1] == [now.url, bench.driver.keepers["generator-2"].place.url]  # type: ignore[union-attr]
    assert bench.state("generator-1") is bench.state("environment-1") is State.UP
    launch = bench.cluster.seats["environment-1"].launch
    assert launch is not None
    assert now.url in launch.arguments


def test_who_finds_no_place_says_what_it_asks_and_until_when_it_waits(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest goes on at the same time."""
    caplog.set_level("INFO")
    bench.cluster.homeless = {"generator-1"}
    bench.cluster.seats["generator-1"].lost = True
    bench.turn(2 * 40)
    assert (
        "[Async] generator-1 waits for its place: asks 1 GPU and 4 CPU; for 30 s so far, 900 s at most"
        in caplog.text
    )
    assert {bench.state(name) for name in ("trainer", "generator-2", "environment-2")} == {State.UP}
    bench.cluster.homeless.clear()
    bench.turn(12)
    assert bench.state("generator-1") is State.UP


def test_who_uses_the_service_follows_it_to_another_address(bench: Bench) -> None:
    bench.cluster.node_of = {"service": "n2", "trainer": "n1"}
    bench.cluster.seats["service"].lost = True
    bench.turn(20)
    assert bench.driver.keepers["service"].place.url.startswith("http://n2:")  # type: ignore[union-attr]
    for name in ("trainer", "environment-1", "environment-2"):
        assert bench.cluster.order.count(name) == 2, name
        launch = bench.cluster.seats[name].launch
        assert launch is not None
        assert any("http://n2:" in text for text in (*launch.arguments, *launch.files.values()))
    assert bench.cluster.order.count("generator-1") == 1


def test_who_is_started_anew_ends_first(bench: Bench) -> None:
    """The trainer writes its checkpoint before the next one looks for the newest."""
    trainer = bench.cluster.seats["trainer"]
    trainer.busy = True
    bench.cluster.node_of = {"service": "n2", "trainer": "n1"}
    bench.cluster.seats["service"].lost = True
    bench.turn(40)
    assert (trainer.stopped, trainer.killed, bench.state("trainer")) == (True, False, State.ENDING)
    assert bench.cluster.order.count("environment-1") == 2
    assert bench.cluster.order.count("trainer") == 1
    trainer.busy = False
    bench.turn(10)
    assert (trainer.killed, bench.state("trainer")) == (True, State.UP)
    assert bench.cluster.order.count("trainer") == 2


def test_who_does_not_end_in_its_time_is_killed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = bench.cluster.seats["trainer"]
    trainer.busy = True
    bench.cluster.node_of = {"service": "n2", "trainer": "n1"}
    bench.cluster.seats["service"].lost = True
    bench.turn(2 * (120 + 30) + 20)
    assert trainer.killed
    assert bench.state("trainer") is State.UP
    assert "[Async] trainer did not stop in 150 s and is killed" in caplog.text


def test_the_next_life_begins_when_the_processes_of_the_last_have_ended(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench.cluster.earlier["trainer"] = (7, 8)
    bench.cluster.seats["trainer"].lost = True
    bench.turn(2 * 100)
    assert (bench.cluster.order.count("trainer"), bench.state("trainer")) == (1, State.PLACING)
    assert (
        "trainer on localhost waits for the end of processes 7, 8 of an earlier life, for 92 s so far"
        in caplog.text
    )
    assert bench.cluster.ended_by_force == set()
    del bench.cluster.earlier["trainer"]
    bench.turn(6)
    assert (bench.cluster.order.count("trainer"), bench.state("trainer")) == (2, State.UP)


def test_what_an_earlier_life_has_left_is_killed_when_its_time_is_over(bench: Bench) -> None:
    bench.cluster.earlier["trainer"] = (7,)
    bench.cluster.seats["trainer"].lost = True
    bench.turn(2 * 140)
    assert bench.cluster.ended_by_force == set()
    bench.turn(2 * 20)
    assert bench.cluster.ended_by_force == {"trainer"}
    with pytest.raises(
        RunFailed,
        match=r"^trainer cannot be started on localhost: process 7 of an earlier life did not end in 180 s",
    ):
        bench.turn(2 * 30)


def test_a_lost_trainer_is_started_again_without_waiting_for_generators(bench: Bench) -> None:
    bench.cluster.slow = {"generator-2"}
    bench.cluster.seats["generator-2"].lost = bench.cluster.seats["trainer"].lost = True
    bench.turn(12)
    assert bench.cluster.order.count("trainer") == 2
    assert bench.state("generator-2") is State.STARTING


def test_an_actor_that_is_silent_for_a_moment_is_left_alone(bench: Bench) -> None:
    seat = bench.cluster.seats["trainer"]
    seat.silent = True
    bench.turn(20)
    seat.silent = False
    bench.turn(4)
    assert bench.cluster.order.count("trainer") == 1
    seat.silent = True
    bench.turn(80)
    assert bench.cluster.order.count("trainer") == 2


def test_an_actor_that_hangs_is_lost_with_what_it_looks_after(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped actor would never report that its process has died."""
    seat = bench.cluster.seats["trainer"]
    seat.hung, seat.code = True, 137
    bench.turn(2 * 60)
    assert (bench.state("trainer"), seat.killed) == (State.UP, False)
    bench.turn(10)
    assert seat.killed
    assert bench.cluster.order.count("trainer") == 2
    assert (
        "[Async] trainer is out of reach: its actor, which looks after it, has not answered for 60 s; it is"
        in caplog.text
    )


def test_nobody_is_late_for_a_driver_that_stood_still(bench: Bench) -> None:
    for seat in bench.cluster.seats.values():
        seat.hung = True
    bench.turn()
    bench.sleep(600)
    bench.turn()
    for seat in bench.cluster.seats.values():
        seat.hung = False
    bench.turn(10)
    assert not any(seat.killed for seat in bench.cluster.seats.values())


def test_a_trainer_whose_checkpoints_are_on_a_lost_disk_ends_the_run(bench: Bench) -> None:
    bench.cluster.common = False
    bench.driver.keepers["trainer"].common = False
    bench.cluster.node_of = {"trainer": "n2"}
    bench.cluster.seats["trainer"].lost = True
    with pytest.raises(
        RunFailed, match=r"the node of the trainer is lost, and .* Put logging.folder on a disk"
    ):
        bench.turn(12)


def test_a_process_that_never_worked_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    made = Bench(tmp_path)

    def fail(seconds: float) -> None:
        made.sleep(seconds)
        if "environment-1" in made.cluster.seats:
            made.cluster.seats["environment-1"].code = 1

    made.driver._sleep = fail
    with pytest.raises(
        RunFailed,
        match=r"environment-1 exited with code 1: why; log: .*environment-1.log; it would do so again",
    ):
        made.driver.run()
    assert made.cluster.closed
    assert {"service", "generator-1"} <= set(made.cluster.stopped)


def test_a_process_that_is_killed_again_and_again_ends_the_run(bench: Bench) -> None:
    def kill_again() -> None:
        for _ in range(400):
            bench.cluster.seats["trainer"].code = 137
            bench.turn()

    with pytest.raises(RunFailed, match=r"trainer .* failed 7 times in a row"):
        kill_again()


def test_what_the_cluster_cannot_place_is_said_before_anything_is_started(tmp_path: Path) -> None:
    made = Bench(tmp_path, generators=20)
    with pytest.raises(
        RunFailed,
        match=r"the cluster cannot place generator-\d+: it asks 1 GPU and 5 CPU on one node",
    ):
        made.driver.run()
    assert made.cluster.groups == []


def test_a_node_that_cannot_run_a_role_is_named(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    made.cluster.problems["trainer"] = ("model folder /m is not there",)
    with pytest.raises(
        RunFailed, match=r"node localhost \(host\) cannot run trainer: model folder /m is not there"
    ):
        made.driver.run()
    assert made.cluster.closed


@pytest.mark.parametrize("method", ["start", "look"])
def test_what_a_node_cannot_do_is_one_line(tmp_path: Path, method: str) -> None:
    made = Bench(tmp_path)
    made.cluster.broken["trainer"] = method
    with pytest.raises(
        RunFailed,
        match=r"^node localhost cannot run trainer: its log cannot .*: No space left on device; free",
    ):
        made.driver.run()
    assert made.cluster.closed


def test_a_folder_that_the_driver_cannot_write_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(
        RunFailed,
        match=rf"^the driver: {tmp_path} cannot be written: File exists .*; make it writable",
    ):
        Bench(tmp_path).driver.run()


def test_a_role_that_never_answers_ends_the_run(tmp_path: Path) -> None:
    made = Bench(tmp_path, start_seconds=30)
    made.cluster.slow = {"generator-1"}
    with pytest.raises(
        RunFailed, match=r"generator-1 starts for more than 30 s: GET: refused; log: "
    ):
        made.driver.run()
