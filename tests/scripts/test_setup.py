"""set-up's command line and its refusals; the installation itself is what every fresh clone tries."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_setup(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "setup.sh", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus"], ["'--gpus'", "--help"]),
        (["--cpu", "--gpu"], ["--cpu", "--gpu", "exclude"]),
        (["--venv"], ["--venv", "folder"]),
        (["--cpu", "--venv", "/proc/nowhere/venv"], ["cannot make", "/proc/nowhere"]),
    ],
)
def test_bad_options_are_named_in_one_line(arguments: list[str], words: list[str]) -> None:
    done = run_setup(*arguments)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_of_another_user_is_refused_with_the_remedy(is_there: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        venv = folder / "venv"
        if is_there:
            venv.mkdir(mode=0o555)
        folder.chmod(0o555)
        words: list[str | Path] = [ROOT / "scripts" / "setup.sh", "--cpu", "--venv", venv]
        if os.geteuid() == 0:  # may write everywhere
            words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        folder.chmod(0o755)
    assert done.returncode == 1
    changed = venv if is_there else folder
    assert done.stderr.startswith(f"setup: {changed} cannot be written by "), done.stderr
    assert "LOCKSTEP_VENV" in done.stderr


def test_help_lists_the_variables() -> None:
    done = run_setup("--help")
    assert done.returncode == 0
    for word in ("--cpu", "--gpu", "--venv", "LOCKSTEP_TORCH_INDEX", "PYTHON"):
        assert word in done.stdout


def test_an_old_python_is_refused_by_version(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = run_setup("--cpu", "--venv", tmp_path / "venv", PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.9.1" in done.stderr
    assert "3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_other_build_is_refused_in_the_same_environment(tmp_path: Path) -> None:
    """Both distributions of vLLM own the same files, so one environment cannot hold both."""
    venv = tmp_path / "venv"
    subprocess.run(
        [os.environ.get("PYTHON", "python3"), "-m", "venv", "--without-pip", venv],
        check=True,
        timeout=180,
    )
    (venv / ".lockstep-mode").write_text("gpu\n")
    done = run_setup("--cpu", "--venv", venv)
    assert done.returncode == 1
    assert "--gpu" in done.stderr
    assert "another --venv" in done.stderr


def test_a_failed_installation_shows_pips_last_lines_and_a_remedy(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run(
        [os.environ.get("PYTHON", "python3"), "-m", "venv", "--without-pip", venv],
        check=True,
        timeout=180,
    )
    done = run_setup("--cpu", "--venv", venv)  # without pip in it, the first step must fail
    assert done.returncode == 1
    assert "No module named pip" in done.stderr
    assert "run this again" in done.stderr
    assert not (venv / ".lockstep-packages").exists()
