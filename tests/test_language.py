"""Plain English in the documents and docstrings: counts of hard phrases and long sentences may only fall."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import language
from tests.language import COMMAND, COUNTS, ROOT, Hit, hits_in_code, hits_in_document, read_counts, risen, write_counts

COUNTING = st.dictionaries(
    st.sampled_from(["README.md", "docs/a.md", "docs/b.md", "bench/"]),
    st.dictionaries(st.sampled_from(["phrases", "long sentences"]), st.integers(1, 90)),
    min_size=1,
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, Hit]]]:
    return language.all_hits()


def test_no_count_rises(found: dict[str, list[tuple[str, Hit]]]) -> None:
    now, limits = language.counted(found), json.loads(COUNTS.read_text(encoding="utf-8"))
    lines = []
    for name, kind, count, limit in risen(now, limits):
        lines.append(f"{name} has {count} {kind}, its limit is {limit}. Reword the new ones among these:")
        lines += [f"  {file}:{hit.line}: {hit.text} ({hit.remedy})" for file, hit in found[name] if hit.kind == kind]
    moved = f"If text moved here from another page, `{COMMAND}` moves the limit with it."
    assert lines == [], "\n".join([*lines, moved])
    if risen(limits, now):
        warnings.warn(f"counts have fallen below {COUNTS.name}: run `{COMMAND}` and commit that file", stacklevel=1)


@pytest.mark.parametrize("page", language.guides(), ids=lambda path: str(path.relative_to(ROOT)))
def test_guides_are_plain(page: Path) -> None:
    """A guide whose limit is still higher, because it is an older page, may only fall until it is plain."""
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    hits = [hit for hit in hits_in_document(text) if hit.kind == "phrases"]
    plain = language.words(language.prose(text)) * language.GUIDE_PHRASES_PER_1000_WORDS // 1000
    limit = max(plain, read_counts().get(name, {}).get("phrases", 0))
    assert len(hits) <= limit, "\n".join(f"{name}:{hit.line}: {hit.text} ({hit.remedy})" for hit in hits)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The log\nsays so.", "says"),
        ("Of those\nthat wait, one goes.", "Of those that wait, one goes. …"),
        ("The rest waits, who are late.", "who"),
        ("It is no server.", "is no server"),
        ("Nobody waits.", "Nobody"),
        ("One. **What is wanted** is this.", "**What is wanted** is this. …"),
        ("| a | What it does. |", "What it does. …"),
        ("- a\n- Whether it runs, is open.", "Whether it runs, is open. …"),
    ],
)
def test_hard_phrases_are_counted(text: str, phrase: str) -> None:
    assert phrase in [hit.text for hit in hits_in_document(text) if hit.kind == "phrases"]


@pytest.mark.parametrize(
    "text",
    [
        "It is no longer there.",
        "## What it does\n\n## How to start",
        "What does it do? It counts.",
        "```\nthe server says so\n```\n\n    nobody types this\n",
        "<!--= table -->\n| likewise |\n| --- |\n<!--/-->",
        "See [the page](who/told.md) <!-- nobody reads this -->.",
        "People who train models need it.",
    ],
)
def test_other_text_is_not_counted(text: str) -> None:
    assert hits_in_document(text) == []


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([". ", ".\n", ".\n\n- ", "?\n\n1. ", " |\n| ", ".\n# "])), min_size=1
    )
)
def test_only_long_sentences_are_counted_at_their_lines(drawn: list[tuple[int, str]]) -> None:
    text, expected = "| " if drawn[0][1].startswith(" |") else "", []
    in_table = bool(text)
    for length, separator in drawn:
        if in_table != separator.startswith(" |"):  # a table ends at an empty line, and begins behind one
            text, in_table = text.rstrip("| \n") + "\n\n" + ("" if in_table else "| "), not in_table
        if length > language.LONGEST_SENTENCE:
            expected.append(text.count("\n") + 1)
        text += "Word" + " `one word`" * (length - 1) + separator
    assert [hit.line for hit in hits_in_document(text) if hit.kind == "long sentences"] == expected


def test_docstrings_begin_with_an_imperative_or_a_noun_phrase() -> None:
    starts = ["What is here.", "Return what is here.", "Of those.", "\n    How it goes.", "Thatched roofs."]
    source = "\n".join(f'def f{number}():\n    """{start}"""' for number, start in enumerate(starts))
    assert [hit.line for hit in hits_in_code(source)] == [2, 6, 8]


@given(COUNTING)
def test_counts_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[str, dict[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    write_counts(counts, path)
    assert read_counts(path) == json.loads(path.read_text()) == counts


def test_both_sides_of_a_merge_are_read(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(
        '{\n<<<<<<< a\n"x.md": {"phrases": 3, "long sentences": 1},\n=======\n"x.md": {"phrases": 2}\n>>>>>>> b\n}\n'
    )
    assert read_counts(path) == {"x.md": {"phrases": 3, "long sentences": 1}}


def test_hits_may_move_but_not_rise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language.read_counts, "__defaults__", (tmp_path / "counts.json",))
    monkeypatch.setattr(language.write_counts, "__defaults__", (tmp_path / "counts.json",))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("It says so.\n")
    page = tmp_path / "docs" / "page.md"
    assert language.main([]) == 0
    (tmp_path / "README.md").write_text("It does so.\n")
    page.write_text("It says so.\n")
    assert language.main([]) == 0
    assert read_counts(tmp_path / "counts.json")["docs/page.md"] == {"phrases": 1}
    page.write_text("It says so. It said so.\n")
    assert language.main([]) == 1
    assert "docs/page.md: 2 phrases, limit 1" in capsys.readouterr().out
    assert read_counts(tmp_path / "counts.json")["docs/page.md"] == {"phrases": 1}
