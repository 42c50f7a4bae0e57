"""A model's text is shown as text: it draws nothing, runs nothing, moves nothing, and delays
nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun
from tests.atroposlib.service.conftest import Service
from tests.headless_browser import READY, SECONDS, Visit

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>&lt;i&gt;<style>body{display:none}</style>"
SCRIPT = "</script></span><script>alert(2)</script><svg onload=alert(3)>"
LINKS = "javascript:alert(4) [link](javascript:alert(5)) {{ 7 * 7 }} ${7 * 7}"
TERMINAL = "\x1b[31mred\x1b[2J\x1b]0;title\x07 \x9b5m\x00\x08\x7f"
TURNED = "abc \u202edcba\u202c \u2066left\u2069 \u05e9\u05dc\u05d5\u05dd \u200f"
BROKEN = b"ok \xff\xfe \xe2\x82 \xed\xa0\x80 end"
SAID = {
    "markup": MARKUP.encode(), "script": SCRIPT.encode(), "links": LINKS.encode(), "terminal": TERMINAL.encode(),
    "turned": TURNED.encode(), "broken": BROKEN,
}  # fmt: skip
MEGABYTE = 1 << 20
CONTROLS = r"/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/"
"""Characters that move a cursor or turn the order of a line: each is shown as a sign for itself."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[MadeUpRun]:
    """A run whose model, environment and figures all contain hostile text."""
    folder = tmp_path_factory.mktemp("hostile")
    service = Service(
        folder, "--store", str(folder / "rollouts.db"), "--run-folder", str(folder)
    ).start()
    run = MadeUpRun(folder, service, tokenizer_dir)
    env_id = run.begin(f"env {MARKUP} {TURNED}", len(SAID))
    run.step(12, **{f"reward/{SCRIPT}": 1.0})
    run.post(
        "/evaluations",
        {"name": f"{MARKUP} {TURNED}", "metrics": {f"{SCRIPT} {TURNED}": 0.5}, "weight_version": 3},
    )
    messages = [
        [{"role": "user", "content": MARKUP}, {"role": "assistant", "content": SCRIPT}]
        for _ in SAID
    ]
    run.sample(
        SCRIPT,
        list(SAID.values()),
        [float(i) for i in range(len(SAID))],
        messages=messages,
        env_id=env_id,
    )
    yield run
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


def is_inert(seen: Visit, where: str) -> None:
    """No part of the text has become a part of the page."""
    page = seen.page
    assert (
        page.locator("main img, main style, main script, main svg[onload], main [onerror]").count()
        == 0
    ), where
    assert page.locator("a[href^='javascript']").count() == 0, where
    assert page.evaluate(f"{CONTROLS}.test(document.body.innerText + document.title)") is False, (
        where
    )
    assert page.get_by_role("navigation", name="Pages").is_visible(), where


def test_every_page_shows_it_as_text(hostile: MadeUpRun, visit: Callable[..., Visit]) -> None:
    seen = visit(hostile.origin)
    for path in (
        "/ui",
        "/ui/weights",
        "/ui/history",
        "/ui/rollouts",
        "/ui/rollouts?sort=best",
        "/ui/rollouts?text=onerror",
    ):
        seen.open(path)
        is_inert(seen, path)
    assert f"env {MARKUP}"[:20] in seen.page.get_by_role("table").inner_text()


def test_each_response_is_text_with_the_tokens_that_were_posted(
    hostile: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    seen = visit(hostile.origin)
    seen.open("/ui/rollouts?text=onload")  # all of the group were asked with it
    group = (
        seen.page.get_by_role("link", name="group", exact=True).first.get_attribute("href") or ""
    )
    shown: dict[str, str] = {}
    for rollout, (name, said) in enumerate(SAID.items()):
        seen.open(f"{group}?rollout={rollout}")
        is_inert(seen, name)
        response = seen.page.locator(f"[data-response='{rollout}']")
        pieces = response.locator("[data-token]").evaluate_all(
            "(all) => all.map((element) => element.dataset.token)"
        )
        posted = hostile.group(SCRIPT, [said], [0.0])["tokens"][0]
        assert [
            int(token) for piece in pieces for token in piece.replace(",", " ").split()
        ] == posted, name
        shown[name] = response.locator(".turn").last.locator(".tokens").inner_text()
    assert (shown["markup"], shown["script"], shown["links"]) == (MARKUP, SCRIPT, LINKS)
    assert shown["terminal"].startswith("\N{SYMBOL FOR ESCAPE}[31mred\N{SYMBOL FOR ESCAPE}[2J")
    assert "abc \u2039U+202E\u203adcba" in shown["turned"]
    assert "\u05e9\u05dc\u05d5\u05dd" in shown["turned"]
    assert shown["broken"].startswith("ok \ufffd")
    assert shown["broken"].endswith(" end")


def test_a_megabyte_is_shown_in_part_and_holds_nobody_up(
    hostile: MadeUpRun, visit: Callable[..., Visit]
) -> None:
    said = (b"<p>0123456789</p> \xf0\x9f\x98\x80 " * (MEGABYTE // 20))[:MEGABYTE]
    hostile.sample(
        "At length, please.", [said, *[b"no"] * (len(SAID) - 1)], [90.0] + [0.0] * (len(SAID) - 1)
    )
    seen = visit(hostile.origin)
    deadline = time.monotonic() + SECONDS
    while "1.05 M" not in (listed := longest(seen)):
        assert time.monotonic() < deadline, listed
    is_inert(seen, "list")
    seen.page.get_by_role("row").nth(1).get_by_role("link").first.click()
    seen.until(f"{READY} && document.querySelector('[data-response] [data-token]') !== null")
    is_inert(seen, "a megabyte")
    shown = seen.page.locator("[data-token]").count()
    assert 0 < shown <= 10_000
    seen.page.get_by_role("button", name="More").click()
    seen.until(f"document.querySelectorAll('[data-token]').length > {shown}")


def longest(seen: Visit) -> str:
    """The list of rollouts, the longest first: it is written by a thread that takes its time."""
    seen.open("/ui/rollouts?sort=longest")
    return seen.page.get_by_role("table").inner_text()
