"""A tutorial as a test types it: the blocks of its page, the files that the reader saves, and its
commands.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.language import ROOT
from tests.pages import shell_lines


class Block(NamedTuple):
    """A block of code, and the paragraph before it."""

    before: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page in order."""
    text, end = page.read_text(encoding="utf-8"), 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[end : match.start()].strip().rpartition("\n\n")[2]
        end = match.end()
        yield Block(before, match[1], match[2])


def write_files(page: Path, folder: Path) -> set[str]:
    """Write each file as the page names it, append a later block for the same file, and return the
    names.
    """
    names = set()
    for block in blocks(page):
        if block.language in ("python", "csv"):
            name = re.findall(r"`(\w+\.\w+)`", block.before)[-1]
            names.add(name)
            with (folder / name).open("a") as file:
                file.write(block.text)
    return names


def command_lines(page: Path) -> list[str]:
    """Return the commands of a page in order, each without the comment behind it."""
    return shell_lines(page.read_text(encoding="utf-8"))


def words_of(line: str) -> list[str]:
    """Return the words of a Python command, with this interpreter and the files of this checkout."""
    found = shlex.split(line, comments=True)
    assert found[0] == "python", found
    ours = ("example_trainer/", "environments/", "assets/")
    return [
        sys.executable,
        *(str(ROOT / word) if word.startswith(ours) else word for word in found[1:]),
    ]
