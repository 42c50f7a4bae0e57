"""Inference servers of a few lines over real connections, and a manager of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from atroposlib.inference.client import APIServerConfig
from atroposlib.inference.server_manager import ServerManager


class Light:
    """A server of a few lines, that can be killed, cut off, stopped and started again on its port."""

    def __init__(self) -> None:
        self.port = 0
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []
        self.cut, self.hold = False, asyncio.Event()
        self.hold.set()
        self._open: set[asyncio.StreamWriter] = set()
        self.says(serving=True)

    def says(self, **told: Any) -> None:
        """The answer to GET /weights."""
        known = {
            "instance": "i",
            "weight_version": 3,
            "weight_epoch": 7,
            "trouble": "",
            "in_flight": 0,
        }
        self.answers["/weights"] = (200, known | told)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = await reader.readexactly(length)
                self.asked.append(path)
                await self.hold.wait()
                status, told = self.answers.get(path) or self._route(path, body)
                content = json.dumps(told).encode()
                head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
                if self.cut and path == "/generate":
                    writer.write(head.encode() + content[:10])
                    await writer.drain()
                    return
                writer.write(head.encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._open.discard(writer)
            writer.close()

    def _route(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 64}]}
        if path == "/generate":
            ids = json.loads(body)["prompt"]["prompt_token_ids"]
            tables = [[{str(ids[0]): -0.5}]]
            return 200, {
                "token_ids": [ids[:1]],
                "logprobs": tables,
                "finish_reasons": ["stop"],
                "weight_versions": [3],
            }
        return 404, {}

    @property
    def generated(self) -> int:
        return self.asked.count("/generate")


@asynccontextmanager
async def fleet(count: int, **config: Any) -> AsyncIterator[tuple[ServerManager, list[Light]]]:
    lights = [Light() for _ in range(count)]
    for light in lights:
        await light.start()
    urls = ",".join(f"{light.url}/v1" for light in lights)
    manager = ServerManager([APIServerConfig(base_url=urls, server_type="vllm", **config)])
    try:
        yield manager, lights
    finally:
        await manager.close()
        for light in lights:
            await light.stop()


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
