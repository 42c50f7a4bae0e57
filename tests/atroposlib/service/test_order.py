"""Clients can rely on this: a group that was answered before another one was sent is not handed out
after it.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from .conftest import Service, group, marks

CLIENTS, GROUPS = 16, 20


def broken_promises(posts: dict[int, Sequence[float]], handed_out: Sequence[int]) -> int:
    """Pairs (a, b) with b handed out before a although a was answered before b was sent.

    Args:
        posts: id to [first byte sent, last byte sent, answered], in seconds of one clock.
        handed_out: ids in the order in which they were handed out.
    """
    count = 0
    for place, later in enumerate(handed_out):
        answered = posts[later][2]
        count += sum(answered < posts[earlier][0] for earlier in handed_out[:place])
    return count


def test_a_broken_promise_is_counted() -> None:
    posts = {1: [0.0, 0.1, 0.2], 2: [0.3, 0.4, 0.5], 3: [0.1, 0.2, 0.6]}
    assert broken_promises(posts, [1, 2, 3]) == broken_promises(posts, [3, 1, 2]) == 0, (
        "3 was under way with both"
    )
    assert broken_promises(posts, [2, 3, 1]) == 1
    assert broken_promises(posts, [2, 1]) == 1


def test_groups_of_many_clients_are_handed_out_in_the_order_of_their_acceptance(
    tmp_path: Path,
) -> None:
    """Short and long bodies at once, to the durable service, while a trainer drains it."""
    service = Service(tmp_path, "--store", str(tmp_path / "run.db")).start()
    service.begin(batch_size=16)
    posts: dict[int, list[float]] = {}
    wrong: list[str] = []

    def post(client: int) -> None:
        with httpx.Client(base_url=service.http.base_url, timeout=60) as http:
            for number in range(GROUPS):
                mark = 1000 * (client + 1) + number
                body = json.dumps(group(mark=mark, length=(3, 200, 4000)[mark % 3], env_id=0))
                sent = time.monotonic()
                answer = http.post("/scored_data", content=body)
                posts[mark] = [sent, sent, time.monotonic()]
                if answer.status_code != 200:
                    wrong.append(answer.text)

    clients = [
        threading.Thread(target=post, args=(client,), daemon=True) for client in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    handed_out: list[int] = []
    deadline = time.monotonic() + 120
    while len(handed_out) < CLIENTS * GROUPS and time.monotonic() < deadline:
        batch = service.get("/batch")["batch"]
        handed_out += marks(batch or [])
        if batch is None:
            time.sleep(0.005)
    for client in clients:
        client.join(60)
    assert not wrong
    assert sorted(handed_out) == sorted(posts)
    assert len(posts) == CLIENTS * GROUPS
    assert broken_promises(posts, handed_out) == 0
    service.signal(signal.SIGTERM)
