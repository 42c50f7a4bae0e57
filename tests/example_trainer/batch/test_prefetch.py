"""Batches come ahead of the training, in order; a failure is raised at the call for its batch; and
nothing fetched is lost.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.batch import prefetch
from example_trainer.batch.client import FetchedBatch, Interrupted, RolloutClient, TrainedBatch
from example_trainer.batch.prefetch import Batches, Upkeep
from example_trainer.batch.reader import BatchReader, ReadyBatch
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, RolloutServiceError, TrainerError
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopRequested, StopSignal
from tests.conftest import Processes
from tests.example_trainer.batch.waiting_trainer import batches_of, registration

WAIT = 60.0
LAST = 1000


def group(number: int, version: int = 0) -> dict[str, Any]:
    return {
        "tokens": [[1, number], [1, number]],
        "masks": [[-100, number], [-100, number]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5], [1.0, -0.5]],
        "weight_versions": [version, version],
    }


BAD = {"tokens": []}


class Client:
    """Hands out what a test put in, one batch for each call; waits for more, as the real one does."""

    def __init__(self, *batches: dict[str, Any] | BaseException) -> None:
        self.stop = StopSignal()
        self.queue = deque(batches)
        self.fetched = 0
        self.acknowledged: list[tuple[int, int, str | None]] = []
        self.reports: list[Any] = []
        self.changed = threading.Condition()
        self.interrupted = self.closed = False
        self.waits: list[float] = []
        self.threads: set[str] = set()

    def put(self, *batches: dict[str, Any] | BaseException) -> None:
        with self.changed:
            self.queue.extend(batches)
            self.changed.notify_all()

    def next_batch(self, waited: Callable[[], float]) -> FetchedBatch:
        self.threads.add(threading.current_thread().name)
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.interrupted, WAIT)
            self.waits.append(waited())
            if not self.queue:
                raise Interrupted
            got = self.queue.popleft()
            self.fetched += 1
            self.changed.notify_all()
        if isinstance(got, BaseException):
            raise got
        return FetchedBatch([got], TrainedBatch(self.fetched, 7), queue_size=len(self.queue))

    def wait_until_fetched(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.fetched >= count, WAIT)

    def acknowledge(
        self,
        lease: TrainedBatch,
        weight_version: int,
        skipped: str | None = None,
        report: dict[str, Any] | None = None,
    ) -> None:
        self.acknowledged.append((lease.id, weight_version, skipped))
        self.reports.append(report)

    def keep(
        self, lease: TrainedBatch, weight_version: int, report: dict[str, Any] | None = None
    ) -> None:
        """The held batches are in `Batches`."""
        self.reports.append(report)

    def interrupt(self) -> None:
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()

    def close(self) -> None:
        self.closed = True


Make = Callable[..., Batches]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Batches] = []

    def of(client: Client, ahead: bool = True, last: int = LAST) -> Batches:
        config = TrainerConfig.model_validate({"model_name": "m"})
        reader = BatchReader(
            config, vocab_size=1000, tokens_per_bin=64, lives=[TrainerSession(5, 0)]
        )
        made.append(
            Batches(
                cast(RolloutClient, client),
                Ranks(),
                reader,
                torch.device("cpu"),
                last_version=last,
                ahead=ahead,
            )
        )
        return made[-1]

    yield of
    for batches in made:
        batches.close()


def number_of(batch: ReadyBatch) -> int:
    ((one,),) = batch.minibatches
    return int(one.targets[0])


class TestOrder:
    def test_the_next_batch_is_there_before_it_is_asked_for(self, make: Make) -> None:
        client = Client(group(5), group(6), group(7))
        batches = make(client)
        first = batches.next(0)
        assert (number_of(first), first.lease, first.queue_size) == (5, TrainedBatch(1, 7), 2)
        client.wait_until_fetched(2)
        batches.acknowledge(1)
        second = batches.next(1)
        assert number_of(second) == 6
        client.wait_until_fetched(3)
        assert (second.figures.tokens, second.figures.age_max, second.figures.bins) == (2, 1, 1)
        assert client.threads == {"batches"}, "the trainer itself never talks while it could train"

    def test_one_batch_ahead_and_no_more(self, make: Make) -> None:
        client = Client(*(group(n) for n in range(5, 15)))
        batches = make(client)
        for step in range(5):
            assert number_of(batches.next(step)) == 5 + step
            client.wait_until_fetched(step + 2)
            batches.acknowledge(step + 1)
            assert client.fetched == step + 2

    def test_nothing_is_fetched_ahead_where_it_would_be_too_old(self, make: Make) -> None:
        client = Client(group(5), group(6))
        batches = make(client, ahead=False)
        for step in range(2):
            batches.next(step)
            batches.acknowledge(step + 1)
            assert client.fetched == step + 1

    def test_nothing_is_fetched_for_after_the_end(self, make: Make) -> None:
        client = Client(group(5), group(6), group(7))
        batches = make(client, last=2)
        batches.next(0)
        batches.acknowledge(1)
        batches.next(1)
        batches.close()
        assert client.fetched == 2

    def test_a_batch_is_acknowledged_before_the_next(self, make: Make) -> None:
        batches = make(Client(group(5), group(6)))
        with pytest.raises(RuntimeError, match="no batch has been taken"):
            batches.acknowledge(1)
        batches.next(0)
        with pytest.raises(RuntimeError, match="has not been acknowledged"):
            batches.next(1)

    def test_the_first_batch_can_be_asked_for_before_it_is_waited_for(self, make: Make) -> None:
        client = Client(group(5))
        batches = make(client)
        batches.begin(0)
        client.wait_until_fetched(1)
        assert number_of(batches.next(0)) == 5

    def test_a_skipped_batch_that_is_held_is_owed_too(self, make: Make) -> None:
        client = Client(BAD)
        batches = make(client)
        with pytest.raises(BatchError):
            batches.next(0)
        batches.acknowledge(0, skipped="nothing to train on", hold=True)
        assert (batches.held, batches.has_unacknowledged, client.acknowledged) == ((), True, [])
        batches.release()
        assert (batches.has_unacknowledged, client.acknowledged) == (
            False,
            [(1, 0, "nothing to train on")],
        )

    @settings(max_examples=30)
    @given(st.lists(st.booleans(), max_size=12), st.booleans())
    def test_every_batch_comes_once_and_bad_ones_are_named(
        self, good: list[bool], ahead: bool
    ) -> None:
        client = Client(
            *(group(5 + n) if fine else BAD for n, fine in enumerate(good)),
            RolloutServiceError("gone"),
        )
        config = TrainerConfig.model_validate({"model_name": "m"})
        reader = BatchReader(config, vocab_size=1000, tokens_per_bin=64)
        batches = Batches(
            cast(RolloutClient, client),
            Ranks(),
            reader,
            torch.device("cpu"),
            last_version=LAST,
            ahead=ahead,
        )
        version, found = 0, []
        for fine in good:
            if fine:
                found.append(number_of(batches.next(version)))
                version += 1
                batches.acknowledge(version)
            else:
                with pytest.raises(BatchError, match="holds nothing to train on"):
                    batches.next(version)
                batches.acknowledge(version, skipped="bad")
        with pytest.raises(RolloutServiceError, match="gone"):
            batches.next(version)
        batches.close()
        assert found == [5 + n for n, fine in enumerate(good) if fine]
        versions = [sum(good[: n + 1]) for n in range(len(good))]
        skipped = [None if fine else "bad" for fine in good]
        assert client.acknowledged == list(
            zip(range(1, len(good) + 1), versions, skipped, strict=True)
        )


class TestFaults:
    @pytest.mark.parametrize(
        "error", [RolloutServiceError("gone"), StopRequested(15), KeyError("a bug")]
    )
    def test_what_ends_the_thread_is_raised_where_a_batch_is_asked_for(
        self, make: Make, error: BaseException
    ) -> None:
        client = Client(group(5), error)
        batches = make(client)
        batches.next(0)
        batches.acknowledge(1)
        for _ in range(2):
            with pytest.raises(type(error)):
                batches.next(1)

    def test_a_signal_ends_the_wait(self, make: Make) -> None:
        client = Client()
        client.stop.request(15)
        with pytest.raises(StopRequested):
            make(client).next(0)

    def test_closing_ends_a_thread_that_waits(self, make: Make) -> None:
        before = threading.enumerate()
        client = Client(group(5))
        batches = make(client)
        batches.next(0)
        batches.close()
        assert client.closed
        assert not any(
            thread.name == "batches" and thread.is_alive()
            for thread in threading.enumerate()
            if thread not in before
        )

    def test_a_thread_that_does_not_end_is_not_waited_for_for_ever(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(prefetch, "CLOSE_SECONDS", 0.1)
        client, deaf = Client(), threading.Event()
        monkeypatch.setattr(client, "next_batch", lambda _: deaf.wait(WAIT))
        client.stop.request(15)
        batches = make(client)
        with pytest.raises(StopRequested):
            batches.next(0)
        batches.close()
        assert "is given up after 0 s" in caplog.text
        deaf.set()


class TestUpkeep:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefetch, "CALL_SECONDS", 0.0)

    def test_it_is_done_by_who_waits_and_as_often_as_it_is_due(self, make: Make) -> None:
        client, done = Client(), []
        due = iter([True, False, True])

        def work() -> None:
            done.append(threading.current_thread())
            if len(done) == 2:
                client.put(group(5))

        assert number_of(make(client).next(0, Upkeep(lambda: next(due, False), work))) == 5
        assert done == [threading.main_thread()] * 2

    @pytest.mark.parametrize("part", ["due", "work"])
    def test_what_goes_wrong_in_it_ends_the_wait(self, make: Make, part: str) -> None:
        def fail() -> bool:
            raise TrainerError("the server has gone for good")

        due: Callable[[], bool] = fail if part == "due" else lambda: True
        with pytest.raises(TrainerError, match="for good"):
            make(Client()).next(0, Upkeep(due, fail))

    def test_the_thread_is_told_how_long_the_trainer_has_waited(self, make: Make) -> None:
        """Not how long it has itself: a batch that is fetched ahead may take as long as a step."""
        client = Client(group(5))
        batches = make(client)
        batches.next(0)
        client.put(group(6))
        client.wait_until_fetched(2)
        assert client.waits[1] == 0.0


class TestRealService:
    @pytest.fixture
    def url(self, processes: Processes, free_port: Callable[[], int]) -> str:
        port = free_port()
        processes.start(
            "service",
            [
                sys.executable,
                "-m",
                "atroposlib.cli.run_api",
                "--port",
                str(port),
                "--store",
                "memory",
            ],
        )
        processes.wait_for_http(f"http://127.0.0.1:{port}/", seconds=WAIT)
        return f"http://127.0.0.1:{port}"

    def post(self, url: str, number: int, version: int = 0) -> dict[str, Any]:
        answer = httpx.post(f"{url}/scored_data", json=group(number, version), timeout=WAIT)
        answer.raise_for_status()
        return cast(dict[str, Any], answer.json())

    def leased(self, url: str) -> int:
        return len(httpx.get(f"{url}/stats", timeout=WAIT).json()["leases"])

    def wait_for_two_leases(self, processes: Processes, url: str) -> None:
        processes.wait_until(
            "two leases",
            lambda: None if self.leased(url) == 2 else f"there are {self.leased(url)}",
            seconds=WAIT,
        )

    def test_what_was_fetched_and_not_trained_on_comes_to_the_next_trainer(
        self, processes: Processes, url: str, tmp_path: Path
    ) -> None:
        first = batches_of(url)
        first.register(registration(str(tmp_path)))
        for number in (5, 6, 7):
            self.post(url, number)
        assert number_of(first.next(0)) == 5
        first.acknowledge(1)
        assert number_of(first.next(1)) == 6
        self.wait_for_two_leases(processes, url)
        first.close()
        second = batches_of(url)
        second.register(registration(str(tmp_path), starting_step=1))
        for step, number in enumerate((6, 7), start=1):
            assert number_of(second.next(step)) == number
            second.acknowledge(step + 1)
        second.close()

    def test_nothing_is_lost_when_a_trainer_is_killed(
        self, processes: Processes, url: str, tmp_path: Path
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.example_trainer.batch.waiting_trainer",
            url,
            tmp_path,
        ]
        trainer = processes.start("trainer", command)
        processes.wait_until(
            "the trainer to register",
            lambda: (
                None
                if httpx.get(f"{url}/info", timeout=WAIT).json()["batch_size"] == 2
                else "it has not"
            ),
            seconds=WAIT,
        )
        for number in (5, 6, 7):
            self.post(url, number)
        processes.wait_for_text(trainer, "training on [5, 5]", seconds=WAIT)
        self.wait_for_two_leases(processes, url)
        processes.kill(trainer)
        again = batches_of(url)
        again.register(registration(str(tmp_path)))
        for step, number in enumerate((5, 6, 7)):
            assert number_of(again.next(step)) == number
            again.acknowledge(step + 1)
        again.close()

    @pytest.mark.parametrize(("staleness", "hold"), [(1, False), (1, True), (2, True)])
    def test_training_goes_on_with_a_bound_on_age_and_nothing_is_older(
        self, url: str, tmp_path: Path, staleness: int, hold: bool
    ) -> None:
        """An environment posts whenever the service wants a group, under the weights that are
        served: those acknowledged. With `hold`, a checkpoint is being written all the while."""
        batches = batches_of(url)
        batches.register(registration(str(tmp_path), max_staleness=staleness))
        served, done, trouble = [0], threading.Event(), []

        def environment() -> None:
            try:
                while not done.is_set():
                    body = {
                        "max_token_length": 64,
                        "desired_name": "e",
                        "weight": 1.0,
                        "group_size": 2,
                    }
                    answer = httpx.post(f"{url}/register-env", json=body, timeout=WAIT).json()
                    if answer["status"] == "success":
                        break
                    done.wait(0.01)
                number = 5
                while not done.is_set():
                    status = httpx.get(
                        f"{url}/status-env", params={"env_id": answer["env_id"]}, timeout=WAIT
                    ).json()
                    if not status["groups_wanted"]:
                        done.wait(0.01)
                        continue
                    version = served[0]
                    number = 5 + (number - 4) % 900
                    sent = {**group(number, version), "env_id": answer["env_id"]}
                    httpx.post(f"{url}/scored_data", json=sent, timeout=WAIT).raise_for_status()
            except Exception as error:  # noqa: BLE001 - looked at below
                trouble.append(error)

        thread = threading.Thread(target=environment, daemon=True)
        thread.start()
        for step in range(12):
            batch = batches.next(step)
            assert batch.figures.age_max is not None
            assert batch.figures.age_max <= staleness
            served[0] = step + 1  # the weights are handed over before the batch is acknowledged
            batches.acknowledge(step + 1, hold=hold)
        assert self.leased(url) >= 12 * hold, "the next trainer would get what is not saved"
        batches.release()
        assert self.leased(url) <= 1
        done.set()
        thread.join(WAIT)
        batches.close()
        assert not trouble
