"""Evaluations come in behind the steps' back, once each, from whatever service there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from example_trainer.batch.evaluations import Evaluation, EvaluationFeed
from example_trainer.batch.reader import safe_name
from tests.example_trainer.batch.scripted import Scripted

FeedOf = Callable[..., EvaluationFeed]


def told(number: int, **changes: Any) -> dict[str, Any]:
    entry = {
        "id": number,
        "time": 1000.5 + number,
        "env_id": 3,
        "name": "gsm8k_0",
        "weight_version": 12,
        "weight_epoch": 99,
    }
    return entry | {"metrics": {"eval/percent_correct": 0.5}} | changes


@pytest.fixture
def feed_of() -> Iterator[FeedOf]:
    feeds: list[EvaluationFeed] = []

    def make(service: Scripted, **options: Any) -> EvaluationFeed:
        feeds.append(EvaluationFeed(service.url, **options))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


def next_of(feed: EvaluationFeed) -> list[int]:
    feed.ask()
    return [evaluation.id for evaluation in feed.take(30)]


def test_each_comes_once_and_is_asked_for_behind_the_last(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    answers = [
        [],
        [told(4, weight_epoch=49), told(5)],
        [told(5), told(6, weight_epoch=None)],
        [told(6)],
    ]
    service = scripted({"/evaluations": [{"evaluations": entries} for entries in answers]})
    feed = feed_of(service, first_epoch=50)
    assert feed.take() == []
    assert [next_of(feed) for _ in answers] == [[], [5], [6], []], (
        "4 is of weights from before the run"
    )
    assert service.paths() == [f"/evaluations?after={after}" for after in (0, 0, 4, 5)]


def test_a_resumed_run_goes_on_behind_what_it_has_written(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    service = scripted(
        {"/evaluations": [{"evaluations": [told(5), told(6)]}, {"evaluations": [told(6)]}]}
    )
    feed = feed_of(service, seen=[(2, 1002.5), (5, 1005.5)])
    assert [next_of(feed) for _ in range(2)] == [[6], []]
    assert service.paths() == ["/evaluations?after=4", "/evaluations?after=5"]


def test_a_new_run_passes_over_what_was_there_before_it(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    service = scripted(
        {"/evaluations": [{"evaluations": [told(4)]}, {"evaluations": [told(4), told(7)]}]}
    )
    feed = feed_of(service, only_new=True)
    assert next_of(feed) == [7]
    assert service.paths() == ["/evaluations?after=0", "/evaluations?after=3"]


def test_a_service_that_was_restarted_empty_numbers_anew(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    anew = [told(1, time=2000.0), told(2, time=2001.0)]
    answers = [[told(1), told(2), told(3)], anew[2:], anew, anew]
    service = scripted({"/evaluations": [{"evaluations": entries} for entries in answers]})
    feed = feed_of(service)
    assert [next_of(feed) for _ in range(3)] == [[1, 2, 3], [1, 2], []]
    assert service.paths() == [f"/evaluations?after={after}" for after in (0, 2, 0, 1)]


def test_what_is_said_arrives_and_what_is_no_number_does_not(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    metrics = {"accuracy": 0.5, "solved": 3, "passed": True, "note": "text", "nothing": None}
    entries = [
        told(1, metrics=metrics, weight_version=None, env_id=None, weight_epoch=None),
        told(2),
    ]
    feed = feed_of(scripted({"/evaluations": [{"evaluations": entries}]}), only_new=False)
    feed.ask()
    first, second = feed.take(30)
    assert first == Evaluation(1, 1001.5, None, "gsm8k_0", None, {"accuracy": 0.5, "solved": 3})
    assert second == Evaluation(2, 1002.5, 3, "gsm8k_0", 12, {"eval/percent_correct": 0.5}, 99)


@pytest.mark.parametrize("status", [404, 405])
def test_a_service_without_evaluations_is_noticed_once(
    status: int,
    scripted: Callable[..., Scripted],
    feed_of: FeedOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    service = scripted({"/evaluations": [status]})
    feed = feed_of(service)
    assert [next_of(feed) for _ in range(3)] == [[], [], []]
    assert service.paths() == ["/evaluations?after=0"]
    assert caplog.text.count("has no route for evaluations") == 1


def test_a_service_that_fails_is_asked_again_and_each_failure_told_once(
    scripted: Callable[..., Scripted], feed_of: FeedOf, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"evaluations": [told(2), told(3, metrics=[1]), "nothing", told(4)]}
    feed = feed_of(
        scripted({"/evaluations": [None, 500, 500, 401, "no json", {"groups": []}, strange]})
    )
    assert [next_of(feed) for _ in range(8)] == [[], [], [], [], [], [], [2, 4], []]
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert all("could not be read" in warning for warning in warnings)
    named = (
        "disconnected",
        "500",
        "401",
        "JSONDecodeError",
        "KeyError: 'evaluations'",
        "this is none: ",
    )
    assert len(warnings) == len(named)
    assert all(name in warning for name, warning in zip(named, warnings, strict=True))


def test_no_failure_ends_the_thread(
    scripted: Callable[..., Scripted],
    feed_of: FeedOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool that was closed, an address that is none: what httpx raises is not always its own."""
    service = scripted({"/evaluations": [{"evaluations": [told(1)]}]})
    feed = feed_of(service)
    answer, failures = (
        feed._http.get,
        [RuntimeError("the pool is closed"), httpx.InvalidURL("no address")],
    )

    def get(*arguments: Any, **options: Any) -> httpx.Response:
        if failures:
            raise failures.pop(0)
        return answer(*arguments, **options)

    monkeypatch.setattr(feed._http, "get", get)
    assert [next_of(feed) for _ in range(3)] == [[], [], [1]]
    assert "RuntimeError: the pool is closed" in caplog.text
    assert "InvalidURL: no address" in caplog.text


def test_a_new_run_whose_service_is_away_at_first_goes_by_epochs(
    scripted: Callable[..., Scripted], feed_of: FeedOf
) -> None:
    service = scripted(
        {"/evaluations": [500, {"evaluations": [told(4, weight_epoch=49), told(7)]}]}
    )
    feed = feed_of(service, first_epoch=50, only_new=True)
    assert next_of(feed) == [7], "4 is another run's"


@pytest.mark.parametrize(
    ("name", "safe"),
    [("gsm8k_0", "gsm8k_0"), ("a b/c:d", "a_b_c_d"), ("Überall", "_berall"), ("", "_")],
)
def test_names_for_dashboards(name: str, safe: str) -> None:
    assert safe_name(name) == safe
