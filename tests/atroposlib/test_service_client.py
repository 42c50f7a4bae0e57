"""Posts over HTTP to a server with scripted answers: retries, Retry-After, refusals, lost answers."""

import asyncio
import gzip
import json
import math
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atroposlib import service_client
from atroposlib.errors import EnvironmentFailure, ServiceUnavailable
from atroposlib.inference.generation import Generation, current_versions
from atroposlib.service_client import RejectedByService, RolloutServiceClient
from atroposlib.utils import waiting
from tests.atroposlib.envs.scripted_env import ScriptedEnv
from tests.http_server import Answer, HttpServer, Request


class Scripted(HttpServer):
    """Answers with the next (status, headers, body) of a list, then with 200; `None` hangs up
    without an answer.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes] | None] = []
        self.bodies: list[Any] = []
        super().__init__(self.next_answer, keep_alive=True)

    def next_answer(self, request: Request) -> Answer:
        body = request.body
        if request.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(json.loads(body or b"null"))
        if not self.answers:
            return 200, {"status": "received"}
        answer = self.answers.pop(0)
        if answer is None:
            return None
        status, headers, content = answer
        return status, content, headers


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE", 0.01)


def client(server: Scripted, timeout: float = 120.0, **more: Any) -> RolloutServiceClient:
    return RolloutServiceClient(f"http://127.0.0.1:{server.server_address[1]}", timeout, **more)


async def test_it_tries_again_until_it_is_answered(server: Scripted) -> None:
    server.answers = [
        (500, {}, b"oops"),
        (503, {}, b""),
        None,
        (200, {}, b"no json"),
        (200, {}, b'{"ok": 1}'),
    ]
    assert await client(server).post("/scored_data", {"a": 1}) == {"ok": 1}
    assert server.bodies == [{"a": 1}] * 5


async def test_it_waits_as_long_as_retry_after_says(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=note))
    server.answers = [
        (429, {"Retry-After": "7"}, b""),
        (429, {}, b""),
        (429, {"Retry-After": "Wed, 21 Oct"}, b""),
    ]
    await client(server).post("/scored_data", {})
    waits = [pause for pause in pauses if pause >= 0.01]
    assert waits[0] == 7.0
    assert min(waits[1:3]) >= 1.0


async def test_a_full_disk_is_waited_for_beyond_the_timeout_with_one_line(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_client, "retry_after", lambda *_, **__: 0.01)
    caplog.set_level("INFO")
    refusal = (507, {"Retry-After": "5"}, b'{"detail": "store /disk/a.db: 3.1 MB are free"}')
    server.answers = [refusal] * 30
    posting = client(server, timeout=0.05)
    answers = await asyncio.gather(*(posting.post("/scored_data", {"n": n}) for n in range(3)))
    assert answers == [{"status": "received"}] * 3
    assert len(server.bodies) == 33
    assert (
        sum(
            "cannot store data: store /disk/a.db: 3.1 MB are free. Posts wait up to" in line
            for line in caplog.messages
        )
        == 1
    )
    assert sum("stores data again" in line for line in caplog.messages) == 1
    monkeypatch.setattr(service_client, "FULL_DISK_SECONDS", 0.02)
    server.answers = [refusal] * 1000
    with pytest.raises(
        ServiceUnavailable, match=r"stored nothing of /scored_data within .*: store /disk/a\.db"
    ):
        await posting.post("/scored_data", {})


async def test_a_refused_farewell_is_one_line_with_the_reason(
    server: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.answers = [(507, {}, b'{"detail": "store /disk/a.db is not in its place"}'), None]
    for told in ("507 store /disk/a.db is not in its place", "no answer (RemoteProtocolError)"):
        await client(server).disconnect(3)
        line = caplog.messages[-1]
        assert line.startswith("environment 3 could not be deregistered at the rollout service")
        assert line.endswith(told)
    await client(server).disconnect(3)
    assert caplog.messages[-1] == "disconnected environment 3 from the rollout service"


async def test_what_a_retry_cannot_change_is_not_retried(server: Scripted) -> None:
    server.answers = [(422, {}, b'{"detail": "scores[0] is NaN"}')]
    with pytest.raises(RejectedByService, match=r"422: .*scores\[0\] is NaN"):
        await client(server).post("/scored_data", {})
    assert len(server.bodies) == 1


async def test_a_wrong_key_ends_it_and_names_the_flag(server: Scripted) -> None:
    server.answers = [(401, {}, b"")]
    with pytest.raises(EnvironmentFailure, match=r"--env\.rollout_server_api_key"):
        await client(server, api_key="wrong").post("/scored_data", {})


async def test_nobody_there_ends_it_after_the_timeout() -> None:
    with pytest.raises(
        ServiceUnavailable, match=r"rollout service at http://127\.0\.0\.1:9: .* giving up"
    ):
        await RolloutServiceClient("http://127.0.0.1:9", timeout=0.2).get("/status")


async def test_status_env_sends_its_argument_as_the_body_of_a_get(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client(server).status_env(5)
    await client(server).status_env(5, 17, 0.5)
    monkeypatch.setenv("LOCKSTEP_PROCESS", "environment-2")
    await client(server).status_env(6)
    mine = f"process {os.getpid()} on {socket.gethostname()}"
    assert server.bodies == [
        {"env_id": 5, "process": mine},
        {"env_id": 5, "process": mine, "moves": 17, "wait": 0.5},
        {"env_id": 6, "process": "environment-2"},
    ]


async def test_large_posts_to_other_machines_are_compressed(server: Scripted) -> None:
    remote = client(server)
    remote._compress = True
    body = {"tokens": [list(range(5000))]}
    await remote.post("/scored_data", body)
    assert server.bodies == [body]


class Evaluated(ScriptedEnv):
    """Measures under weights of versions 7 and 5."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        record = current_versions.get()
        if record is not None:
            record.note([7, 5], [20, 21])
            record.note_generation(Generation([1] * 999, [[2] * 999], [[-1.0] * 999], ["stop"]))
            assert record.sampled is None, (
                "tokens of an evaluation are of no use to anybody, and there are many"
            )
        metrics = {"accuracy": np.float32(0.5), "tokens": 12, "weight_version": 7}
        await self.evaluate_log(
            metrics | {"why": "text", "passed": True, "loss": math.nan}, verbose=False
        )


def evaluated(server: Scripted, times: int = 1, **settings: Any) -> Evaluated:
    env = Evaluated([], rollout_server_url=f"http://127.0.0.1:{server.server_port}", **settings)
    env._runner.state.env_id = 3

    async def run() -> None:
        for _ in range(times):
            env._runner.start_evaluation()
            assert env._runner.state.eval_runner is not None
            await env._runner.state.eval_runner
            await asyncio.sleep(0)
            assert env._runner.state.eval_runner is None, "nothing is held on to until the next one"
        await env._runner.connections.service.close()

    asyncio.run(run())
    return env


def test_an_evaluation_posts_its_numbers_and_the_oldest_weights_that_it_met(
    server: Scripted,
) -> None:
    server.answers = [(503, {}, b""), None]
    evaluated(server)
    (first, second, third) = server.bodies
    assert first == second == third, (
        "the same key each time: a post whose answer was lost is not counted twice"
    )
    assert len(first.pop("idempotency_key")) == 32
    assert first == {
        "env_id": 3,
        "name": "scripted",
        "weight_version": 7,
        "weight_epoch": 20,
        "metrics": {"accuracy": 0.5, "tokens": 12.0},
    }


@pytest.mark.parametrize(
    ("answer", "says", "posts"),
    [
        ((404, {}, b"{}"), "takes no results of evaluations", 1),
        ((405, {}, b"{}"), "takes no results of evaluations", 1),
        ((422, {}, b"metrics"), "refused the result of evaluation scripted: 422: metrics", 2),
        ((401, {}, b""), "not posted, the rollouts go on: ", 2),
        ((500, {}, b""), "not posted, the rollouts go on: ", 2),
    ],
)
def test_a_result_that_cannot_be_posted_ends_nothing(
    server: Scripted, answer: Any, says: str, posts: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.answers = [answer] * 500
    evaluated(server, times=2, service_timeout=0.3)
    assert caplog.text.count(says) == posts, "a route that is not there is asked for once"
    assert len({body["idempotency_key"] for body in server.bodies}) == posts
