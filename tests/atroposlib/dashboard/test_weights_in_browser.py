"""The page of weights while a run goes on: the weights of each server and how they came there, its
faults. In deterministic mode it shows every difference of a bit.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun
from tests.atroposlib.dashboard.rollouts.test_rollouts_and_service import rollouts
from tests.atroposlib.service.conftest import Service, environment, trainer
from tests.headless_browser import LIVE, Visit
from tests.inference_standin import Standin

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

SAMPLED, RECOMPUTED = -0.9162907600402832, -0.916290819644928
"""Neighbours among the numbers of 32 bits."""
FIRST = {
    "group": 0,
    "sequence": 1,
    "position": 16,
    "sampled": SAMPLED,
    "recomputed": RECOMPUTED,
    "weight_version": 2,
}
KERNELS = {
    "trainer": {"linear": "cublaslt 130100", "plan": "parts 1"},
    "servers": {
        "http://a:9001": {
            "kernels": {"linear": "cublaslt 130100", "plan": "parts 2"},
            "checks": 1234,
            "seconds": 2.5,
        }
    },
}
PROMPT, ANSWERS = "What is 2 + 3?", [b"2 + 3 = 5", b"\\boxed{6}"]


@pytest.fixture(scope="module")
def server() -> Iterator[Standin]:
    """One that has taken the second version of this trainer's weights."""
    with Standin() as running:
        running.control(serving=True, version=2, epoch=1_700_000_000_000)
        running.bridge = {
            "state": "serving", "mode": "broadcast", "transfer": "overlapped", "checksums": [f"{2:032x}"], "updates": 2,
            "failures": 0, "last_bytes": 9_155_840,
            "last_update": {"to_transferred": 0.3, "to_paused": 0.1, "to_committed": 0.06, "halted": 0.07, "stalled": 0.065},
        }  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, server: Standin
) -> Iterator[MadeUpRun]:
    """A run in deterministic mode, after two steps of 1,000 tokens each: one token differed, and
    the trainer has reported it.
    """
    folder = tmp_path_factory.mktemp("compared")
    service = Service(
        folder, "--store", str(folder / "rollouts.db"), "--run-folder", str(folder)
    ).start()
    run = MadeUpRun(folder, service, tokenizer_dir)
    run.metrics.parent.mkdir()
    named = {
        "model": str(tokenizer_dir),
        "log_dir": str(run.metrics.parent),
        "inference_servers": [server.url],
    }
    uuid = run.post("/register", trainer(**named, batch_size=2, ack_batches=True))["uuid"]
    run.get("/batch", uuid=uuid)
    run.post("/register-env", environment(desired_name="sums", group_size=2))
    posted = run.sample(PROMPT, ANSWERS, [1.0, -1.0], weight_versions=[2, 2])
    batch = run.get("/batch", uuid=uuid)
    first = FIRST | {"token": posted["tokens"][1][FIRST["position"]]}
    parity = {
        "weight_version": 2,
        "compared": 1000,
        "mismatched": 1,
        "older": 20,
        "compared_in_all": 2000,
        "mismatched_in_all": 1,
        "older_in_all": 50,
        "kernels": KERNELS,
    }
    ack = {"batch_id": batch["batch_id"], "uuid": uuid, "weight_version": 2}
    run.post(
        "/batch/ack",
        ack
        | {"report": {"weight_version": 2, "sequences": [], "parity": parity | {"first": first}}},
    )
    run.step(1, compared_tokens=1000, mismatched_tokens=0, older_tokens=30)
    run.step(1, compared_tokens=1000, mismatched_tokens=1, older_tokens=20)
    rollouts(service, 2)
    yield run
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


def told(seen: Visit, server: Standin, *parts: str) -> str:
    """Return the page's text about a server, as soon as all of this stands there."""
    card = (
        seen.page.get_by_role("list", name="Servers")
        .get_by_role("listitem")
        .filter(has_text=server.url[7:])
    )
    for part in parts:
        card = card.filter(has_text=part)
    card.wait_for()
    return card.inner_text()


def test_what_a_server_serves_how_it_came_there_and_what_went_wrong(
    compared: MadeUpRun, server: Standin, visit: Callable[..., Visit]
) -> None:
    seen = visit(compared.origin)
    seen.open("/ui/weights")
    seen.until(LIVE)
    last = [json.loads(line) for line in compared.metrics.read_text().splitlines()][-1]
    words = told(seen, server, "version 2", "serving, broadcast, overlapped", "good")
    for part in (
        last["checksum"],
        "the trainer's",
        "2, 0 failed",
        "9.16 MB",
        "last gap\n65 ms",
        "longest gap\n65 ms",
    ):
        assert part in words, (part, words)
    for phase in ("transferred 300 ms", "paused 100 ms", "committed 60 ms"):
        assert phase in words, phase
    bar = seen.page.get_by_role("img", name="The last update took 460 ms")
    assert bar.count() == 1, (
        "for how long nothing was sampled is part of its phases, and not one of them"
    )
    headline = seen.page.locator("#headline")
    headline.filter(
        has_text="serves version 2, with the checksum that the trainer has; no update failed."
    ).wait_for()
    (row,) = seen.page.get_by_role("row").filter(has_text=last["checksum"]).all()
    assert row.inner_text().split() == ["2", last["checksum"], "–", "200", "ms", "9.16", "MB"]

    server.bridge |= {
        "checksums": ["f" * 32],
        "updates": 3,
        "last_update": {"to_paused": 0.1, "halted": 1.25},
    }
    server.control(version=3)
    compared.step(1)
    words = told(seen, server, "version 3", "f" * 32)
    assert "the trainer's" not in words
    assert "longest gap\n1.25 s, at" in words
    gaps = seen.page.get_by_role("figure", name="Longest halt of an engine")
    gaps.and_(seen.page.locator("[data-points='2'][data-value='1.25']")).wait_for()

    server.control(serving=False, trouble="a shape differs")
    server.bridge |= {
        "failures": 1,
        "last_error": "layer 3: a shape differs",
        "quarantine": "its weights were not proven",
    }
    words = told(
        seen,
        server,
        "faulty",
        "its weights were not proven",
        "last failure: layer 3: a shape differs",
    )
    assert "3, 1 failed" in words
    headline.filter(has_text="1 failed update").wait_for()


def test_every_token_that_was_compared_is_counted_and_the_first_that_differed_is_told_in_full(
    compared: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    seen = visit(compared.origin)
    seen.open("/ui/weights")
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in compared.metrics.read_text().splitlines()
    ]
    assert sum(row.get("compared_tokens", 0) for row in rows) == 2000
    bits = seen.page.get_by_role("region", name="Bits").inner_text()
    for part in (
        "every token's logprob is compared, bit by bit",
        "tokens compared\n2,000",
        "that differ\n1 1 in 2,000",
        "of older weights\n50 compared with nothing",
    ):
        assert part in bits, bits
    kernels = seen.page.get_by_role("region", name="Kernels")
    rows_of_kernels = [row.inner_text().split("\t") for row in kernels.get_by_role("row").all()]
    assert rows_of_kernels == [
        ["kernel", "trainer", "a:9001"],
        ["linear", "cublaslt 130100", "cublaslt 130100"],
        ["plan", "parts 1", "parts 2"],
        ["self-test", "–", "1,234 batches with the same bits, 2.5 s"],
    ]
    assert kernels.locator("td.bad").all_inner_texts() == ["parts 2"]
    chart = seen.page.get_by_role("figure", name="Tokens compared")
    assert chart.get_attribute("data-points") == "2"
    first = seen.page.get_by_role("alert").inner_text()
    numbers = ("0xbf6a9208", "0xbf6a9209", str(SAMPLED), str(RECOMPUTED), "1 float32 step apart")
    for part in (*numbers, "weight version\n2", "position\n16"):
        assert part in first, (part, first)
    letter = ANSWERS[1].decode()[FIRST["position"] - len(PROMPT)]  # type: ignore[operator]
    assert f'its text\n"{letter}"' in first
    seen.page.get_by_role("link", name="Open the rollout at this token").click()
    seen.page.locator("#r1t16[data-active]").wait_for()
    assert seen.page.locator("#r1t16").inner_text() == letter
