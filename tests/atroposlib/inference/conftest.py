"""A server manager beside the stand-in server that all tests share."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from atroposlib.inference.server_manager import APIServerConfig, ServerManager


@pytest.fixture
async def manager(shared_inference: str, tokenizer: Any) -> AsyncIterator[ServerManager]:
    made = ServerManager([APIServerConfig(base_url=f"{shared_inference}/v1", server_type="vllm")])
    made.servers[0].tokenizer = tokenizer
    control(made, version=4, delay=0.0, fail_next=0, text=None, cycle=None, generate_options=None)
    yield made
    await made.close()


def control(manager: ServerManager, **change: Any) -> None:
    httpx.post(f"{manager.servers[0].root_url}/control", json=change).raise_for_status()


def last_request(manager: ServerManager) -> dict[str, Any]:
    request: dict[str, Any] = httpx.get(f"{manager.servers[0].root_url}/requests").json()[-1]
    return request
