"""The command line of lock.sh; the resolution itself needs the package index."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_help_is_the_comment_at_the_top() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "lock.sh", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "scripts/lock.sh --vllm VERSION FILE resolves" in done.stdout
    assert "set -e" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu"], ["'--gpu'", "--upgrade", "--vllm VERSION FILE"]),
        (["--vllm"], ["which version of vLLM"]),
        (["--vllm", "0.33.0"], ["the file for the list"]),
        (["--vllm", "newest", "list.txt"], ["'newest' is not a version"]),
    ],
)
def test_bad_options_change_nothing(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "lock.sh", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert all(word in done.stderr for word in words), done.stderr
    assert list(tmp_path.iterdir()) == []
