"""An environment that asks the light servers of tests/exact_sampler.py for its answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import httpx

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from tests.light_servers import SOON, LightServer

GROUP, LENGTH = 4, 6
"""Answers of a group; tokens of an answer."""
POLL_SECONDS = 0.02


class Asking(BaseEnv):
    """Items are numbers; a group's answers are a server's, and the scores depend on them.

    Args:
        url: of the rollout service.
        servers: one of them, in no order, answers an item.
        ahead: batches that it samples ahead. 0: each item is sampled with a seed of its own, from the
            weights of its batch. Above 0, each is sampled in two halves. From 2 on, one item at a
            time waits for the trainer's next step in between.
        prompt: tokens of a prompt.
    """

    name = "asking"

    def __init__(
        self, url: str, servers: Sequence[LightServer], ahead: int, prompt: int = 2
    ) -> None:
        settings: dict[str, Any] = {
            "group_size": GROUP,
            "rollout_server_url": url,
            "steps_per_eval": 0,
            "tokenizer_name": "none",
        }
        if ahead:
            settings["max_batches_offpolicy"] = ahead
        config = BaseEnvConfig(
            exact_resume=not ahead,
            max_token_length=prompt + LENGTH,
            service_timeout=60,
            **settings,
        )
        super().__init__(config, [APIServerConfig(base_url="http://localhost:9")])
        self.servers, self.ahead, self.prompt = servers, ahead, prompt
        self.tokenizer = "none"
        self.server.wait_until_well = self.no_servers  # type: ignore[method-assign,assignment]

    async def setup(self) -> None:
        self.next, self.waiting = 0, False
        self.http = httpx.AsyncClient(timeout=SOON, trust_env=False, verify=False)

    async def get_next_item(self) -> int:
        self.next += 1
        return self.next - 1

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to measure."""

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        await asyncio.sleep(random.uniform(0, 0.02))
        server = random.choice(self.servers)
        prompt = [item % 61, *[1] * (self.prompt - 1)]
        if not self.ahead:
            answers = [await self.ask(server, [prompt] * GROUP, LENGTH, self.sampling_seed())]
        else:
            first = await self.ask(server, [prompt] * GROUP, LENGTH // 2, item)
            if self.ahead > 1 and not self.waiting:
                await self.wait_for_other_weights(server, first["version"])
            begun = [[*prompt, *row] for row in first["tokens"]]
            answers = [first, await self.ask(server, begun, LENGTH - LENGTH // 2, item)]
        return group_of(prompt, answers), []

    async def ask(
        self, server: LightServer, prompts: list[list[int]], length: int, seed: int | None
    ) -> dict[str, Any]:
        body = {"prompts": prompts, "length": length, "seed": seed}
        answer = await self.http.post(f"{server.url}/test/sample", json=body)
        return answer.raise_for_status().json()  # type: ignore[no-any-return]

    async def wait_for_other_weights(self, server: LightServer, version: int) -> None:
        self.waiting = True
        while (await self.http.get(f"{server.url}/weights")).json()["weight_version"] == version:
            await asyncio.sleep(POLL_SECONDS)
        self.waiting = False

    async def no_servers(self) -> None:
        """There are none to wait for."""


def joined(parts: list[list[list[Any]]]) -> list[list[Any]]:
    """Put the parts of each row behind one another."""
    return [list(chain.from_iterable(row)) for row in zip(*parts, strict=True)]


def group_of(prompt: list[int], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The group of answers that were sampled in parts, one after the other."""
    rows = joined([one["tokens"] for one in answers])
    logprobs = joined([one["logprobs"] for one in answers])
    spans = [[one["version"], len(one["tokens"][0])] for one in answers]
    return {
        "tokens": [[*prompt, *row] for row in rows],
        "masks": [[*[-100] * len(prompt), *row] for row in rows],
        "scores": [float(sum(row) % 2) for row in rows],
        "inference_logprobs": [[*[1.0] * len(prompt), *row] for row in logprobs],
        "weight_versions": [answers[0]["version"]] * len(rows),
        "weight_epochs": [answers[0]["epoch"]] * len(rows),
        "weight_version_spans": [spans] * len(rows),
        "weight_epoch_spans": [[one["epoch"] for one in answers]] * len(rows),
        "sampling_params": [{"temperature": 1.0}] * len(rows),
    }


@contextlib.contextmanager
def environment(
    url: str, servers: Sequence[LightServer], ahead: int, prompt: int = 2
) -> Iterator[None]:
    """Run an environment in a thread, for the time of the block."""
    started: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        started.extend([asyncio.get_running_loop(), asyncio.current_task()])
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await Asking(url, servers, ahead, prompt).env_manager()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="environment")
    thread.start()
    assert ready.wait(SOON)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # it has come to its end
            started[0].call_soon_threadsafe(started[1].cancel)
        thread.join(SOON)
        assert not thread.is_alive()
