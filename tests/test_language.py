"""tests/language.py: which phrases and sentences it finds, and where. test_project.py wants none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import language
from tests.language import hits_in_code, hits_in_document


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


LONG = "Word" + " word" * language.LONGEST_SENTENCE + "."


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (f"# {LONG}", [1]),
        (f"# A title.\n# {LONG}", [2]),
        (f'"""A title.\n\n{LONG}\n"""', [3]),
        (f'def f(a):\n    """Do it.\n\n    Args:\n        a: {LONG}\n    """', [5]),
        (f'raise ValueError("{LONG}")', [1]),
        (f'raise ValueError(f"{LONG} {{x}}")', [1]),
        (
            'def f(a, b):\n    """Do it.\n\n    Args:\n'
            f'        a: {LONG[:70]}\n        b: {LONG[:70]}\n    """',
            [],
        ),
        (f'"""A table.\n\nname    {LONG[:70]}\nother   {LONG[:70]}\n"""', []),
        (f"# {LONG[:70]}\n\n# {LONG[:70]}", []),
        ('x = "' + "{a b c} " * 20 + '"', []),
    ],
)
def test_long_sentences_of_code_are_counted(source: str, lines: list[int]) -> None:
    hits = hits_in_code(source)
    assert [hit.line for hit in hits if hit.kind == "long sentences"] == lines
    messages = [hit.line for hit in hits_in_code(source, messages=False)]
    assert messages == ([] if source.startswith("raise") else lines)


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


def test_a_listed_phrase_is_no_complaint_and_an_entry_without_a_phrase_is() -> None:
    hits = [("a/b.py", hit) for hit in hits_in_document("It says no.\n\nIt told us.")]
    listed = {("a/b.py", "says"): "a field", ("a/c.py", "told"): "a field"}
    told, unused = language.complaints(hits, listed)
    assert told.startswith("a/b.py:3: told (")
    assert "a/c.py has no 'told' any more" in unused


def test_the_command_names_what_is_left_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "LISTED", {})
    (tmp_path / "scripts").mkdir()
    (tmp_path / "README.md").write_text("It does so.\n")
    assert language.main([]) == 0
    (tmp_path / "scripts" / "a.py").write_text("# It says so.\n")
    assert language.main([]) == 1
    assert "scripts/a.py:1: says (" in capsys.readouterr().out


def test_names_of_parameters_are_not_words() -> None:
    source = 'def f():\n    """Do it.\n\n    Args:\n        say, told: what it says.\n    """\n'
    assert [(hit.line, hit.text) for hit in hits_in_code(source)] == [(5, "says")]


@pytest.mark.parametrize(
    ("suffix", "source", "hits"),
    [
        (".js", "// Who\n// told it.\nfetch(`https://said.it`);\n", [(2, "told")]),
        (
            ".js",
            '/**\n * It is no\n * list.\n */\nshow("nobody is here", told);',
            [(2, "is no list"), (5, "nobody")],
        ),
        (".js", "const url = /^https?:\\/\\//, said = `it ${told.said} us`;\n", []),
        (
            ".sh",
            'told=1 # It\n# says so.\ndie "$told is no file"\n',
            [(2, "says"), (3, "is no file")],
        ),
        (
            ".jinja",
            '"""It says {{ told }}."""\n\ntold = 1  # nobody waits\n',
            [(1, "says"), (3, "nobody")],
        ),
        (".sh", f"#!/bin/sh\n# {LONG}\ndie '{LONG}'\n", [(2, f"{LONG[:60].strip()} …")]),
        (".js", f"/**\n * {LONG}\n */", [(2, f"{LONG[:60].strip()} …")]),
    ],
)
def test_comments_and_strings_of_scripts_are_read(
    suffix: str, source: str, hits: list[tuple[int, str]]
) -> None:
    found = language.hits_in_script(source, language.TEXTS[suffix])
    assert [(hit.line, hit.text) for hit in found] == hits
