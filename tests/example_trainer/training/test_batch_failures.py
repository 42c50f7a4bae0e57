"""A batch that ends trainers is set aside, and no other end of a trainer costs a batch.

Real service, real trainers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.batch.reader import BatchReader
from example_trainer.errors import BatchError, BridgeError, ConfigError, NonFiniteError, RankError
from example_trainer.process import StopRequested
from example_trainer.training import trainer
from example_trainer.training.trainer import BatchFailures
from example_trainer.weight_bridge.base import NoBridge
from tests.conftest import Processes
from tests.example_trainer.batch.registration import group
from tests.example_trainer.batch.waiting_trainer import batches_of, registration
from tests.example_trainer.in_process import STEPS, Killed, Trainers
from tests.example_trainer.test_grpo import made_up_group

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

EACH = ("--checkpoint-interval", "1", "--resume", "auto")


def set_aside(url: str) -> list[dict[str, Any]]:
    """Ask the service for the batches that it hands out no more."""
    answer: dict[str, Any] = httpx.get(f"{url}/batch/set-aside", timeout=120).json()
    assert answer["total"] == len(answer["batches"])
    return list(answer["batches"])


def failing_on(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the step on the batch of one group fail."""
    take_step = trainer.guarded_step
    bad = {tuple(row) for row in made_up_group(number)["tokens"]}

    def fail(model: Any, optimizer: Any, minibatches: Any, *rest: Any) -> Any:
        trained = {tuple(one.tokens.tolist()) for bins in minibatches for one in bins}
        if any(row == tokens[: len(row)] for tokens in trained for row in bad):
            raise error
        return take_step(model, optimizer, minibatches, *rest)

    monkeypatch.setattr(trainer, "guarded_step", fail)


def test_a_nan_ends_two_trainers_and_the_third_goes_on_behind_its_batch(trainers: Trainers) -> None:
    trainers.faults[1] = lambda logprobs: logprobs * torch.nan
    trainers.post(*range(STEPS + 1))
    for _ in range(2):
        assert "batches_set_aside" not in httpx.get(f"{trainers.url}/status", timeout=120).json()
        with pytest.raises(NonFiniteError):
            trainers.train(*EACH)
    (aside,) = set_aside(trainers.url)
    assert aside["batch_id"] == 2
    assert aside["reason"].startswith("NonFiniteError: ")
    assert [(one["id"], one["sequences"]) for one in aside["groups"]] == [(1, 4)]
    assert trainers.train(*EACH)
    assert trainers.line == [0, 2, 3, 4]
    assert httpx.get(f"{trainers.url}/status", timeout=120).json()["batches_set_aside"] == 1
    assert "rollout_batches_set_aside 1.0" in httpx.get(f"{trainers.url}/metrics", timeout=120).text
    kept = httpx.get(f"{trainers.url}/batch/set-aside", params={"batch_id": 2}, timeout=120).json()
    assert kept["batch"][0]["tokens"] == made_up_group(1)["tokens"]
    assert (
        httpx.get(
            f"{trainers.url}/batch/set-aside", params={"batch_id": 1}, timeout=120
        ).status_code
        == 404
    )


def test_too_many_skipped_batches_and_an_error_while_packing_count_too(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BatchReader.read
    bad = made_up_group(1)["tokens"]

    def fail(reader: BatchReader, groups: Any, *rest: Any) -> Any:
        if groups[0]["tokens"] == bad:
            raise IndexError("no error that anybody thought of")
        return read(reader, groups, *rest)

    monkeypatch.setattr(BatchReader, "read", fail)
    foreign = made_up_group(0)
    foreign["tokens"][0][-1] = foreign["masks"][0][-1] = 61
    httpx.post(f"{trainers.url}/scored_data", json=foreign, timeout=120).raise_for_status()
    trainers.post(1, *range(2, STEPS + 2))
    for _ in range(2):
        with pytest.raises(BatchError):
            trainers.train(*EACH, "--max-skipped-batches", "0")
    for _ in range(2):
        with pytest.raises(IndexError):
            trainers.train(*EACH)
    assert [one["batch_id"] for one in set_aside(trainers.url)] == [1, 2]
    assert trainers.train(*EACH)
    assert trainers.line == list(range(2, STEPS + 2))


@pytest.mark.parametrize(
    "error",
    [Killed(), RankError("another rank is gone"), ConfigError("the loss function: IndexError")],
)
def test_an_end_of_unknown_cause_counts_as_a_kill(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    trainers.post(*range(STEPS + 1))
    with monkeypatch.context() as patched:
        failing_on(patched, 1, error)
        for time in range(5):
            assert set_aside(trainers.url) == [], time
            if isinstance(error, Killed):
                assert not trainers.train(*EACH)
            else:
                with pytest.raises(type(error)):
                    trainers.train(*EACH)
    assert trainers.train(*EACH)
    assert trainers.line == [0, 2, 3, 4]
    (aside,) = set_aside(trainers.url)
    assert "without a report" in aside["reason"]


@pytest.mark.parametrize("error", [StopRequested(15), BridgeError("no server is there")])
def test_a_signal_and_trouble_elsewhere_are_not_the_batchs_fault(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    trainers.post(*range(STEPS))

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        if isinstance(error, StopRequested):
            failing_on(patched, 0, error)
        else:
            patched.setattr(NoBridge, "turn", fail)
        for _ in range(6):
            with pytest.raises(type(error)):
                trainers.train(*EACH)
            assert trainers.stats()["leases"][0]["sent"]
    assert set_aside(trainers.url) == []
    assert trainers.train(*EACH)
    assert trainers.line == list(range(STEPS))


def test_five_kills_set_a_batch_aside_and_four_do_not(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    processes.start_service(port)
    url = f"http://127.0.0.1:{port}"
    for number in (5, 6):
        httpx.post(f"{url}/scored_data", json=group(number), timeout=60).raise_for_status()
    command = [sys.executable, "-m", "tests.example_trainer.batch.waiting_trainer", url, tmp_path]
    for _ in range(5):
        assert set_aside(url) == []
        trainer = processes.start("trainer", command)
        processes.wait_for_text(trainer, "training on [5, 5]", seconds=120)
        processes.kill(trainer)
    survivor = batches_of(url)
    survivor.register(registration(str(tmp_path)))
    assert survivor.next(0).minibatches[0][0].targets.tolist() == [6, 6]
    survivor.acknowledge(1)
    survivor.close()
    assert [one["groups"][0]["id"] for one in set_aside(url)] == [0]


def test_a_signal_before_a_fetched_batch_is_trained_on_counts_nothing(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    processes.start_service(port)
    url = f"http://127.0.0.1:{port}"
    httpx.post(f"{url}/scored_data", json=group(5), timeout=60).raise_for_status()
    for _ in range(6):
        batches = batches_of(url)
        batches.register(registration(str(tmp_path)))
        batches.begin(0)
        processes.wait_until(
            "a batch",
            lambda made=batches: None if made._preparing.ready else "none is there",
            seconds=60,
        )
        BatchFailures(batches).report(StopRequested(15), None)
        batches.close()
    assert set_aside(url) == []
    counts = httpx.get(f"{url}/stats", timeout=60).json()["leases"]
    assert [lease["batch_id"] for lease in counts] == [1]
