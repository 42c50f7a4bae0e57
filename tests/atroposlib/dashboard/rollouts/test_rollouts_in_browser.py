"""A person reads rollouts: side by side, shaded by each number, with the tools it called and where
the weights changed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun, tokens_of
from tests.atroposlib.dashboard.rollouts.test_rollout_archive import encoded
from tests.atroposlib.dashboard.rollouts.test_rollouts_and_service import rollouts
from tests.atroposlib.service.conftest import Service, environment, trainer
from tests.headless_browser import Visit, browser, visit

__all__ = ["browser", "visit"]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

ASKED, CALLED, ANSWERED, SAID = "What is 6 * 7?", "<call>", "42", "It is 42."
CALL = {
    "role": "assistant",
    "content": CALLED,
    "tool_calls": [{"function": {"name": "calculator", "arguments": "6 * 7"}}],
}
TURNS = [
    {"role": "user", "content": ASKED}, CALL, {"role": "tool", "name": "calculator", "content": ANSWERED},
    {"role": "assistant", "content": SAID},
]  # fmt: skip
SHADED = "(all) => all.filter((one) => one.dataset.shade).map((one) => [one.dataset.at, one.dataset.shade])"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[MadeUpRun]:
    """A run with two groups: one of several turns, whose second rollout the trainer has reported,
    and a worse one.
    """
    folder = tmp_path_factory.mktemp("read")
    service = Service(
        folder, "--store", str(folder / "rollouts.db"), "--run-folder", str(folder)
    ).start()
    run = MadeUpRun(folder, service, tokenizer_dir)
    uuid = run.post("/register", trainer(model=str(tokenizer_dir), ack_batches=True, batch_size=2))[
        "uuid"
    ]
    run.get("/batch", uuid=uuid)
    ids = [
        run.post("/register-env", environment(desired_name=name, group_size=2))["env_id"]
        for name in ("sums", "code")
    ]
    run.post("/scored_data", turns(tokenizer_dir) | {"env_id": ids[0]})
    run.sample(
        "Say something.", [b"no", b"none"], [-1.0, -1.0], weight_versions=[3, 3], env_id=ids[1]
    )
    batch = run.get("/batch", uuid=uuid)
    sampled = len(CALLED) + len(SAID)
    report = {
        "group": 0, "sequence": 1, "trained": sampled, "advantages": 0.5, "entropies": encoded(*[0.5] * sampled),
        "logprobs": encoded(-0.75, -0.25, *[-0.5] * (sampled - 2)),
    }  # fmt: skip
    ack = {"batch_id": batch["batch_id"], "uuid": uuid, "weight_version": 1}
    run.post("/batch/ack", ack | {"report": {"weight_version": 4, "sequences": [report]}})
    rollouts(service, 4)  # both are written down a moment after the answer
    rollouts(service, 1, sort="drifted")
    yield run
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


def turns(tokenizer: Path) -> dict[str, Any]:
    """Two rollouts that call a tool, each with the logprob -0.5 for every token; the weights change
    within the last turn.
    """
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    tokens: list[int] = []
    masks: list[int] = []
    for text, is_sampled in ((ASKED, False), (CALLED, True), (ANSWERED, False), (SAID, True)):
        added = tokens_of(text.encode(), vocabulary)
        tokens += added
        masks += added if is_sampled else [-100] * len(added)
    spans = [[3, len(CALLED) + 2], [4, len(SAID) - 2]]
    return {
        "tokens": [tokens] * 2, "masks": [masks] * 2, "scores": [0.0, 1.0], "messages": [TURNS] * 2,
        "inference_logprobs": [[1.0 if mask == -100 else -0.5 for mask in masks]] * 2,
        "weight_versions": [3, 3], "weight_version_spans": [spans] * 2,
    }  # fmt: skip


def test_a_group_is_read_side_by_side_and_a_token_of_it_sent_to_somebody(
    told: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    seen = visit(told.origin)
    seen.open("/ui/rollouts")
    page = seen.page
    page.get_by_label("Sort by").select_option("drifted")
    seen.until("document.querySelectorAll('#list tr').length === 1")  # the reported one alone
    page.get_by_role("row").filter(has_text="0.").get_by_role("link", name="group").first.click()
    seen.until("document.querySelectorAll('[data-response] .boundary').length === 2")
    both = page.get_by_role("article")
    assert [both.nth(place).locator("[data-score]").inner_text() for place in range(2)] == [
        "score 0",
        "score 1",
    ]
    second = both.nth(1)
    words = second.inner_text()
    for part in ("user", "calls calculator 6 * 7", "tool calculator", ANSWERED, "version 4"):
        assert part in words, part
    sampled = second.locator(".sampled .tokens")
    assert [sampled.nth(turn).inner_text() for turn in range(2)] == [
        CALLED,
        f"{SAID[:2]}version 4{SAID[2:]}",
    ]

    begin = len(ASKED)
    expect_shades(page, begin)

    tokens = page.locator("[data-response='1'] .sampled [data-token]")
    tokens.nth(1).click()
    facts = page.locator("#facts").inner_text()
    for part in (
        "sampler's logprob -0.5",
        "trainer's logprob at version 4 -0.25",
        "trainer − sampler 0.25",
        "version 3",
    ):
        assert part in facts, (part, facts)
    page.get_by_role("group", name="Tokens of rollout 1").focus()
    page.keyboard.press("ArrowRight")
    assert f"at {begin + 2} of rollout 1" in page.locator("#facts").inner_text()
    other = visit(told.origin)
    other.open(page.url.removeprefix(told.origin))
    other.page.locator(f"#r1t{begin + 1}[data-active]").wait_for()


def expect_shades(page: Any, begin: int) -> None:
    """Expect the tokens of the second response, which begin there, in each of the shades."""
    tokens = page.locator("[data-response='1'] .sampled [data-token]")
    for shade, expected in (
        ("logprob", {"low"}),
        ("entropy", {"low"}),
        ("advantage", {"high"}),
        ("difference", {"low", "high"}),
    ):
        page.get_by_label("Shade by").select_option(shade)
        shaded = tokens.evaluate_all(SHADED)
        assert len(shaded) == len(CALLED) + len(SAID), shade
        assert {how for _, how in shaded} == expected, shade
    assert shaded[:2] == [[str(begin), "low"], [str(begin + 1), "high"]], (
        "the trainer thinks it less likely, then more"
    )
    depths = tokens.evaluate_all(
        "(all) => all.map((one) => Number(one.style.getPropertyValue('--depth')))"
    )
    assert depths[0] == depths[1] > 0.5
    assert set(depths[2:]) == {0}, "where both agree, nothing is shaded"
    assert page.locator("[data-response='0'] .sampled [data-shade]").count() == 0, (
        "of this one the trainer told nothing"
    )


def test_lists_are_in_the_order_that_is_asked_for(
    told: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    seen = visit(told.origin)
    for query, scores in {
        "sort=best": ["1", "0", "-1", "-1"],
        "sort=worst": ["-1", "-1", "0", "1"],
        "environment=code": ["-1", "-1"],
        "text=It+is": ["1", "0"],
    }.items():
        seen.open(f"/ui/rollouts?{query}")
        rows = seen.page.get_by_role("table").locator("tbody tr")
        assert [
            rows.nth(place).locator("td").nth(1).inner_text() for place in range(rows.count())
        ] == scores, query
