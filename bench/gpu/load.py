"""Requests kept in flight against a server; a process of its own, so that it does not slow down
what it measures.

A few of the requests are streamed through /v1/completions, so that the arrival of each token is
known. The others go through /generate and come back whole, as a trainer's environments ask for
them. Streaming all of them would measure the server's text output. Commands on stdin: start, stop.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.processes import Answers, serve
from bench.gpu.vllm_server import NUMBERS


@dataclass
class Load:
    """The requests and their outcome.

    Attributes:
        port, model: the server's, on this machine.
        concurrency: requests in flight.
        observers: how many of them are streamed.
        vocab: prompts hold random ids below this.
        prompt_tokens, min_tokens, max_tokens: lengths; completions vary, so that requests do not
            end together.
        streams: for each streamed request, when its tokens arrived (monotonic clock).
        finished, failures: requests that ended well; the first few reasons of failed ones.
    """

    port: int
    model: str
    concurrency: int
    observers: int
    vocab: int
    prompt_tokens: int = 32
    min_tokens: int = 64
    max_tokens: int = 384
    streams: list[list[float]] = field(default_factory=list)
    finished: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self, stop: threading.Event) -> None:
        """Keep the requests in flight until `stop` is set, then drop them."""
        tasks = [
            asyncio.create_task(self._repeat(i < self.observers, i))
            for i in range(self.concurrency)
        ]
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, streamed: bool, seed: int) -> None:
        draw = random.Random(seed)
        while True:
            prompt = [draw.randrange(3, self.vocab) for _ in range(self.prompt_tokens)]
            length = draw.randint(self.min_tokens, self.max_tokens)
            try:
                await (self._stream(prompt, length) if streamed else self._whole(prompt, length))
                self.finished += 1
            except (OSError, ValueError, EOFError) as error:
                if len(self.failures) < 20:
                    self.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.2)

    async def _stream(self, prompt: list[int], length: int) -> None:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": length,
            "ignore_eos": True,
            "stream": True,
        }
        arrivals: list[float] = []
        self.streams.append(arrivals)
        reader, writer = await self._open("/v1/completions", body)
        try:
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    arrivals.append(time.monotonic())
        finally:
            writer.close()
        if not arrivals:
            raise EOFError("a stream ended without a token")

    async def _whole(self, prompt: list[int], length: int) -> None:
        body = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": length, **NUMBERS}
        reader, writer = await self._open("/generate", body)
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    async def _open(
        self, path: str, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(
            f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
        )
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            reason = (await reader.read(4000)).split(b"\r\n\r\n", 1)[-1]
            writer.close()
            raise ValueError(
                f"{path} answered {status.decode(errors='replace').strip()} {reason.decode(errors='replace')}"
            )
        return reader, writer


class LoadCommands:
    """start and stop, for the parent process."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, **arguments: Any) -> dict[str, Any]:
        """Begin; see Load for the arguments."""
        if self._thread is not None:
            raise RuntimeError("a load is running already")
        self._stop.clear()
        load = self._load = Load(**arguments)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(load.run(self._stop)), name="load", daemon=True
        )
        self._thread.start()
        return {}

    def stop(self) -> dict[str, Any]:
        """End it and return what was seen."""
        if self._thread is None or self._load is None:
            raise RuntimeError("no load is running")
        self._stop.set()
        self._thread.join(30)
        load, self._load, self._thread = self._load, None, None
        streams = [[round(t, 5) for t in arrivals] for arrivals in load.streams]
        return {"streams": streams, "finished": load.finished, "failures": load.failures}


if __name__ == "__main__":
    loads = LoadCommands()
    serve(Answers(), {"start": loads.start, "stop": loads.stop})
