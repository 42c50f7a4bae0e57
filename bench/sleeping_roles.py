"""Roles that compute nothing: a generator that sleeps as long as its model would take, and a
trainer that acknowledges.

Run by bench/async_scaling.py, each in a process of its own; the rollout service that they speak to
is the real one.
"""

from __future__ import annotations

import gzip
import heapq
import http.client
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu.processes import answer_once

JSON = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}


@dataclass(frozen=True)
class Work:
    """The work of a generator.

    Attributes:
        in_flight: groups at the same time.
        seconds: mean time that a group takes.
        group, tokens: sequences of a group, and tokens of each.
    """

    in_flight: int
    seconds: float
    group: int
    tokens: int


def work_of(tokens_per_second: float, sequences: int, group: int, tokens: int) -> Work:
    """Return the work that keeps so many sequences in flight at this rate: by Little's law a group
    takes in_flight x its tokens / rate.

    Args:
        tokens_per_second: that the model samples in all.
    """
    in_flight = max(1, sequences // group)
    return Work(in_flight, in_flight * group * tokens / tokens_per_second, group, tokens)


def body_of(work: Work, seed: int) -> bytes:
    """A group as environments post it: tokens, masks, scores, logprobs, versions; gzipped as the
    SDK does.
    """
    chance = random.Random(seed)
    rows = [[chance.randrange(150_000) for _ in range(work.tokens)] for _ in range(work.group)]
    group = {
        "tokens": rows,
        "masks": rows,
        "scores": [chance.choice([-1.0, 1.0]) for _ in rows],
        "inference_logprobs": [[round(-chance.expovariate(2.0), 6) for _ in row] for row in rows],
        "weight_versions": [0] * work.group,
        "sampling_params": [{"temperature": 1.0}] * work.group,
        "finish_reasons": ["stop"] * work.group,
    }
    return gzip.compress(json.dumps(group).encode(), compresslevel=1)


class Caller:
    """One connection to the service, and how long its answers took."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.times: list[tuple[float, float]] = []
        """When each call was sent (time.monotonic), and the seconds it took."""

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body of an answer."""
        began = time.monotonic()
        self._connection.request(method, path, body, JSON | headers)
        response = self._connection.getresponse()
        data = response.read()
        self.times.append((began, time.monotonic() - began))
        return response.status, data

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON answer. Raises RuntimeError for another status than 200."""
        status, data = self.call(method, path, None if body is None else json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {data[:200]!r}")
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    """Post groups as they come due, from `begin` to `end`, and sleep in between; with `seconds` 0
    as fast as possible.
    """
    work, begin, end, count_from = (
        Work(**asked["work"]),
        asked["begin"],
        asked["end"],
        asked["count_from"],
    )
    chance = random.Random(asked["seed"])
    body = body_of(work, asked["seed"])
    posts, asks = Caller(asked["port"]), Caller(asked["port"])
    registration = {
        "max_token_length": work.tokens + 1,
        "desired_name": "asleep",
        "weight": 1.0,
        "group_size": work.group,
    }
    environment = asks.json("POST", "/register-env", registration)["env_id"]
    # As if it had been at work for long: what is in flight ends at any time from now on.
    due = [begin + chance.uniform(0, work.seconds) for _ in range(work.in_flight)]
    heapq.heapify(due)
    posted, refused, waited_until, ask_at = 0, 0, 0.0, begin
    while (now := time.monotonic()) < end:
        wake = max(due[0], waited_until)
        if now < wake:
            if now < ask_at:
                time.sleep(min(wake, ask_at, end) - now)
            else:  # as the SDK asks how much is wanted
                asks.json("GET", f"/status-env?env_id={environment}")
                ask_at = now + 1.0
            continue
        status, answer = posts.call("POST", "/scored_data", body, **{"Content-Encoding": "gzip"})
        if status == 429:
            refused, waited_until = refused + 1, time.monotonic() + 1.0
            continue
        if status != 200:
            raise RuntimeError(f"/scored_data: {status} {answer[:200]!r}")
        posted += now >= count_from
        heapq.heapreplace(
            due, max(due[0], time.monotonic() - 1.0) + work.seconds * chance.uniform(0.5, 1.5)
        )
    seconds = [took for began, took in posts.times if began >= count_from]
    return {"posted": posted, "refused": refused, "post_seconds": seconds, "body_bytes": len(body)}


def acknowledge(asked: dict[str, Any]) -> dict[str, Any]:
    """Take batches and acknowledge them until `end`, or until so many groups have come: a trainer
    whose steps cost nothing.
    """
    caller, end, count_from, most = (
        Caller(asked["port"]),
        asked["end"],
        asked["count_from"],
        asked.get("groups", 1 << 60),
    )
    groups = version = 0
    busy = 0.0
    while time.monotonic() < end and groups < most:
        sent = time.monotonic()
        status, data = caller.call("GET", "/batch")
        if status != 200:
            raise RuntimeError(f"/batch: {status} {data[:200]!r}")
        if len(data) < 100:  # {"batch": null}
            time.sleep(0.005)
            continue
        version += 1
        caller.json("POST", "/batch/ack", {"weight_version": version})
        if sent >= count_from:
            groups += asked["batch_groups"]
            busy += time.monotonic() - sent
    return {"groups": groups, "busy_seconds": busy, "batches": version}


ROLES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "generator": generate,
    "trainer": acknowledge,
}

if __name__ == "__main__":
    answer_once(lambda asked: ROLES[asked["role"]](asked))
