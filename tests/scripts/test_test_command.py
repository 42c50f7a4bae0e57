"""scripts/test.sh chooses the tests: the default tier alone, all of them, or what pytest is asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get(f"STATUS_{{sys.argv[2]}}", "0")))
"""
"""Stands in for the interpreter of the virtual environment: it writes down its arguments."""


def run_command(
    folder: Path, *arguments: str, script: str = "scripts/test.sh", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the test command in a folder of its own; return its end and pytest's arguments."""
    for name in ("scripts/test.sh", ".ci/run"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / "bin").mkdir()
    for name, text in {"scripts/setup.sh": "#!/bin/sh\n", "bin/python": RECORDER}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    # Without a package manager, .ci/run installs no browser.
    (folder / "bin" / "chromium").symlink_to("/bin/true")
    calls = folder / "calls"
    done = subprocess.run(
        [folder / script, *arguments],
        env=os.environ
        | {"CALLS": str(calls), "LOCKSTEP_VENV": str(folder)}
        | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line)[1:] for line in calls.read_text().splitlines()]
    return done, [
        words[1:] for words in lines if words[0] == "pytest" and "--collect-only" not in words
    ]


def test_help_runs_nothing() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "test.sh", "--help"],
        env=os.environ | {"LOCKSTEP_VENV": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--all" in done.stdout


def test_without_arguments_the_nightly_tests_are_left_out(tmp_path: Path) -> None:
    done, [words] = run_command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert words[-2:] == ["-m", "not nightly"]


@pytest.mark.parametrize("script", ["scripts/test.sh", ".ci/run"])
def test_all_and_continuous_integration_choose_nothing(tmp_path: Path, script: str) -> None:
    arguments = ["--all"] if script == "scripts/test.sh" else []
    done, [words] = run_command(tmp_path, *arguments, script=script)
    assert done.returncode == 0, done.stderr
    assert "--numprocesses" in words
    assert "-m" not in words
    assert "--all" not in words


@pytest.mark.parametrize("before", [[], ["--all"]])
def test_other_arguments_go_to_pytest(tmp_path: Path, before: list[str]) -> None:
    _, [words] = run_command(tmp_path, *before, "-k", "bridge and not gpu")
    assert words == ["-k", "bridge and not gpu"]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_what_failed_is_named_and_the_rest_runs_all_the_same(tmp_path: Path, failing: str) -> None:
    done, calls = run_command(tmp_path, **{f"STATUS_{failing}": "1"})
    assert done.returncode == 1
    assert f"test: FAILED: {failing}" in done.stderr
    assert len(calls) == 1
