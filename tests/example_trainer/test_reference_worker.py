"""The loop of a reference worker, against a service with scripted answers: its requests, results
and log lines.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from example_trainer.batch.client import ServiceConnection
from example_trainer.batch.groups import GroupError
from example_trainer.config import ReferenceWorkerOptions
from example_trainer.errors import ConfigError, RolloutServiceError
from example_trainer.process import StopRequested, StopSignal
from example_trainer.reference_worker import MOST_TOKENS, Pace, Worker, parse_arguments
from example_trainer.training.reference import ReferenceScorer, ReferenceSettings
from tests.example_trainer.batch.scripted import Scripted
from vllm_patching.protocol.timeline import Activity, open_timeline

LEASE, DONE = "/reference/lease", "/reference/done"
SETTINGS = ReferenceSettings("m", "float32", "reference", 31)
TAKEN = {"accepted": [], "refused": []}


def lease(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"groups": list(groups), "waiting": 0, "reference": None} | more


def group(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "tokens": [[1, number]],
        "masks": [[-100, number]],
        "sampling_params": None,
    }


class Scorer:
    """In the model's place. A group of the token 13 cannot be scored, and with 5 a signal comes."""

    def __init__(self, stop: StopSignal) -> None:
        self.stop, self.asked = stop, list[tuple[int, ReferenceSettings]]()

    def rows(self, one: Mapping[str, Any], settings: ReferenceSettings) -> list[list[float]]:
        token = one["tokens"][0][1]
        self.asked.append((token, settings))
        if token == 13:
            raise GroupError("unlucky")
        if token == 5:
            self.stop.request(signal.SIGTERM)
        return [[1.0, -token / 8]]


@pytest.fixture
def worker_of() -> Iterator[Callable[..., tuple[Worker, Scripted, Scorer]]]:
    closing: list[Callable[[], None]] = []

    def make(
        answers: dict[str, list[Any]], timeout: float = 60.0
    ) -> tuple[Worker, Scripted, Scorer]:
        server, stop = Scripted(answers), StopSignal()
        stop.defer()
        service, scorer = (
            ServiceConnection(server.url, stop, None, timeout, "reference worker"),
            Scorer(stop),
        )
        closing.extend([service.close, server.__exit__])
        activity, options = (
            Activity(open_timeline("reference", "w")),
            ReferenceWorkerOptions(lease_seconds=8),
        )
        return (
            Worker(cast(ReferenceScorer, scorer), SETTINGS, service, options, "w", activity),
            server,
            scorer,
        )

    yield make
    for close in closing:
        close()


MakeWorker = Callable[..., tuple[Worker, Scripted, Scorer]]


def test_what_is_held_when_a_signal_comes_is_finished_and_nothing_more_is_asked_for(
    worker_of: MakeWorker,
) -> None:
    registered = {"temperature": 0.5}
    script = [
        lease(reason="no trainer has registered"),
        lease(group(5), group(6), reference=registered),
    ]
    worker, server, scorer = worker_of({LEASE: script, DONE: [TAKEN]})
    with pytest.raises(StopRequested):
        worker.work(worker.service.stop)
    assert server.paths() == [LEASE, LEASE, DONE, DONE]
    asked = dict(server.seen[0][1])
    assert "parts" in asked.pop("follows")
    assert asked == {"worker": "w", "model": "m", "max_tokens": 1, "seconds": 8.0}
    assert [body for path, body in server.seen if path == DONE] == [
        {"worker": "w", "groups": [{"id": number, "ref_logprobs": [[1.0, -number / 8]]}]}
        for number in (5, 6)
    ]
    assert {settings.temperature for _, settings in scorer.asked} == {0.5}
    assert (worker.groups, worker.tokens) == (2, 4)


def test_a_group_that_cannot_be_scored_is_given_back_with_the_reason(
    worker_of: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {"accepted": [], "refused": [{"id": 5, "reason": "it was dropped"}]}
    worker, server, _ = worker_of(
        {LEASE: [lease(group(13)), lease(group(5))], DONE: [TAKEN, refused]}
    )
    with pytest.raises(StopRequested):
        worker.work(worker.service.stop)
    assert server.seen[1][1] == {"worker": "w", "groups": [{"id": 13, "unusable": "unlucky"}]}
    assert "Nothing can be computed for group 13: unlucky" in caplog.text
    assert "does not take group 5: it was dropped" in caplog.text


def test_what_it_waits_for_is_said_once(
    worker_of: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "example_trainer")
    none = lease(reason="no trainer has registered")
    worker, server, _ = worker_of(
        {LEASE: [none, none, lease(), lease(), lease(group(5))], DONE: [TAKEN]}
    )
    with pytest.raises(StopRequested):
        worker.work(worker.service.stop)
    said = [
        record.message for record in caplog.records if record.name.startswith("example_trainer")
    ]
    assert said == [
        "Waiting: no trainer has registered",
        f"Working for the trainer of {server.url}",
    ]


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (409, ConfigError, "POST .*/reference/lease 409"),
        (404, ConfigError, "POST .*/reference/lease 404"),
        (401, RolloutServiceError, "refuses this reference worker"),
        ({"status": "ok"}, RolloutServiceError, "answered no list of groups"),
        (lease(reference={"dtype": "bfloat16"}), ConfigError, "the trainer computes in bfloat16"),
        (lease(reference={"vocab_size": 77}), ConfigError, "a vocabulary of 31 ids here"),
    ],
)
def test_what_cannot_be_worked_for_ends_it_in_a_line(
    worker_of: MakeWorker, answer: Any, kind: type[Exception], told: str
) -> None:
    worker, server, _ = worker_of({LEASE: [answer]})
    with pytest.raises(kind, match=told) as caught:
        worker.work(worker.service.stop)
    assert "\n" not in str(caught.value)
    assert server.paths() == [LEASE]


def test_a_service_that_is_away_is_waited_for_and_no_longer_than_its_deadline(
    worker_of: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker, server, _ = worker_of({LEASE: [None, 503, lease(group(5))], DONE: [None, TAKEN]})
    with pytest.raises(StopRequested):
        worker.work(worker.service.stop)
    assert server.paths() == [LEASE, LEASE, LEASE, DONE, DONE], (
        "an answer is handed in though a signal has come"
    )
    assert "Waiting for the rollout service at" in caplog.text
    away, _, _ = worker_of({LEASE: [503]}, timeout=0.3)
    with pytest.raises(
        RolloutServiceError,
        match=r"POST /reference/lease: answered 503 .* for \d+ s, giving up; .*--service-timeout",
    ):
        away.work(away.service.stop)


def test_the_pace_is_that_of_the_machine() -> None:
    pace = Pace(lease_seconds=60)
    assert pace.next_tokens == 1, "nothing is known yet: one group"
    pace.computed(1000, 10.0)
    assert pace.next_tokens == 1500
    pace.computed(8000, 0.1)
    assert pace.next_tokens == int(15 * 8500 / 5.1)
    pace.computed(10**9, 1e-3)
    assert pace.next_tokens == MOST_TOKENS
    slow = Pace(lease_seconds=1)
    slow.computed(1, 1000)
    assert slow.next_tokens == 1


def test_its_flags_are_the_trainers_and_its_own() -> None:
    config, options = parse_arguments(
        ["--model-name", "m", "--deterministic", "--name", "one", "--logprob-chunk", "7"]
    )
    assert (config.model_name, config.deterministic, config.logprob_chunk, options.called) == (
        "m",
        True,
        7,
        "one",
    )
    assert parse_arguments(["--model-name", "m"])[1].called


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--model-name is required"),
        (["--model-nam", "m"], "unknown flag --model-nam; did you mean --model-name?"),
        (["--model-name", "m", "--learning-rate", "1"], "unknown flag --learning-rate"),
        (
            ["--model-name", "m", "--lease-seconds", "0"],
            "--lease-seconds '0': input should be greater than 0",
        ),
        (
            ["--model-name", "m", "--atropos-url", "here"],
            "--atropos-url 'here': 'here' does not begin with http:// or https://",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(arguments)
    assert str(caught.value).startswith(told)
