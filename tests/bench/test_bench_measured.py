"""bench/measured.py: the commit and the time that each row of a results file carries."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench import measured as module
from bench.measured import COMMIT_VARIABLE, commit, measured


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the code under test thinks that it lies."""
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_the_commit_is_gits_and_says_whether_files_differ_from_it(folder: Path) -> None:
    git(folder, "init", "-q")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-qm", "first")
    head = git(folder, "rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (folder / "results.json").write_text("{}")  # the output of a run does not change the code
    assert commit() == head
    (folder / "file").write_text("2")
    assert commit() == head + "+"


def test_a_variable_names_the_commit_where_there_is_no_git(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit() == "unknown"
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert commit() == "abc123"


def test_rows_of_one_process_have_the_run_in_common() -> None:
    first, second = measured(), measured()
    assert first["run"] == second["run"] <= first["date"] <= second["date"]
    assert datetime.strptime(second["date"], "%Y-%m-%d %H:%M").replace(tzinfo=UTC) <= datetime.now(
        UTC
    )
