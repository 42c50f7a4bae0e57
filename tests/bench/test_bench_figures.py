"""bench/figures.py: documents repeat the values of bench/results/, and name a source for each
measured figure.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import figures
from bench.figures import MARKED, documents, main, rewritten, unsourced
from bench.results_book import Book, FigureError, Table, sources

ROOT = Path(__file__).resolve().parents[2]
DATED = {"commit": "abc", "date": "2026-01-02 03:04", "run": "2026-01-02 03:00"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the documents and results, to change."""
    for folder in ("docs", "example_trainer"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    for document in documents(ROOT):
        shutil.copy(document, tmp_path / document.relative_to(ROOT))
    return tmp_path


def book(folder: Path, **pages: Any) -> Book:
    for name, page in pages.items():
        (folder / f"{name}.json").write_text(json.dumps(page))
    return Book(folder)


def test_documents_say_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_documents_hold_the_figures_that_users_ask_for() -> None:
    found = {
        str(path.relative_to(ROOT)): MARKED.findall(path.read_text(encoding="utf-8"))
        for path in documents(ROOT)
    }
    assert {
        "README.md",
        "docs/weight-bridge.md",
        "docs/determinism.md",
        "docs/rollout-service.md",
        "docs/lora.md",
    } <= {n for n, f in found.items() if f}
    marked = {what for figures_of_one in found.values() for what, _ in figures_of_one}
    assert {"updates_1.7b", "generation_in_all", "single_copy", "cost", "service_rates"} <= marked


@pytest.mark.parametrize(
    ("document", "value"),
    [("README.md", "quickstart_table"), ("docs/weight-bridge.md", "updates_1.7b")],
)
def test_a_document_that_differs_is_found_and_rewritten(
    copy: Path, document: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / document
    right = path.read_text(encoding="utf-8")
    wrong = re.sub(rf"(<!--= {re.escape(value)}[^>]*-->[^<]*?)\d", r"\g<1>987", right, count=1)
    assert wrong != right
    path.write_text(wrong, encoding="utf-8")
    assert main(["--check"], copy) == 1
    assert "987" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == wrong, "a check changes nothing"
    assert main([], copy) == 0
    assert path.read_text(encoding="utf-8") == right


def test_a_result_that_differs_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "bench" / "results" / "weight_sync_qwen3-1.7b.json"
    data = json.loads(path.read_text())
    data["bridge"]["direct"]["idle"]["whole_update_ms"]["median"] = 4321.0
    path.write_text(json.dumps(data))
    assert main(["--check"], copy) == 1
    assert "+| **the trainer waits for an update**, idle | 4321 ms" in capsys.readouterr().out


def test_a_row_without_commit_and_date_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "bench" / "results" / "bridge_faults.json"
    data = json.loads(path.read_text())
    data["faults"][3]["measured"]["recorded_in"] = "unknown"
    path.write_text(json.dumps(data))
    assert main(["--check"], copy) == 1
    assert "bridge_faults.json /faults/3: no commit and date" in capsys.readouterr().out


def commits_in(node: Any) -> Iterator[str]:
    """Every commit that a page's rows are of, or were recorded in."""
    if isinstance(node, dict):
        if isinstance(measured := node.get("measured"), dict):
            yield from (measured[key] for key in ("commit", "recorded_in") if key in measured)
        node = [*node.values()]
    for inner in node if isinstance(node, list) else ():
        yield from commits_in(inner)


def test_every_commit_that_a_result_names_is_in_the_history() -> None:
    """A commit that a rebase has left behind names code that is lost."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, timeout=60
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("this copy of the repository has no whole history")
    history = subprocess.run(
        [*git, "rev-list", "HEAD"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    results = ROOT / "bench" / "results"
    pages = {
        path.name: [json.loads(path.read_text(encoding="utf-8"))] for path in results.glob("*.json")
    }
    pages |= {
        path.name: [json.loads(line) for line in path.open(encoding="utf-8")]
        for path in results.glob("*.jsonl")
    }
    named = {
        (name, commit.removesuffix("+"))
        for name, rows in pages.items()
        for commit in commits_in(rows)
    }
    assert {name for name, _ in named} == set(pages)
    assert not {(name, commit) for name, commit in named if f"\n{commit}" not in f"\n{history}"}, (
        "see bench/results/README.md"
    )


def test_a_figure_without_a_source_is_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copy / "docs" / "architecture.md").open("a", encoding="utf-8") as document:
        document.write("\nAn update takes 3 ms.\n")
    assert main(["--check"], copy) == 1
    assert "docs/architecture.md: no source for: An update takes 3 ms." in capsys.readouterr().out


@pytest.mark.parametrize(
    "figure",
    ["3 ms", "12.5 µs", "0.3 GB/s", "95 %", "3.5%", "765 groups/s", "16,384 tokens", "0.79 ± 0.08"],
)
def test_what_looks_measured_needs_a_source(figure: str) -> None:
    line = f"It came to {figure}."
    assert unsourced(f"first line\n{line}\n", []) == [line]
    assert unsourced(line, [line]) == []
    assert unsourced(f"It came to <!--= x y @d -->{figure}<!--/-->.", []) == []
    assert unsourced(f"```\n{line}\n```\n", []) == [], "a program's output, say"


@pytest.mark.parametrize(
    "plain",
    ["vLLM 0.26.0", "--bridge-timeout 120", "a 60 s silence", "port 9001", "at most 1,024 rows"],
)
def test_settings_and_versions_need_none(plain: str) -> None:
    assert unsourced(plain, []) == []


def test_a_value_is_formatted_and_scaled(tmp_path: Path) -> None:
    pages = book(
        tmp_path, sync={"measured": DATED, "rows": [{"measured": DATED, "a b, c": 12345.678}]}
    )
    text = "x <!--= sync rows/0/a b, c @,.0f --><!--/--> y <!--= sync rows/0/a b, c @*1e-3 .2f -->old\ntext<!--/--> z"
    new = rewritten(text, pages)
    assert (
        new
        == "x <!--= sync rows/0/a b, c @,.0f -->12,346<!--/--> y <!--= sync rows/0/a b, c @*1e-3 .2f -->12.35<!--/--> z"
    )
    assert rewritten(new, pages) == new


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("sync rows/1/a @d", "has no rows/1/a"),
        ("other a @d", "there is no other.json"),
        ("sync name @s", "'x' is not a number"),
        ("sync rows/0/a @nonsense", "Invalid format|format|nonsense"),
        ("nobody_has_this_name", "neither the name of a figure nor FILE"),
    ],
)
def test_a_figure_that_cannot_be_had_is_an_error(tmp_path: Path, what: str, error: str) -> None:
    pages = book(
        tmp_path, sync={"measured": DATED, "name": "x", "rows": [{"measured": DATED, "a": 1}]}
    )
    with pytest.raises(FigureError, match=error):
        rewritten(f"<!--= {what} --><!--/-->", pages)


def test_comments_that_do_not_close_are_an_error(tmp_path: Path) -> None:
    pages = book(tmp_path, sync={"measured": DATED, "a": 1})
    with pytest.raises(FigureError, match="do not close"):
        rewritten("<!--= sync a @d -->1", pages)


def test_a_value_has_the_date_of_its_row_or_of_what_it_lies_in(tmp_path: Path) -> None:
    later = {**DATED, "commit": "def"}
    page = {
        "direct": {"measured": DATED, "idle": {"measured": later, "ms": 1}, "check": {"ms": 2}},
        "bare": {"ms": 3},
    }
    pages = book(tmp_path, sync=page)
    assert pages.measured("sync", "direct/idle/ms") == later
    assert pages.measured("sync", "direct/check/ms") == DATED
    with pytest.raises(FigureError, match="no commit and date"):
        pages.number("sync", "bare/ms")
    assert pages.undated() == ["bench/results/sync.json /bare: no commit and date"]


def test_a_table_says_whether_it_is_of_one_run(tmp_path: Path) -> None:
    other = {"recorded_in": "def", "date": "2025-12-31 00:00", "run": "an earlier one"}
    pages = book(
        tmp_path,
        sync={
            "ours": {"measured": DATED},
            "also ours": {"measured": DATED},
            "theirs": {"measured": other},
        },
    )
    one = {side: ("sync", side) for side in ("ours", "also ours")}
    assert sources(pages, one) == "One run of 2026-01-02, commit abc."
    text = sources(pages, {**one, "theirs": ("sync", "theirs")})
    assert text.startswith(
        "Not of one run. ours, also ours: 2026-01-02, commit abc; theirs: 2025-12-31, recorded in def."
    )


def test_a_table_is_made_of_templates(tmp_path: Path) -> None:
    rows = {
        "a": {"measured": DATED, "ms": 1.5, "more": {"x": 8}, "good": True},
        "b": {"measured": DATED, "ms": 250.0, "good": True},
    }
    pages = book(tmp_path, sync={"rows": rows})
    columns = {"ms": "{ROW/ms @ms}", "share": "{ROW/more/x? ÷ ROW/ms @.1f}"}
    table = Table("sync", {"first": "rows/a", "second": "rows/b"}, columns)
    assert table(pages) == (
        "|  | ms | share |\n| --- | --- | --- |\n| first | 1.5 | 5.3 |\n| second | 250 |  |\n\n"
        "One run of 2026-01-02, commit abc."
    )
    note = "{max:rows/*/ms @three digits} of {all:rows/*/good @d}"
    across = replace(table, note=note, across=True, corner="{mean:rows/*/ms @.2f}")(pages)
    assert across.startswith("| 125.75 | first | second |\n| --- | --- | --- |\n| ms | 1.5 | 250 |")
    assert across.endswith("\n\n250 of 2")
    rows["b"]["good"] = False
    with pytest.raises(FigureError, match="a document states that all are true"):
        book(tmp_path, sync={"rows": rows}).value("sync", "all:rows/*/good")


def test_every_named_figure_is_shown_somewhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in documents(ROOT))
    assert [name for name in figures.NAMED if f"<!--= {name} -->" not in text] == []
