"""The entrance to the documentation: answers within two clicks, commands that parse, examples and log lines that exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.arithmetic_problems import Problem, training_problems
from environments.math_data import load_from_path
from example_trainer.models.geometry import SUPPORTED_ARCHITECTURES
from scripts.ops import options as stack_options
from scripts.quickstart import options as quickstart_options
from tests.headless_browser import browser
from tests.language import ROOT, documents
from tests.pages import Section, broken_links, links, sections, slug

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser"]

README, INDEX = ROOT / "README.md", ROOT / "docs" / "README.md"
ANSWERS = {
    "train on my CSV of questions": ("docs/start.md", "train-on-your-own-questions", "questions.csv"),
    "My run hangs": ("docs/troubleshooting.md", "the-run-hangs", "Waiting for a batch for"),
    "use 4 GPUs": ("docs/several-gpus.md", "use-4-gpus", "--vllm-gpus 0,1 --trainer-gpus 2,3"),
    "Why is the KL not zero": ("docs/troubleshooting.md", "the-kl-between-sampler-and-trainer-is-not-zero", "`mismatch_kl`"),
    "add a reward": ("docs/start.md", "add-a-reward", "async def grade"),
}
"""Words of a question as the index asks it -> the page and the heading with the answer, and a part of the answer."""
OTHER_PROGRAMS = {"CUDA out of memory", "illegal memory access"}
"""Log lines of other programs that the page of failures quotes."""
MOST_BOXES = 12


def section_of(page: str, anchor: str) -> Section:
    return next(section for section in sections(ROOT / page) if section.anchor == anchor)


def test_the_readme_can_be_read_at_once() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_within_two_clicks(question: str) -> None:
    """From README to the index, and from the row with the question to the heading with the answer."""
    page, anchor, answer = ANSWERS[question]
    assert INDEX in {link.file for link in links(README)}
    rows = [line for line in INDEX.read_text(encoding="utf-8").splitlines() if line.startswith("|") and question in line]
    assert len(rows) == 1, f"the index asks {question!r} {len(rows)} times"
    assert [(link.file, link.anchor) for link in links(INDEX, rows[0])] == [(ROOT / page, anchor)]
    assert answer in section_of(page, anchor).text


def test_the_index_leads_to_every_page_in_three_groups() -> None:
    titles = [section.title for section in sections(INDEX)]
    assert titles[-3:] == ["Guides", "Reference", "Explanations"]
    listed = {link.file for link in links(INDEX)}
    assert {path.name for path in documents() if path not in listed} <= {"README.md"}


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Top\n\n## A `part`, once\n\n## A part once\n\n```\n[not](a-link.md)\n# not a heading\n```\n")
    assert [section.anchor for section in sections(page)] == ["top", "a-part-once", "a-part-once-1"]
    with page.open("a") as file:
        file.write("[a](#top) [b](#a-part-once-1) [c](#none) [d](none.md) [e](https://host.example/none) ![f](none.png)\n")
    found = broken_links(page)
    assert len(found) == 3
    assert "has no heading #none" in found[0]
    assert all("does not exist" in line for line in found[1:])


@given(st.text(alphabet="ab -_`'(),.:é9", min_size=1))
def test_anchors_hold_nothing_that_a_link_could_not(heading: str) -> None:
    assert re.fullmatch(r"[\w-]*", slug(heading))
    assert slug(slug(heading)) == slug(heading)


def script_lines(script: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line of a page's shell blocks that runs a script: the page, and the words behind the script."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^[ ]*```bash\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == f"./scripts/{script}" and not {"--ray", "--help", "--resume"} & set(words):
                    yield str(path.relative_to(ROOT)), words[1:]


@pytest.mark.parametrize(("page", "words"), list(script_lines("start.sh")), ids=lambda value: str(value)[:60])
def test_every_start_of_the_pages_is_understood(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of eight GPUs, or without any if the line asks for that."""
    monkeypatch.chdir(ROOT)
    with (
        mock.patch.object(stack_options, "visible_gpus", return_value=tuple(range(8))),
        mock.patch.object(stack_options, "check_model", side_effect=str),
        mock.patch.object(Path, "is_file", return_value=True),  # an environment that the page has the reader write
    ):
        assert stack_options.parse(words).parts


@pytest.mark.parametrize(("page", "words"), list(script_lines("quickstart.sh")), ids=lambda value: str(value)[:60])
def test_every_quick_start_of_the_pages_is_understood(page: str, words: list[str]) -> None:
    with mock.patch.object(quickstart_options, "visible_gpus", return_value=tuple(range(8))):
        assert quickstart_options.parse(words)


def block(page: str, anchor: str, language: str) -> str:
    """Return the first code block of a section."""
    found = re.search(rf"```{language}\n(.*?)```", section_of(page, anchor).text, re.DOTALL)
    assert found, f"{page}#{anchor} has no block of {language}"
    return found[1]


def test_the_documented_command_turns_a_csv_into_questions(tmp_path: Path) -> None:
    """As a spreadsheet writes it: a byte order mark, quotes, a line break in a cell, other columns."""
    rows = 'question,answer,source\r\n"What is ""half"" of ten,\nplus one?",6,book\r\nHow many legs has a spider?,8,\r\n'
    (tmp_path / "questions.csv").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    command = block("docs/start.md", "train-on-your-own-questions", "bash")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=60)
    train, _ = load_from_path(tmp_path / "questions.jsonl")
    assert [(one.question, one.gold) for one in train.questions] == [
        ('What is "half" of ten,\nplus one?', "6"), ("How many legs has a spider?", "8"),
    ]  # fmt: skip
    assert train.incomplete == 0


async def test_the_documented_reward_prefers_short_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "environments" / "short_sums_server.py"
    module = types.ModuleType("short_sums_server")
    module.__file__ = str(file)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    exec(compile(block("docs/start.md", "add-a-reward", "python"), str(file), "exec"), module.__dict__)
    problem: Problem = next(iter(training_problems(seed=0, difficulty=1)))
    environment = object.__new__(module.ShortSums)

    async def score(text: str, tokens: int) -> tuple[float, bool]:
        graded = await environment.grade(problem, module.Response(text, tokens, finished=True))
        return graded.score, graded.correct

    right = f"\\boxed{{{problem.answer}}}"
    assert await score(right, 5) == (pytest.approx(0.95), True)
    assert await score(right, 20) == (pytest.approx(0.8), True)
    assert await score(f"\\boxed{{{problem.answer + 1}}}", 5) == (pytest.approx(-1.05), False)


def test_the_page_of_models_names_every_architecture() -> None:
    named = re.findall(r"^\| `(\w+ForCausalLM)` \|", (ROOT / "docs/your-model.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(SUPPORTED_ARCHITECTURES)


@cache
def messages() -> str:
    """Every text of the programs, with … for each value that is filled in."""
    found: list[str] = []
    for folder in ("atroposlib", "environments", "example_trainer", "vllm_patching", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[-.\d]*[sdrfi]", "…", node.value))
    return "\n".join(found)


def quoted_lines(page: Path) -> set[str]:
    """Return the texts in backticks in the first column of a page's tables that read like a line of a log: three words."""
    rows = re.findall(r"^\| (.*?) \|", re.sub(r"\\\|", "¦", page.read_text(encoding="utf-8")), re.MULTILINE)
    found = {quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)}
    return {quoted for quoted in found if len(quoted.split()) >= 3} - OTHER_PROGRAMS


@pytest.mark.parametrize("name", ["troubleshooting.md", "your-model.md"])
def test_lines_of_logs_that_the_pages_quote_are_written_by_the_programs(name: str) -> None:
    """A line is put together of several texts, so each part between two values is looked for by itself."""
    quoted = quoted_lines(ROOT / "docs" / name)
    assert len(quoted) > 3
    parts = {part.strip(" :;,.()") for line in quoted for part in line.split("…")}
    assert [part for part in sorted(parts) if len(part) > 5 and part not in messages()] == []


def test_the_glossary_has_each_word_once_in_at_most_two_sentences() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[2:]
    words = [word for word, _ in rows]
    assert len(words) == len(set(words)) > 25
    assert [word for word, meaning in rows if len(re.findall(r"[.?](?: |$)", re.sub(r"\(\S*\)", "", meaning))) > 2] == []


def test_no_drawing_has_more_boxes_than_a_reader_can_keep() -> None:
    drawings = sorted((ROOT / "docs" / "images").glob("*.svg"))
    assert ROOT / "docs/images/token.svg" in drawings
    for drawing in drawings:
        assert len(re.findall(r'<rect class="box', drawing.read_text(encoding="utf-8"))) <= MOST_BOXES


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
