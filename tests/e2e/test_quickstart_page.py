"""The page of the quick start, in a browser, while the real stack trains.

The page polls the servers every few seconds, so the run has enough steps for several polls.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import Processes
from tests.e2e.quickstart_run import start_quickstart
from tests.headless_browser import LIVE, UNANSWERED, Visit
from tests.listening import Listener, listeners
from tests.still_running import json_rows

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(420)]

STEPS = 20
CHARTS = {
    "Reward": "reward_mean", "Response length": "response_length_mean", "KL from the sampler": "kl", "Entropy": "entropy",
    "Clip fractions": "clip_fraction", "Where time goes": "seconds_wait", "Tokens a second": "tokens_per_second",
    "Age of the data": "age_mean", "Gradient norm": "grad_norm",
}  # fmt: skip
"""Titles of the page -> what their first line draws of metrics.jsonl."""
SERVED = "(card) => /^version [1-9]/m.test(card) && card.includes('good') && card.includes('the trainer\\'s')"
"""Condition on a card of the page of weights: the server is well, and has weights that the trainer
has sent.
"""


@dataclass
class Running:
    """A quick start, and the folder that it writes."""

    processes: Processes
    process: ManagedProcess
    output: Path

    def written(self, pattern: str, seconds: float) -> str:
        """Wait until it has written what matches; returns the first group."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.process.log_path.read_text(errors="replace"))

        self.processes.wait_until(
            "the quick start",
            lambda: None if found() else f"it has not written {pattern!r}",
            seconds,
        )
        match = found()
        assert match is not None
        return match[1]


@pytest.fixture
def running(processes: Processes, tmp_path: Path) -> Running:
    output = tmp_path / "run"
    process = start_quickstart(processes, STEPS, output)
    return Running(processes, process, output)


def posted(running: Running) -> list[tuple[list[int], float]]:
    """Return the environment's posts: the sampled tokens of each sequence, and its score."""
    groups = json_rows(running.output / "environment" / "rollouts.jsonl")
    return [
        ([token for token, mask in zip(tokens, masks, strict=True) if mask != -100], score)
        for group in groups
        for tokens, masks, score in zip(
            group["tokens"], group["masks"], group["scores"], strict=True
        )
    ]


def test_its_page_shows_the_curve_grow_and_the_tokens_that_were_posted(
    running: Running, visit: Callable[..., Visit]
) -> None:
    origin = running.written(r"see the run, down to the token: (http://\S+)/ui\s", 300)
    expect_only_this_machine_at(int(origin.rpartition(":")[2]))
    overview, weights, reader = visit(origin), visit(origin), visit(origin)
    for one in overview, weights, reader:
        one.expect(UNANSWERED)  # the run may be over while they look
    overview.open("/ui")
    overview.until(LIVE)
    overview.page.evaluate("""() => {
      const chart = document.querySelector("figure[aria-label='Reward']");
      window.counts = [Number(chart.dataset.points ?? 0)];
      new MutationObserver(() => window.counts.push(Number(chart.dataset.points))).observe(chart, { attributes: true });
    }""")
    weights.open("/ui/weights")
    weights.page.evaluate("""() => {
      const servers = document.getElementById("servers");
      window.shown = [];
      new MutationObserver(() => window.shown.push(servers.innerText)).observe(servers, { childList: true, subtree: true });
    }""")
    overview.until("Math.max(...window.counts) >= 1", seconds=300)

    reader.open("/ui/rollouts?sort=best")
    reader.page.get_by_role("table").get_by_role("link").first.click()
    reader.until("document.querySelectorAll('[data-response] [data-token]').length > 0")
    shown = reader.page.locator("[data-response] .sampled [data-token]").evaluate_all(
        "(all) => all.map((e) => e.dataset.token)"
    )
    tokens = [int(token) for pieces in shown for token in pieces.replace(",", " ").split()]
    assert tokens in [sampled for sampled, _ in posted(running)]

    overview.until(f"Math.max(...window.counts) === {STEPS}", seconds=300)
    counts = overview.page.evaluate("window.counts")
    assert counts == sorted(counts), (
        "it was drawn once for each step, as it came, and nothing was lost"
    )
    rows = json_rows(running.output / "trainer" / "metrics.jsonl")
    for title, name in CHARTS.items():
        last = overview.page.get_by_role("figure", name=title, exact=True).get_attribute(
            "data-value"
        )
        assert float(last or "nan") == pytest.approx(rows[STEPS - 1][name]), title

    # Whenever the page named a version, it was with the checksum that the trainer wrote of it.
    weights.until(f"window.shown.some({SERVED})", seconds=60)
    told = weights.page.evaluate(f"window.shown.filter({SERVED})")
    checksums = {str(row["weight_version"]): row["checksum"] for row in rows}
    for card in told:
        served = re.search(r"^version (\d+)$", card, re.MULTILINE)
        assert served is not None, card
        assert checksums[served[1]] in card, card
    serving = [card for card in told if "serving, single copy" in card]
    assert serving, "each card was drawn in the middle of an update"
    for part in (" 0 failed", "last update", "longest gap"):
        assert part in serving[-1], serving[-1]


def expect_only_this_machine_at(page: int) -> None:
    """Expect all that listen at a port to listen for this machine only."""

    def at_the_page() -> list[Listener]:
        """The processes that listen there; forked ones are not below the command."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [listener for listener in listeners(pids) if listener.port == page]

    deadline = time.monotonic() + 120
    while not (listening := at_the_page()):  # the address is printed before the service listens
        assert time.monotonic() < deadline, f"no process listens at {page}"
        time.sleep(0.2)
    assert [listener for listener in listening if not listener.on_loopback] == []
