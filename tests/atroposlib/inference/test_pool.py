"""Requests to several servers, while some are away, fail, hang or come back: each is answered
once."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.errors import InferenceUnavailable, UsageError
from atroposlib.inference import client
from atroposlib.inference.client import APIServer, APIServerConfig
from atroposlib.inference.server_manager import ServerManager
from tests.inference_standin import Standin

STATES = ("ok", "ok", "away", "fails", "hangs", "quarantined", "sick")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Looks, pauses and patience a hundred times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "POLL_SECONDS", 0.01)
        patch.setattr(client, "MOVE_AFTER_SECONDS", 0.05)
        patch.setattr(client, "FIRST_PAUSE", 0.005)
        patch.setattr(client, "MAX_PAUSE", 0.05)
        patch.setattr("atroposlib.utils.waiting.FIRST_PAUSE", 0.01)
        patch.setattr("atroposlib.utils.waiting.MAX_PAUSE", 0.02)
        yield


# ---- against a model, without HTTP
# ---------------------------------------------------------------------------------------


def become(server: Standin, state: str) -> None:
    """Have a server behave as a state demands; one that is away is not reached at all."""
    refuses = state in ("quarantined", "sick")
    server.control(serving=state != "quarantined")
    server.told = {}
    if refuses or state == "fails":
        server.told["/generate"] = (503 if refuses else 500, {"error": state})
    if state == "hangs":
        server.hold.clear()
    else:
        server.hold.set()


class Played(httpx.AsyncBaseTransport):
    """The way to a stand-in without a connection, so that a request that is given up is given up
    on both sides at once.

    Attributes:
        answers: status -> how often each number was answered with it.
    """

    def __init__(self) -> None:
        self.standin, self.away = served(), False
        self.answers: defaultdict[int, Counter[int]] = defaultdict(Counter)

    def become(self, state: str) -> None:
        self.away = state == "away"
        become(self.standin, state)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        limit = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(limit):
                if self.away:
                    raise httpx.ConnectError("away")
                if request.url.path == "/generate":
                    await asyncio.sleep(0.002)
                status, told = await self.standin.respond(
                    request.method, request.url.path, "", body
                )
        except TimeoutError:
            raise httpx.ReadTimeout("silent") from None
        if request.url.path == "/generate":
            number = json.loads(body)["prompt"]["prompt_token_ids"][0]
            self.answers[status][number] += 1
        return httpx.Response(status, json=told)


def played(*kinds: APIServerConfig) -> tuple[ServerManager, list[Played]]:
    """A manager and the ways to its servers."""
    manager, ways = ServerManager(list(kinds)), []
    for server in manager.servers:
        ways.append(Played())
        server._http = httpx.AsyncClient(
            base_url=server.root_url, transport=ways[-1], timeout=server.config.timeout
        )
    return manager, ways


rounds = st.lists(st.tuples(*[st.sampled_from(STATES)] * 3), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=rounds)
def test_whatever_happens_to_the_servers_each_request_has_one_answer(
    script: list[tuple[str, ...]],
) -> None:
    async def play() -> None:
        manager, ways = played(
            APIServerConfig(base_url="http://a:1,http://b:1,http://c:1", server_type="vllm")
        )
        numbers, tasks = itertools.count(), {}
        conversation = manager.pick()  # as a managed server holds one
        for states in [*script, ("ok", "ok", "ok")]:
            for way, state in zip(ways, states, strict=True):
                way.become(state)
            for _ in range(4):
                for whom in (manager, conversation):
                    number = next(numbers)
                    tasks[number] = asyncio.create_task(whom.generate(input_ids=[number]))
            await asyncio.sleep(0.03)
        _, late = await asyncio.wait(tasks.values(), timeout=60)
        assert not late, "none waits for ever"
        for number, task in tasks.items():
            if (error := task.exception()) is not None:
                assert isinstance(error, httpx.HTTPStatusError)
                failures = sum(way.answers[500][number] for way in ways)
                assert failures == 3, "it was tried three times"
                continue
            assert task.result().output_tokens == [[number]]
            assert sum(way.answers[200][number] for way in ways) == 1
        assert all(server.sem.in_use == 0 for server in manager.servers)
        assert not manager.pools()[0]._under_way
        await manager.close()

    asyncio.run(play())


async def test_requests_go_to_the_kind_of_server_with_most_room_and_are_chosen_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [
        APIServerConfig(
            base_url="http://a:1", server_type="vllm", model_name="a", num_max_requests_at_once=2
        ),
        APIServerConfig(base_url="http://b:1,http://c:1", server_type="vllm", model_name="b"),
    ]
    manager, ways = played(*kinds)
    chosen: list[APIServer | None] = []
    pick = client.ServerPool.pick

    def counted(self: client.ServerPool, *more: Any) -> APIServer | None:
        chosen.append(pick(self, *more))
        return chosen[-1]

    monkeypatch.setattr(client.ServerPool, "pick", counted)
    await asyncio.gather(*(manager.generate(input_ids=[number]) for number in range(6)))
    assert Counter(chosen) == {manager.servers[1]: 3, manager.servers[2]: 3}
    for server in manager.servers[1:]:
        server.pool.choice.refused(server, 0.0, 1.0, "away")
    await manager.generate(input_ids=[6])
    assert ways[0].answers[200] == {6: 1}
    await manager.close()


# ---- over HTTP
# -----------------------------------------------------------------------------------------------------------


def served() -> Standin:
    """A server with weights of a trainer's."""
    standin = Standin()
    standin.control(serving=True, version=3, epoch=7)
    return standin


@asynccontextmanager
async def fleet(count: int, **config: Any) -> AsyncIterator[tuple[ServerManager, list[Standin]]]:
    lights = [served() for _ in range(count)]
    for light in lights:
        await light.serve()
    urls = ",".join(f"{light.url}/v1" for light in lights)
    manager = ServerManager([APIServerConfig(base_url=urls, server_type="vllm", **config)])
    try:
        yield manager, lights
    finally:
        await manager.close()
        for light in lights:
            await light.crash()


async def ask(manager: ServerManager, count: int) -> None:
    """So many requests at once; each must have its own answer."""
    answers = await asyncio.gather(
        *(manager.generate(input_ids=[number]) for number in range(count))
    )
    assert [answer.output_tokens for answer in answers] == [[[number]] for number in range(count)]


async def seen(manager: ServerManager, condition: Any) -> None:
    """Ask until the looks have shown something."""
    async with asyncio.timeout(60):
        while not condition():
            await ask(manager, 1)
            await asyncio.sleep(0.01)


async def test_requests_spread_and_all_kinds_of_faults_are_gone_around() -> None:
    async with fleet(4) as (manager, lights):
        await ask(manager, 40)
        assert min(light.generated for light in lights) > 3
        failing, cut, quarantined, good = lights
        failing.told["/generate"] = (500, {"error": "broken"})
        cut.cut = True
        quarantined.told["/generate"] = (503, {"error": "quarantined"})
        quarantined.control(serving=False, trouble="quarantined: its checksum was wrong")
        for _ in range(5):
            await ask(manager, 40)
        before = [light.generated for light in lights]
        await ask(manager, 40)
        assert good.generated - before[3] >= 40 - 2, "what fails gets a trial at most"
        assert quarantined.generated == before[2]
        failing.told.pop("/generate")
        cut.cut = False
        quarantined.told.pop("/generate")
        quarantined.control(serving=True)
        before = [light.generated for light in lights]
        await seen(
            manager,
            lambda: all(light.generated > was for light, was in zip(lights, before, strict=True)),
        )


async def test_the_freshest_weights_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SETTLING_SECONDS", 0.05)
    async with fleet(3) as (manager, lights):
        lights[0].control(serving=True, epoch=0, version=900)
        lights[1].control(serving=True, version=2)
        known = manager.pools()[0].choice
        await seen(
            manager, lambda: None not in [known.of(server).weights for server in manager.servers]
        )
        await asyncio.sleep(0.06)
        before = [light.generated for light in lights]
        await ask(manager, 20)
        assert [light.generated - was for light, was in zip(lights, before, strict=True)] == [
            0,
            0,
            20,
        ]
        await lights[2].crash()
        before = [light.generated for light in lights]
        await ask(manager, 20)
        assert [light.generated - was for light, was in zip(lights, before, strict=True)] == [
            0,
            20,
            0,
        ], "the next best"


async def test_requests_at_a_server_that_hangs_are_asked_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.inference.client.POLL_TIMEOUT", 0.5)
    async with fleet(2) as (manager, lights):
        await ask(manager, 2)
        lights[0].hold.clear()
        async with asyncio.timeout(60):
            await ask(manager, 10)
        assert "are asked elsewhere: it is away (silent for 0.5 s)" in caplog.text
        lights[0].hold.set()
        before = lights[0].generated
        await seen(manager, lambda: lights[0].generated > before)


async def test_one_that_stands_alone_is_named_when_it_is_silent_and_goes_on_with_its_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("atroposlib.inference.client.POLL_TIMEOUT", 0.5)
    async with fleet(1) as (manager, (light,)):
        await ask(manager, 2)
        assert "/weights" not in light.paths, "while it answers, it is left alone"
        monkeypatch.setattr(client, "QUIET_SECONDS", 0.1)
        light.hold.clear()
        waiting = asyncio.create_task(ask(manager, 10))
        async with asyncio.timeout(60):
            while "is away (silent for 0.5 s): 10 requests wait for it" not in caplog.text:
                await asyncio.sleep(0.01)
        later = asyncio.create_task(ask(manager, 1))
        async with asyncio.timeout(60):
            while (
                "Waiting for inference server at" not in caplog.text
            ):  # a new request is not sent to it
                await asyncio.sleep(0.01)
        light.hold.set()
        async with asyncio.timeout(60):
            await asyncio.gather(waiting, later)
        assert light.generated == 13, "no request was sent twice"


async def test_a_server_whose_engine_hangs_is_gone_around_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    reason = "vLLM's engine has not answered for 30 s (--engine-timeout)"
    async with fleet(2) as (manager, lights):
        await ask(manager, 2)
        lights[0].told["/generate"] = (503, {"error": reason})
        lights[0].control(serving=False, trouble=reason)
        await ask(manager, 20)
        before = lights[0].generated
        await ask(manager, 20)
        assert lights[0].generated == before
        assert reason in caplog.text


async def test_all_away_is_one_line_that_names_them_and_has_an_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with fleet(2) as (manager, lights):
        await ask(manager, 2)
        await lights[0].crash()
        lights[1].control(serving=False, trouble="quarantined: late")
        lights[1].told["/generate"] = (503, {})
        waiting = asyncio.create_task(ask(manager, 10))
        async with asyncio.timeout(60):
            while "Waiting for" not in caplog.text:
                await asyncio.sleep(0.01)
        (line,) = [
            record.getMessage() for record in caplog.records if "Waiting for" in record.getMessage()
        ]
        assert line.startswith("Waiting for inference servers, 2 in all and none available for ")
        assert lights[0].url in line
        assert lights[1].url in line
        assert not waiting.done()
        await lights[0].serve()
        async with asyncio.timeout(60):
            await waiting
        await lights[0].crash()
        manager.servers[0].pool.outage_timeout = 0.1
        with pytest.raises(InferenceUnavailable, match="quarantined: late"):
            await ask(manager, 1)


async def test_servers_that_know_no_weights_are_judged_by_their_health() -> None:
    async with fleet(2) as (manager, lights):
        for light in lights:
            light.told["/weights"] = (404, {})
        await ask(manager, 20)
        await lights[0].crash()
        await ask(manager, 20)
        assert lights[1].paths.count("/weights") == 1, "asked once"
        before = lights[0].generated
        await lights[0].serve()
        await seen(manager, lambda: lights[0].generated > before)
        assert "/health" in lights[1].paths


async def test_a_conversation_stays_where_it_is_and_moves_when_it_must() -> None:
    async with fleet(2) as (manager, lights):
        await ask(manager, 2)
        server = manager.pick()
        at = next(light for light in lights if light.url == server.root_url)
        before = at.generated
        for turn in range(5):
            await server.generate(input_ids=[turn])
        assert at.generated == before + 5
        await at.crash()
        assert (await server.generate(input_ids=[9])).output_tokens == [[9]]


async def test_servers_are_left_in_peace_when_nothing_is_asked() -> None:
    async with fleet(2) as (manager, _):
        await ask(manager, 2)
        watcher = manager.pools()[0]._watcher
        assert watcher is not None
        async with asyncio.timeout(60):
            await watcher
        await ask(manager, 2)
        assert manager.pools()[0]._watcher is not watcher


async def test_servers_that_somebody_sets_replace_the_others() -> None:
    async with fleet(2) as (manager, lights):
        held = manager.servers[0]
        manager.servers = ServerManager(
            [APIServerConfig(base_url=lights[1].url, server_type="vllm")]
        ).servers
        await ask(manager, 5)
        assert lights[0].generated == 0
        await held.generate(input_ids=[1])
        assert lights[0].generated == 1, "whoever holds a server goes on with it"
        await held.close()


@pytest.mark.parametrize(
    ("addresses", "says"),
    [("http://a:1,", "is empty"), ("http://a:1/v1, http://A:1", "is there twice")],
)
def test_addresses_that_are_no_list_are_refused(addresses: str, says: str) -> None:
    with pytest.raises((UsageError, ValueError), match=says):
        ServerManager(APIServerConfig(base_url=addresses))


async def test_an_environment_starts_when_one_server_is_well() -> None:
    async with fleet(3) as (manager, lights):
        await lights[0].crash()
        lights[1].control(serving=False, trouble="its first weights have not come")
        async with asyncio.timeout(60):
            await manager.wait_until_well()
        assert [server.server_healthy for server in manager.servers] == [False, False, True]
        assert manager.pick() is manager.servers[2]
