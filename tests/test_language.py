"""tests/language.py: what is counted, where it stands, and how limits are kept. test_project.py
compares with the limits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import language
from tests.language import hits_in_code, hits_in_document, read_counts, write_counts

COUNTING = st.dictionaries(
    st.sampled_from(["README.md", "docs/a.md", "docs/b.md", "folder/"]),
    st.dictionaries(st.sampled_from(["phrases", "long sentences"]), st.integers(1, 90)),
    min_size=1,
)


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
        st.tuples(
            st.integers(1, 60),
            st.sampled_from([". ", ".\n", ".\n\n- ", "?\n\n1. ", " |\n| ", ".\n# "]),
        ),
        min_size=1,
    )
)
def test_only_long_sentences_are_counted_at_their_lines(drawn: list[tuple[int, str]]) -> None:
    text, expected = "| " if drawn[0][1].startswith(" |") else "", []
    in_table = bool(text)
    for length, separator in drawn:
        if in_table != separator.startswith(
            " |"
        ):  # a table ends at an empty line, and begins behind one
            text, in_table = text.rstrip("| \n") + "\n\n" + ("" if in_table else "| "), not in_table
        if length > language.LONGEST_SENTENCE:
            expected.append(text.count("\n") + 1)
        text += "Word" + " `one word`" * (length - 1) + separator
    assert [hit.line for hit in hits_in_document(text) if hit.kind == "long sentences"] == expected


def test_docstrings_begin_with_an_imperative_or_a_noun_phrase() -> None:
    starts = [
        "What is here.",
        "Return what is here.",
        "Of those.",
        "\n    How it goes.",
        "Thatched roofs.",
    ]
    source = "\n".join(
        f'def f{number}():\n    """{start}"""' for number, start in enumerate(starts)
    )
    hits = [hit for hit in hits_in_code(source) if hit.kind == "docstring openings"]
    assert [hit.line for hit in hits] == [2, 6, 8]


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


CODE = '''
# Who waits
# hears it told.

NAME = 1  # nobody
NEXT = 2  # likewise

def f(x):
    """Return what is said.

    It is no
    server."""
    raise ValueError(f"no {x} heard"
        f" of {x}", "likewise")
'''


@pytest.mark.parametrize(
    ("line", "phrase"),
    [(3, "hears"), (3, "told"), (5, "nobody"), (6, "likewise"), (9, "said"), (11, "is no server")],
)
def test_phrases_of_comments_and_docstrings_are_counted(line: int, phrase: str) -> None:
    for messages in (True, False):
        assert (line, phrase) in [(hit.line, hit.text) for hit in hits_in_code(CODE, messages)]


def test_phrases_of_messages_are_counted_and_those_of_names_are_not() -> None:
    added = set(hits_in_code(CODE)) - set(hits_in_code(CODE, messages=False))
    assert [(hit.line, hit.text) for hit in added] == [(13, "heard")]


def test_a_line_of_a_comment_belongs_to_the_one_above_it() -> None:
    source = "a = 1  # It is no\n# server.\n\n# It is\n# no server.\n  # nor\n"
    assert list(language.comments(source)) == [
        (1, "It is no"),
        (2, "server."),
        (4, "It is\nno server."),
        (6, "nor"),
    ]


def test_there_is_no_is_plain() -> None:
    assert hits_in_document("If there is no folder, and there\nare no files, it waits.") == []


def test_a_listed_phrase_is_not_counted_and_an_unused_entry_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits = {"a/": [("a/b.py", hit) for hit in hits_in_document("It says no. It told us.")]}
    listed = {("a/b.py", "says"): "a field", ("a/c.py", "told"): "a field"}
    monkeypatch.setattr(language, "LISTED", listed)
    assert language.counted(hits) == {"a/": {"phrases": 1}}
    assert language.unused(hits, listed) == [("a/c.py", "told")]


def test_a_plain_package_has_no_limit(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    write_counts({"scripts/": {"phrases": 1}, "folder/": {"phrases": 2}}, path)
    assert read_counts(path) == {"folder/": {"phrases": 2}}
    assert language.risen({"scripts/": {"phrases": 1}}, read_counts(path)) == [
        ("scripts/", "phrases", 1, 0)
    ]


def test_names_of_parameters_are_not_words() -> None:
    source = 'def f():\n    """Do it.\n\n    Args:\n        say, told: what it says.\n    """\n'
    assert [(hit.line, hit.text) for hit in hits_in_code(source)] == [(5, "says")]
