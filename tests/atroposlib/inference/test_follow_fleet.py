"""An environment that follows the fleet goes on while servers join, are restarted one by one, and
leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.inference.client import APIServerConfig
from atroposlib.inference.server_manager import (
    FleetAnswer,
    FleetFollower,
    ServerManager,
    same_address,
)
from example_trainer.child_processes.processes import wait_until
from tests import inference_standin
from tests.atroposlib.envs.env_stack import OFFLINE, Stack

pytestmark = pytest.mark.nightly

ARITHMETIC = Path(__file__).resolve().parents[3] / "environments" / "arithmetic_server.py"
STANDINGS = ("joining", "good", "quarantined", "away")


def table(*servers: tuple[str, str], **more: Any) -> dict[str, Any]:
    listed = [{"url": url, "standing": standing} for url, standing in servers]
    return {"servers": listed, "wanted": [], "left": [], "published": 1.0} | more


# ---- which servers are followed
# ----------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.sampled_from([f"http://h:{port}" for port in range(1, 6)]), st.sampled_from(STANDINGS)
    ),
    st.data(),
)
def test_whatever_the_table_says_those_with_the_trainers_weights_are_followed(
    told: dict[str, str], data: st.DataObject
) -> None:
    left = data.draw(st.lists(st.sampled_from(sorted(told) or ["http://h:9"])))
    found = FleetAnswer.model_validate(table(*told.items(), left=left)).addresses()
    assert found is not None
    assert set(found) == {url for url, standing in told.items() if standing != "joining"} - set(
        left
    )


def test_what_is_no_table_is_told() -> None:
    assert FleetAnswer.model_validate(table(published=None)).addresses() is None
    for wrong in (
        [],
        {},
        {"published": 1.0},
        table(("h", "good")),
        table(("http://h:1", "good")) | {"servers": [1]},
    ):
        with pytest.raises(ValueError):  # noqa: PT011  # each names something else
            FleetAnswer.model_validate(wrong)
    assert same_address("http://H:1/v1", "http://h:1/")
    assert not same_address("http://h:1", "https://h:1")


# ---- the list of servers
# ----------------------------------------------------------------------------------------------


class Told(FleetFollower):
    """Answers with the text that the test sets."""

    addresses: list[str] | None = None

    async def ask(self) -> list[str] | None:
        return self.addresses


async def test_servers_that_stay_are_the_same_and_new_ones_are_as_the_others() -> None:
    manager = ServerManager(
        [
            APIServerConfig(
                base_url="http://a:1/v1,http://b:1/v1", server_type="vllm", model_name="m"
            )
        ]
    )
    manager.follower = follower = Told("http://service:1")
    a, b = manager.servers
    a.tokenizer, a.max_sequence_length = "its tokenizer", 64
    await manager.update_weight(0.5)
    for nothing in (None, []):
        follower.addresses = nothing
        await manager._follow_once()
        assert manager.servers == [a, b], "nobody says that they are gone"
    follower.addresses = ["http://c:1", "http://a:1"]
    await manager._follow_once()
    c, same = manager.servers
    assert same is a
    assert (c.root_url, c.tokenizer, c.max_sequence_length, c.sem.weight) == (
        "http://c:1",
        "its tokenizer",
        64,
        0.5,
    )
    assert b.pool is c.pool is a.pool, "what is asked of the one that left goes to the others"
    assert len(manager.pools()) == 1
    follower.addresses = ["http://d:1"]
    await manager._follow_once()
    (d,) = manager.servers
    assert d.pool is a.pool
    assert d.pool.servers == [d]
    await manager.close()


async def test_a_service_that_says_nothing_takes_no_server_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    answers: list[Any] = [
        httpx.ConnectError("gone"),
        (404, {}),
        (500, {}),
        (200, []),
        (200, table(published=None)),
    ]
    answers += [httpx.ConnectError("gone"), (200, table(("http://a:1", "away")))]

    def answer(_: httpx.Request) -> httpx.Response:
        told = answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return httpx.Response(told[0], json=told[1])

    follower = FleetFollower("http://service:1")
    await follower._http.aclose()
    follower._http = httpx.AsyncClient(base_url=follower.url, transport=httpx.MockTransport(answer))
    assert [await follower.ask() for _ in range(6)] == [None] * 6
    assert await follower.ask() == ["http://a:1"]
    assert caplog.text.count("does not list the fleet") == 5
    assert "is it an earlier version?" in caplog.text
    assert caplog.text.count("lists the fleet again") == 2
    await follower.close()


# ---- with processes
# ------------------------------------------------------------------------------------------------------


def control(url: str, **change: Any) -> None:
    httpx.post(f"{url}/control", json=change, timeout=60).raise_for_status()


def publish(stack: Stack, urls: list[str], *standings: str) -> None:
    """Send the service the table of servers, as the trainer does."""
    told = [
        {"url": url, "standing": standing} for url, standing in zip(urls, standings, strict=True)
    ]
    httpx.post(f"{stack.service_url}/fleet", json={"servers": told}, timeout=60).raise_for_status()


def requests(url: str) -> int:
    return len(httpx.get(f"{url}/requests", timeout=60).json())


@pytest.mark.e2e
def test_it_goes_on_while_servers_come_are_restarted_and_leave(
    stack: Stack, free_port: Callable[[], int]
) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def start(which: int) -> Any:
        command = inference_standin.command(ports[which], stack.tokenizer_dir, serving=True)
        return stack.processes.start(f"inference-{which}", command, OFFLINE)

    def until(text: str) -> None:
        """Train until the environment has written it: one that has nothing to do looks at no
        server.
        """

        def probe() -> str | None:
            stack.next_batch()
            written = environment.log_path.read_text(errors="replace")
            return None if text in written else f"no {text!r}"

        wait_until(text, probe, 180)

    servers = [start(0), start(1)]
    stack.start_service()
    stack.register_trainer(num_steps=1000)
    for which in (0, 1):
        stack.processes.wait_for_http(f"{urls[which]}/health", 120)
    publish(stack, urls, "good", "joining")
    environment = stack.start_environment(
        ARITHMETIC, "--follow_fleet"
    )  # its own --openai.base_url leads nowhere
    stack.take_batches(2)
    assert requests(urls[1]) == 0, "a server that joins has no weights of the trainer's"
    publish(stack, urls, "good", "good")
    until(f"the inference servers of the fleet are now: {urls[0]}, {urls[1]}")
    stack.take_batches(4)
    assert requests(urls[1]) > 0

    stack.processes.kill(servers[0])
    publish(stack, urls, "away", "good")
    stack.take_batches(4)
    start(0)
    stack.processes.wait_for_http(f"{urls[0]}/health", 120)
    until(f"inference server at {urls[0]} is back")
    control(urls[1], serving=False)
    until(f"{urls[1]} is away")
    stack.take_batches(4)
    control(urls[1], serving=True)
    until(f"inference server at {urls[1]} is back")

    leave = f"{stack.service_url}/fleet/leave"
    httpx.post(leave, json={"url": urls[0]}, timeout=60).raise_for_status()
    until(f"the inference servers of the fleet are now: {urls[1]}")
    before = requests(urls[0])
    for batch in stack.take_batches(6):
        assert sum(len(group["tokens"]) for group in batch) == 32
    assert requests(urls[0]) <= before + 1
    log = environment.log_path.read_text(errors="replace")
    assert "Traceback" not in log
    assert "given up" not in log
    stack.end_run()


def test_following_ends_with_the_environment() -> None:
    async def live() -> None:
        manager = ServerManager(
            [APIServerConfig(base_url="http://a:1", server_type="vllm", health_check=False)]
        )
        manager.follower = Told("http://service:1", every=0.01)
        await manager.wait_until_well()
        assert manager._following is not None
        await manager.close()
        assert manager._following.done()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(live())
