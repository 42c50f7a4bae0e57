"""Groups of clients that post at the same time keep the order in which they arrived."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from atroposlib.api.gate.event_loop import new_event_loop
from atroposlib.api.gate.turnstile import Turnstile


async def test_requests_go_through_in_the_order_in_which_they_arrived() -> None:
    turnstile, order = Turnstile(patience=60), []
    turns = [turnstile.enter() for _ in range(4)]

    async def request(number: int) -> None:
        await turnstile.reached(turns[number])
        order.append(number)
        turnstile.leave(turns[number])

    tasks = [asyncio.create_task(request(number)) for number in (3, 1, 2)]
    await asyncio.sleep(0)
    assert order == []
    await request(0)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


async def test_a_slow_body_loses_its_place_but_the_others_keep_theirs() -> None:
    turnstile, order = Turnstile(patience=0.05), []
    slow, *turns = [turnstile.enter() for _ in range(4)]

    async def request(number: int) -> None:
        await turnstile.reached(turns[number])
        order.append(number)
        turnstile.leave(turns[number])

    async with asyncio.timeout(10):
        await asyncio.gather(*(request(number) for number in (2, 0, 1)))
        assert order == [0, 1, 2]
        await turnstile.reached(slow)


@pytest.mark.skipif(not hasattr(__import__("select"), "epoll"), reason="this system has no epoll")
def test_the_loop_sees_connections_in_the_order_in_which_their_data_came() -> None:
    """The first round leaves all connections in epoll's list; the second must not be told in the order of the first."""
    pairs = [socket.socketpair() for _ in range(8)]
    seen: list[int] = []

    class Reader(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self.number = number

        def data_received(self, data: bytes) -> None:
            seen.append(self.number)

    async def rounds() -> None:
        loop = asyncio.get_running_loop()
        for number, (_, inside) in enumerate(pairs):
            await loop.connect_accepted_socket(lambda number=number: Reader(number), inside)
        for order in (list(range(8)), [5, 2, 7, 0, 1, 6, 4, 3], [7, 6, 5, 4, 3, 2, 1, 0]):
            seen.clear()
            writer = threading.Thread(target=lambda order=order: [pairs[number][0].send(b"x") for number in order])
            writer.start()
            writer.join()  # the loop is held up meanwhile, so it finds all of them at once
            while len(seen) < 8:
                await asyncio.sleep(0.001)
            assert seen == order

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(asyncio.wait_for(rounds(), 30))
    for outside, _ in pairs:
        outside.close()


def test_the_loop_loses_no_data_that_it_did_not_read_at_once() -> None:
    received = bytearray()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            received.extend(data)
        writer.write(b"y" * 3_000_000)
        await writer.drain()
        writer.close()

    async def main() -> int:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=4096)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 5_000_000)
        writer.write_eof()
        answer = await reader.read()
        server.close()
        return len(answer)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert runner.run(asyncio.wait_for(main(), 60)) == 3_000_000
    assert len(received) == 5_000_000
