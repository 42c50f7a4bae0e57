"""The pure function that names the servers which an update goes on without."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.weight_bridge.fleet import Evidence, Loss, Progress, Reason, diagnose

PATIENCE = 10.0
BROKEN = st.sampled_from(
    [
        None,
        Reason("vLLM's engine process has died"),
        Reason("was restarted", Loss.RESTARTED),
        Reason("another trainer has taken it over", Loss.TAKEN_OVER),
    ]
)
FAILURES = st.sampled_from(
    [None, Reason("refused it: another checksum"), Reason("gave it up", Loss.GAVE_UP)]
)
SECONDS = st.floats(0.0, 3 * PATIENCE)
EVIDENCE = st.builds(
    Evidence,
    answers=st.booleans(),
    broken=BROKEN,
    failure=FAILURES,
    late=st.booleans(),
    gave_up=st.sampled_from(["", "gave version 2 up: nothing from the trainer"]),
    absent=st.booleans(),
    rank_errors=st.sampled_from(["", "cannot reach the rendezvous"]),
    silent=SECONDS,
    received=st.integers(0, 3),
    idle=st.booleans(),
    stalled=SECONDS,
    behind=SECONDS,
)
SERVERS = st.dictionaries(st.sampled_from("abcd"), EVIDENCE, max_size=4)
ERRORS = st.sampled_from(["", "the transfer was broken off"])


@given(SERVERS, ERRORS)
def test_each_named_server_has_evidence_against_it(
    servers: dict[str, Evidence], error: str
) -> None:
    lost = diagnose(servers, PATIENCE, error)
    assert lost.keys() <= servers.keys()
    for url, reason in lost.items():
        one = servers[url]
        assert reason.text
        facts = one.broken, one.failure, one.gave_up, one.absent
        slow = max(one.silent, one.stalled, one.behind) >= PATIENCE
        assert any(facts) or slow or (error and (not one.answers or len(servers) == 1))


@given(SERVERS, ERRORS)
def test_a_server_that_is_broken_or_failed_in_time_is_always_named(
    servers: dict[str, Evidence], error: str
) -> None:
    lost = diagnose(servers, PATIENCE, error)
    for url, one in servers.items():
        if one.broken is not None:
            assert lost[url] == one.broken
        elif one.failure is not None and not one.late:
            assert url in lost
            gave_up = one.failure.loss is Loss.GAVE_UP
            assert gave_up == (lost[url].loss is Loss.GAVE_UP)
            assert gave_up or (lost[url].loss is Loss.AWAY) == (not one.answers)


@given(SERVERS, ERRORS)
def test_no_server_is_named_for_a_symptom_while_another_one_has_failed(
    servers: dict[str, Evidence], error: str
) -> None:
    failed = {url for url, one in servers.items() if one.broken or one.failure}
    if failed:
        assert diagnose(servers, PATIENCE, error).keys() <= failed


@given(SERVERS, ERRORS, st.randoms())
def test_the_order_of_the_servers_does_not_matter(
    servers: dict[str, Evidence], error: str, random: Random
) -> None:
    items = list(servers.items())
    random.shuffle(items)
    assert diagnose(dict(items), PATIENCE, error) == diagnose(servers, PATIENCE, error)


@given(EVIDENCE, st.sampled_from(["sending failed", "no answer"]))
def test_after_an_error_a_single_server_is_lost(one: Evidence, error: str) -> None:
    assert set(diagnose({"a": one}, PATIENCE, error)) == {"a"}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), SECONDS)
def test_a_running_update_waits_for_servers_within_the_patience(
    amounts: list[int], seconds: float
) -> None:
    servers = {
        str(place): Evidence(received=amount, behind=min(seconds, PATIENCE / 2))
        for place, amount in enumerate(amounts)
    }
    assert diagnose(servers, PATIENCE) == {}


def test_an_error_that_fits_every_server_names_none() -> None:
    servers = {url: Evidence() for url in "abc"}
    assert diagnose(servers, PATIENCE, "sending failed: Connection reset") == {}


LATE = Evidence(failure=Reason("is 10 s behind the others"), late=True)


@pytest.mark.parametrize(
    ("servers", "error", "lost"),
    [
        ({"a": Evidence(broken=Reason("died")), "b": Evidence(silent=99.0)}, "", "a"),
        ({"a": Evidence(silent=99.0), "b": Evidence(behind=99.0)}, "", "a"),
        ({"a": Evidence(idle=True, stalled=10.0), "b": Evidence(behind=99.0)}, "", "a"),
        ({"a": Evidence(idle=True, stalled=99.0)}, "", ""),  # it may wait for a step of the engine
        ({"a": Evidence(behind=10.0), "b": Evidence()}, "", "a"),
        ({"a": Evidence(answers=False), "b": Evidence()}, "broken off", "a"),
        ({"a": Evidence(absent=True), "b": Evidence(answers=False)}, "not formed", "a"),
        ({"a": Evidence(gave_up="gave up"), "b": Evidence(absent=True)}, "not formed", "a"),
        ({"a": replace(LATE, idle=True), "b": LATE}, "broken off", "a"),
        ({"a": LATE, "b": LATE}, "broken off", "ab"),
        ({"a": LATE, "b": Evidence(failure=Reason("refused it"))}, "broken off", "ab"),
    ],
)
def test_the_best_evidence_decides(servers: dict[str, Evidence], error: str, lost: str) -> None:
    assert sorted(diagnose(servers, PATIENCE, error)) == list(lost)


def test_a_server_that_did_not_come_is_named_with_its_own_error() -> None:
    absent = Evidence(absent=True, rank_errors="cannot reach the rendezvous")
    servers = {"a": absent, "b": Evidence(absent=True)}
    texts = {url: reason.text for url, reason in diagnose(servers, PATIENCE, "not formed").items()}
    assert texts == {
        "a": "did not come to the cohort: cannot reach the rendezvous",
        "b": "did not come to the cohort: not formed",
    }


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.floats(0.1, 4.0)), max_size=30))
def test_a_server_is_late_once_it_is_behind_the_first_for_the_patience(
    steps: list[tuple[int, int, float]],
) -> None:
    progress, now = Progress(), 0.0
    amounts = {"a": 0, "b": 0, "c": 0}
    history = [(0.0, dict(amounts))]
    for which, more, seconds in steps:
        now += seconds
        amounts["abc"[which]] += more
        history.append((now, dict(amounts)))
        servers = {url: Evidence(received=amount) for url, amount in amounts.items()}
        late = diagnose(progress.timed(servers, now), PATIENCE)
        passed = {
            url: [at for at, then in history if max(then.values()) > amounts[url]]
            for url in amounts
        }  # the times at which another server had more than this one has now
        assert set(late) == {
            url for url, times in passed.items() if times and now - times[0] >= PATIENCE
        }


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0.1, 9.0)), max_size=30))
def test_a_server_stands_still_since_its_last_change(
    looks: list[tuple[int, bool, float]],
) -> None:
    progress, now, changed = Progress(), 0.0, 0.0
    last: tuple[int, bool] | None = None
    for received, idle, seconds in looks:
        now += seconds
        if (received, idle) != last:
            last, changed = (received, idle), now
        timed = progress.timed({"a": Evidence(received=received, idle=idle)}, now)
        assert timed["a"].stalled == now - changed


@pytest.mark.parametrize("size", [1, 2, 3])
def test_if_all_are_equally_slow_none_is_late(size: int) -> None:
    progress = Progress()
    servers = {url: Evidence(received=7) for url in "abc"[:size]}
    for now in range(0, 100, 5):
        assert diagnose(progress.timed(servers, float(now)), PATIENCE) == {}
