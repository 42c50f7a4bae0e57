"""docs/your-loss.md, typed from its own text: its files are written, its commands run, and its
errors appear.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Processes
from tests.forked_commands import FORK_CHILDREN, run_command
from tests.typed_page import blocks, command_lines, words_of, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
PAGE = ROOT / "docs" / "your-loss.md"
STEPS = 3


def command_with(text: str) -> list[str]:
    (line,) = (line for line in command_lines(PAGE) if text in line)
    return words_of(line)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    assert write_files(PAGE, tmp_path) == {"my_losses.py", "test_my_losses.py"}
    return tmp_path


def test_every_command_is_typed_here_or_elsewhere() -> None:
    commands = command_lines(PAGE)
    elsewhere = {
        "example_trainer/grpo.py": "test_algorithms_page.py",
        "tensorboard": "a server, whose files are looked for here",
    }
    typed = [text for text in commands if not any(name in text for name in elsewhere)]
    assert (len(commands), len(typed)) == (5, 3)


def test_its_numbers_are_right(folder: Path) -> None:
    result = run_command(command_with("pytest"), directory=folder)
    assert result.returncode == 0, result.stdout
    assert "3 passed" in result.stdout


def test_its_mistake_is_refused_with_the_line_that_it_shows(folder: Path) -> None:
    (shown,) = (block.text for block in blocks(PAGE) if block.text.startswith("ERROR"))
    result = run_command(command_with("my_losses:averaged"), directory=folder)
    assert result.returncode == 2
    assert re.sub(r" \d\d:\d\d:\d\d ", " 12:00:00 ", result.stdout.splitlines()[-1]).startswith(
        shown.rstrip(" …\n")
    )


def test_its_loss_trains(folder: Path, processes: Processes) -> None:
    command = command_with(
        "my_losses:pulled_back --advantages my_losses:ranks --clip-eps 0.1 --minibatches 4 --output"
    )
    command[command.index("--steps") + 1] = str(STEPS)
    text = processes.finish(processes.start("page", command, FORK_CHILDREN, folder), seconds=280)
    assert f"Step {STEPS}/{STEPS}  reward " in text
    output = folder / "outputs" / "pulled_back"
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert sum(row["clip_fraction_low"] + row["clip_fraction_high"] for row in rows) > 0, (
        "no bound acted"
    )
    assert list((output / "tensorboard").iterdir())
