"""A server manager beside the stand-in server that all tests share."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from tests.inference_standin import CONTROLLED


@pytest.fixture
async def manager(shared_inference: str, tokenizer: Any) -> AsyncIterator[ServerManager]:
    made = ServerManager([APIServerConfig(base_url=f"{shared_inference}/v1", server_type="vllm")])
    made.servers[0].tokenizer = tokenizer
    control(made, **(CONTROLLED | {"version": 4}))
    yield made
    await made.close()


def control(manager: ServerManager, **change: Any) -> None:
    httpx.post(
        f"{manager.servers[0].root_url}/control", json=change, timeout=120
    ).raise_for_status()


def last_request(manager: ServerManager) -> dict[str, Any]:
    answer = httpx.get(f"{manager.servers[0].root_url}/requests", timeout=120)
    request: dict[str, Any] = answer.json()[-1]
    return request
