"""Which processes of a run are shown as ended, and which give no sign."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.dashboard.live.stack import STALE_SECONDS, RunProcess, Sighting, signs_of

URL = "http://localhost:9001"
NAMES = ("service", "trainer", "environment-0", f"server-{URL}")


def stack(
    run_ended: bool = False,
    silent: float = 1.0,
    health: str = "good",
    connected: bool = True,
    **trainer: Any,
) -> dict[str, Any]:
    """As a service wrote it down at second 1000."""
    return {
        "time": 1000.0,
        "service": {"run_ended": run_ended, "silent_after": 60.0},
        "trainer": {"registered": True, "seconds_silent": silent, "publishes": True} | trainer,
        "leases": [],
        "environments": [{"env_id": 0, "connected": connected, "seconds_silent": silent}],
        "servers": [{"url": URL, "health": health, "answered": 999.0}],
    }


def states(told: dict[str, Any], sighting: Sighting) -> dict[str, str]:
    return {name: sign["state"] for name, sign in signs_of(told, sighting).items()}


def test_a_run_that_goes_on_has_no_signs() -> None:
    assert signs_of(stack(), Sighting(1000.0)) == {}
    assert signs_of(stack(), Sighting(1000.0 + STALE_SECONDS, written=1000.0)) == {}, (
        "another service writes it down"
    )
    assert signs_of({"time": 1.0}, Sighting(1000.0)) == {}, "of another version"


def test_an_hour_after_the_end_every_process_is_shown_as_ended() -> None:
    for told in (
        stack(run_ended=True),
        stack(run_ended=True, connected=False),
        stack(run_ended=True, health="silent"),
    ):
        assert states(told, Sighting(4600.0, written=1000.0)) == dict.fromkeys(NAMES, "ended")
    found = signs_of(
        stack(run_ended=True, connected=False) | {"stopped": 1001.0},
        Sighting(4600.0, 1000.0, ended=990.0),
    )
    assert [(found[name]["text"], found[name]["seen"]) for name in NAMES] == [
        ("stopped", 1001.0),
        ("the run has ended", 990.0),
        ("disconnected", None),
        ("no sign since the end of the run", 999.0),
    ]


def test_what_a_service_saw_before_it_was_stopped_is_old_at_once() -> None:
    sighting = Sighting(1001.0, written=1000.0)
    assert states(stack() | {"stopped": 1000.0}, sighting) == dict.fromkeys(NAMES, "silent") | {
        "service": "ended"
    }
    assert states(stack(run_ended=True) | {"stopped": 1000.0}, sighting) == dict.fromkeys(
        NAMES, "ended"
    )
    assert signs_of(stack() | {"stopped": 900.0}, Sighting(1000.0)) == {}, (
        "the service has been started again"
    )


def test_a_run_that_was_killed_without_a_word_gives_no_sign() -> None:
    """The machine may have lost the network as well: the processes may still run."""
    found = signs_of(stack(), Sighting(4600.0, written=1000.0))
    assert {name: sign["state"] for name, sign in found.items()} == dict.fromkeys(NAMES, "silent")
    assert [found[name]["seen"] for name in NAMES] == [1000.0, 999.0, 999.0, 999.0]


def test_records_of_killed_processes_say_that_they_have_ended() -> None:
    processes = [
        RunProcess(part, port, exists=False)
        for part, port in (("service", 8000), ("trainer", 0), ("vllm", 9001))
    ]
    found = states(stack(), Sighting(4600.0, written=1000.0, processes=processes))
    assert found == {
        "service": "ended",
        "trainer": "ended",
        "environment-0": "silent",
        f"server-{URL}": "ended",
    }
    elsewhere = [RunProcess("vllm", 9002, exists=False), RunProcess("trainer", exists=None)]
    assert set(states(stack(), Sighting(4600.0, written=1000.0, processes=elsewhere)).values()) == {
        "silent"
    }


def test_while_the_service_answers_only_what_is_silent_has_a_sign() -> None:
    live = Sighting(1000.0)
    assert states(stack(silent=59.0), live) == {}
    assert states(stack(silent=61.0), live) == {"trainer": "silent", "environment-0": "silent"}
    assert states(stack(silent=61.0, publishes=False), live) == {"environment-0": "silent"}
    assert states(stack(silent=121.0, publishes=False), live) == {
        "trainer": "silent",
        "environment-0": "silent",
    }
    training = stack(silent=9000.0, publishes=False) | {"leases": [{"sent": True}]}
    assert states(training, live) == {"environment-0": "silent"}, (
        "a trainer may take any time for a batch"
    )
    assert states(stack(run_ended=True), live) == {"trainer": "ended"}, "the server still serves"
    assert states(stack(run_ended=True, health="silent"), live) == {
        "trainer": "ended",
        f"server-{URL}": "ended",
    }
    assert states(stack(health="silent"), live) == {}, "a fault, which the page names"


def test_a_process_that_is_not_found_here_may_run_in_another_container() -> None:
    processes = [
        RunProcess(part, port, exists=False)
        for part, port in (("trainer", 0), ("environment", 0), ("vllm", 9001))
    ]
    assert states(stack(), Sighting(1000.0, processes=processes)) == {}, "they have just been heard"
    assert states(stack(silent=61.0), Sighting(1000.0, processes=processes)) == {
        "trainer": "ended",
        "environment-0": "ended",
    }


def test_a_recorded_end_counts_at_once() -> None:
    processes = [
        RunProcess("trainer", exists=False, code=137, ended=999.5),
        RunProcess("vllm", 9001, False, 0, 999.0),
    ]
    found = signs_of(stack(), Sighting(1000.0, processes=processes))
    assert found["trainer"] == {"state": "ended", "text": "killed by signal 9", "seen": 999.5}
    assert found[f"server-{URL}"] == {
        "state": "ended",
        "text": "ended with status 0",
        "seen": 999.0,
    }
    assert set(found) == {"trainer", f"server-{URL}"}


def test_a_server_that_the_trainer_owns_is_known_by_the_trainers_record() -> None:
    processes = [RunProcess("trainer", 9001, exists=False, code=0, ended=999.5)]
    assert (
        signs_of(stack(), Sighting(1000.0, processes=processes))[f"server-{URL}"]["state"]
        == "ended"
    )


@given(ahead=st.floats(0, 1e6))
def test_a_clock_that_is_behind_makes_nothing_older(ahead: float) -> None:
    assert Sighting(1000.0, written=1000.0 + ahead).age == 0
    assert signs_of(stack(), Sighting(1000.0, written=1000.0 + ahead)) == {}


@given(
    run_ended=st.booleans(), silent=st.floats(0, 1e5), health=st.sampled_from(["good", "bad", "silent", "unknown"]),
    connected=st.booleans(), registered=st.booleans(), now=st.floats(900, 1e6), live=st.booleans(),
    exists=st.sampled_from([True, False, None]), code=st.sampled_from([None, 0, 137]),
)  # fmt: skip
def test_nothing_that_was_just_heard_is_called_silent_and_nothing_stale_is_called_well(
    run_ended: bool, silent: float, health: str, connected: bool, registered: bool, now: float, live: bool,
    exists: bool | None, code: int | None,
) -> None:  # fmt: skip
    told = stack(run_ended, silent, health, connected, registered=registered)
    code = None if exists else code
    processes = [
        RunProcess(part, 9001, exists, code)
        for part in ("service", "trainer", "environment", "vllm")
    ]
    sighting = Sighting(now, None if live else 1000.0, processes=processes)
    found = states(told, sighting)
    assert set(found) <= set(NAMES)
    if sighting.is_stale:
        assert {"service", f"server-{URL}"} <= set(found)
        assert "trainer" in found or not registered
        assert "environment-0" in found or not connected
    if run_ended:
        assert "silent" not in found.values()
    if not sighting.is_stale and silent + sighting.age <= 60:
        assert "silent" not in found.values()


@pytest.mark.parametrize("url", ["http://10.0.0.2:9001", "http://localhost:9002"])
def test_a_server_elsewhere_is_not_taken_for_the_recorded_one(url: str) -> None:
    told = stack() | {"servers": [{"url": url, "health": "good", "answered": 999.0}]}
    processes = [RunProcess("vllm", 9001, exists=False, code=0, ended=999.0)]
    assert signs_of(told, Sighting(1000.0, processes=processes)) == {}
