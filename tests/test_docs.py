"""The entrance to the documentation: answers within two clicks, log lines that exist, a picture
that can be read.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.headless_browser import browser
from tests.language import ROOT, documents
from tests.pages import broken_links, links, section_of, sections, slug
from vllm_patching.weights.families import FAMILIES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]

README, INDEX = ROOT / "README.md", ROOT / "docs" / "README.md"
ANSWERS = {
    "train on my CSV of questions": (
        "docs/your-environment.md",
        "train-on-my-csv-of-questions",
        "questions.csv",
    ),
    "My run hangs": ("docs/troubleshooting.md", "the-run-hangs", "Waiting for a batch for"),
    "write an environment": (
        "docs/your-environment.md",
        "your-own-environment-in-ten-minutes",
        "class Coins(SingleTurnEnv)",
    ),
    "use 4 GPUs": ("docs/several-gpus.md", "use-4-gpus", "--vllm-gpus 0,1 --trainer-gpus 2,3"),
    "Why is the KL not zero": (
        "docs/troubleshooting.md",
        "the-kl-between-sampler-and-trainer-is-not-zero",
        "`mismatch_kl`",
    ),
    "add a reward": ("docs/your-environment.md", "add-a-reward", "async def grade"),
}
"""Words of a question as the index asks it -> the page and the heading with the answer, and a part
of the answer."""
OTHER_PROGRAMS = {
    "CUDA out of memory", "illegal memory access", "daemonic processes are not allowed to have children", "disk I/O error",
    "database or disk is full",
}  # fmt: skip
"""Log lines of other programs that the page of failures quotes."""
MOST_BOXES = 12
WORDS = (
    "rollout", "group", "item", "batch", "bin", "span", "weight version", "weight lineage", "trainer session", "staleness",
    "lease", "acknowledgement", "registration", "update (of a server's weights)", "update group", "channel", "bucket",
    "manifest", "checksum", "commit", "roll back", "server state", "monitor", "family (of models)",
    "table of operations", "master weights",
)  # fmt: skip
"""Words that code, log lines and pages use, each for one thing."""


def test_the_readme_can_be_read_at_once() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_within_two_clicks(question: str) -> None:
    """From README to the index, and from the row with the question to the heading with the answer."""
    page, anchor, answer = ANSWERS[question]
    assert INDEX in {link.file for link in links(README)}
    rows = [
        line
        for line in INDEX.read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and question in line
    ]
    assert len(rows) == 1, f"the index asks {question!r} {len(rows)} times"
    assert [(link.file, link.anchor) for link in links(INDEX, rows[0])] == [(ROOT / page, anchor)]
    assert answer in section_of(ROOT / page, anchor).text


def test_the_index_leads_to_every_page_in_three_groups() -> None:
    titles = [section.title for section in sections(INDEX)]
    assert titles[-3:] == ["Guides", "Reference", "Explanations"]
    listed = {link.file for link in links(INDEX)}
    assert {path.name for path in documents() if path not in listed} <= {"README.md"}


@pytest.mark.parametrize(
    "page", ["assets/starter_model", "assets/calculator_model", "bench/results"]
)
def test_links_of_pages_elsewhere_lead_somewhere(page: str) -> None:
    assert broken_links(ROOT / page / "README.md") == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n\n## A `part`, once\n\n## A part once\n\n```\n[not](a-link.md)\n# not a heading\n```\n"
    )
    assert [section.anchor for section in sections(page)] == ["top", "a-part-once", "a-part-once-1"]
    with page.open("a") as file:
        file.write(
            "[a](#top) [b](#a-part-once-1) [c](#none) [d](none.md) [e](https://host.example/none) ![f](none.png)\n"
        )
    found = broken_links(page)
    assert len(found) == 3
    assert "has no heading #none" in found[0]
    assert all("does not exist" in line for line in found[1:])


@given(st.text(alphabet="ab -_`'(),.:é9", min_size=1))
def test_anchors_hold_nothing_that_a_link_could_not(heading: str) -> None:
    assert re.fullmatch(r"[\w-]*", slug(heading))
    assert slug(slug(heading)) == slug(heading)


def test_the_page_of_models_names_every_architecture() -> None:
    named = re.findall(
        r"^\| `(\w+ForCausalLM)` \|",
        (ROOT / "docs/your-model.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert sorted(named) == sorted(FAMILIES)


@cache
def messages() -> str:
    """Every text of the programs, with … for each value that is filled in."""
    found: list[str] = []
    for folder in (
        "atroposlib",
        "environments",
        "example_trainer",
        "vllm_patching",
        "scripts",
        "studies",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            str(part.value) if isinstance(part, ast.Constant) else "…"
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[-.\d]*[sdrfi]", "…", node.value))
    return "\n".join(found)


def quoted_lines(page: Path) -> set[str]:
    """Return the texts in backticks in the first column of a page's tables that read like a line of
    a log: three words.
    """
    rows = re.findall(
        r"^\| (.*?) \|", re.sub(r"\\\|", "¦", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    found = {quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)}
    return {quoted for quoted in found if len(quoted.split()) >= 3} - OTHER_PROGRAMS


@pytest.mark.parametrize("name", ["troubleshooting.md", "your-model.md"])
def test_lines_of_logs_that_the_pages_quote_are_written_by_the_programs(name: str) -> None:
    """A line is put together of several texts, so each part between two values (…, N, numbers) is
    looked for by itself.
    """
    quoted = quoted_lines(ROOT / "docs" / name)
    assert len(quoted) > 3
    parts = {part.strip(" :;,.()") for line in quoted for part in re.split(r"…|\bN\b|\d+", line)}
    assert [part for part in sorted(parts) if len(part) > 5 and part not in messages()] == []


def test_the_glossary_has_each_word_once_in_at_most_two_sentences() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \|$",
        (ROOT / "docs/glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )[1:]
    words = [word for word, _ in rows]
    assert len(words) == len(set(words))
    assert set(WORDS) <= set(words)
    assert [
        word
        for word, meaning in rows
        if len(re.findall(r"[.?](?: |$)", re.sub(r"\(\S*\)", "", meaning))) > 2
    ] == []


def test_no_drawing_has_more_boxes_than_a_reader_can_keep() -> None:
    drawings = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert ROOT / "docs/images/token.svg" in drawings
    for drawing in drawings:
        assert (
            len(re.findall(r'<rect class="box', drawing.read_text(encoding="utf-8"))) <= MOST_BOXES
        )


IN_BOXES = """() => {
  const boxes = [...document.querySelectorAll('rect.box')].map(one => one.getBBox());
  const texts = [...document.querySelectorAll('text')].filter(one => !one.matches('.label, .title'));
  return {boxes: boxes.length, texts: texts.length, outside: texts.filter(text => {
    const at = text.getBBox();
    return !boxes.some(box => box.x <= at.x && box.y <= at.y && at.x + at.width <= box.x + box.width - 4 &&
      at.y + at.height <= box.y + box.height);
  }).map(text => text.textContent)};
}"""
CONTRASTS = """() => {
  const light = css => {
    const [r, g, b] = css.match(/[\\d.]+/g).map(Number).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const fill = one => light(getComputedStyle(one).fill);
  const grounds = [...document.querySelectorAll('rect.box:not(.r), rect.page')].map(fill);
  const inks = [...document.querySelectorAll('text')].map(fill);
  return grounds.flatMap(g => inks.map(i => (Math.max(g, i) + 0.05) / (Math.min(g, i) + 0.05)));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_a_token_can_be_read(browser: Browser, scheme: Any) -> None:
    """Every text lies within its box, and stands out from it, on light and on dark pages."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1000, "height": 452})
    page = context.new_page()
    page.goto((ROOT / "docs/images/token.svg").as_uri())
    found = page.evaluate(IN_BOXES)
    assert (found["outside"], found["boxes"]) == ([], 8)
    assert found["texts"] > 25
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    context.close()
