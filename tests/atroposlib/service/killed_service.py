"""A rollout service that is killed again and again while groups are posted and batches are learned."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

from .conftest import Service, group, marks

DEADLINE = 120.0


def until(done: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Wait for something, but not for ever."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


class Poster(threading.Thread):
    """Posts groups until stopped; tries each until it is answered, with an idempotency key."""

    def __init__(self, service: Service, first: int) -> None:
        super().__init__(daemon=True)
        self.service, self.mark = service, first
        self.stop = threading.Event()
        self.accepted: list[int] = []
        self.retries = 0

    def run(self) -> None:
        with httpx.Client(base_url=self.service.http.base_url, timeout=60) as http:
            while not self.stop.is_set():
                body = group(
                    mark=self.mark, length=200, env_id=0, idempotency_key=f"group {self.mark}"
                )
                while True:
                    try:
                        answer = http.post("/scored_data", json=body)
                    except httpx.TransportError:
                        self.retries += 1
                        time.sleep(0.02)
                        continue
                    assert answer.status_code == 200, answer.text
                    break
                self.accepted.append(self.mark)
                self.mark += 1


class Consumer(threading.Thread):
    """A trainer that acknowledges. Like a real one it knows the batch that it learned from last."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.stop = threading.Event()
        self.learned: list[int] = []
        self.batches = 0

    def run(self) -> None:
        last = 0
        with httpx.Client(base_url=self.service.http.base_url, timeout=60) as http:
            while not self.stop.is_set():
                try:
                    answer = http.get("/batch").json()
                    if answer["batch"] is None:
                        time.sleep(0.01)
                        continue
                    if answer["batch_id"] != last:
                        assert answer["batch_id"] > last
                        self.learned += marks(answer["batch"])
                        last = answer["batch_id"]
                        self.batches += 1
                    http.post(
                        "/batch/ack", json={"batch_id": last, "weight_version": self.batches}
                    ).raise_for_status()
                except httpx.TransportError:
                    time.sleep(0.02)


def survive_kills(folder: Path, kills: int) -> None:
    """Kill a service under load so many times: it loses no accepted group and doubles none."""
    service = Service(folder, "--store", str(folder / "run.db")).start()
    service.begin(batch_size=8, ack_batches=True)
    posters = [Poster(service, first=1_000_000 * (index + 1)) for index in range(3)]
    consumer = Consumer(service)
    for thread in (*posters, consumer):
        thread.start()
    chance = random.Random(0)
    for _ in range(kills):
        before = sum(len(poster.accepted) for poster in posters)
        until(
            lambda before=before: sum(len(p.accepted) for p in posters) > before + 2,
            "posts are accepted again",
        )
        time.sleep(chance.uniform(0, 0.2))
        assert service.signal(signal.SIGKILL) == -signal.SIGKILL
        service.start()
    for poster in posters:
        poster.stop.set()
        poster.join(DEADLINE)
    accepted = Counter(mark for poster in posters for mark in poster.accepted)
    until(
        lambda: len(consumer.learned) >= len(accepted) - 1,
        "the trainer gets all that fills batches",
    )
    consumer.stop.set()
    consumer.join(DEADLINE)
    left = service.get("/status")["queue_size"]
    learned = Counter(consumer.learned)
    assert max(learned.values()) == 1, "nothing twice"
    assert set(learned) <= set(accepted), "nothing that was never answered with 200"
    assert len(accepted) - len(learned) == left <= 1, "nothing lost: an odd last group waits"
    for poster in posters:
        mine = [
            mark
            for mark in consumer.learned
            if mark // 1_000_000 == poster.accepted[0] // 1_000_000
        ]
        assert mine == sorted(mine), "oldest first, across all restarts"
    assert sum(poster.retries for poster in posters) > 0, "the kills did hit requests"
    service.signal(signal.SIGTERM)
