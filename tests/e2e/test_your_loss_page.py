"""docs/your-loss.md, typed from its own text: its files are written, its commands run, and its errors appear."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT, Processes
from tests.forked_commands import FORK_CHILDREN, run_command

pytestmark = pytest.mark.e2e
PAGE = (ROOT / "docs" / "your-loss.md").read_text(encoding="utf-8")
STEPS = 3


class Block(NamedTuple):
    """A block of code, and the paragraph before it."""

    before: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    end = 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        before = PAGE[end : match.start()].strip().rpartition("\n\n")[2]
        end = match.end()
        yield Block(before, match[1], match[2])


def words(block: Block) -> list[str]:
    """Return the words of a block's one command, with this Python and the files of this checkout."""
    found = shlex.split(block.text.replace("\\\n", " "))
    assert found[0] == "python", found
    return [sys.executable, *(str(ROOT / word) if word.startswith("example_trainer/") else word for word in found[1:])]


def write_files(folder: Path) -> None:
    """Write each file as the page names it; a later block for the same file is appended."""
    for block in blocks():
        if block.language == "python":
            name = re.findall(r"`(\w+\.py)`", block.before)[-1]
            with (folder / name).open("a") as file:
                file.write(block.text)


def command_with(text: str) -> list[str]:
    (block,) = (block for block in blocks() if block.language == "bash" and text in block.text)
    return words(block)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"my_losses.py", "test_my_losses.py"}
    return tmp_path


def test_every_command_is_typed_here_or_elsewhere() -> None:
    commands = [block.text for block in blocks() if block.language == "bash"]
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
    (shown,) = (block.text for block in blocks() if block.text.startswith("ERROR"))
    result = run_command(command_with("my_losses:averaged"), directory=folder)
    assert result.returncode == 2
    assert re.sub(r" \d\d:\d\d:\d\d ", " 12:00:00 ", result.stdout.splitlines()[-1]).startswith(shown.rstrip(" …\n"))


def test_its_loss_trains(folder: Path, processes: Processes) -> None:
    command = command_with("my_losses:pulled_back --advantages my_losses:ranks --clip-eps 0.1 --minibatches 4 --output")
    command[command.index("--steps") + 1] = str(STEPS)
    text = processes.finish(processes.start("page", command, FORK_CHILDREN, folder), seconds=280)
    assert f"Step {STEPS}/{STEPS}  reward " in text
    output = folder / "outputs" / "pulled_back"
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS
    assert sum(row["clip_fraction_low"] + row["clip_fraction_high"] for row in rows) > 0, "no bound acted"
    assert list((output / "tensorboard").iterdir())
