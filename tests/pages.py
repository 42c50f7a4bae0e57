"""Markdown pages as a reader sees them: headings with their anchors, links, and the text of a
section.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.language import ROOT

CODE_BLOCK = re.compile(r"^[ ]*```.*?^[ ]*```[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def without_code(text: str) -> str:
    """Blank the code blocks, whose brackets are not links and whose # begins a comment."""
    return CODE_BLOCK.sub("", text)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading, without the number of a repeated one."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")


@dataclass(frozen=True)
class Section:
    """One heading with the text up to the next heading of its level or above."""

    anchor: str
    title: str
    text: str


def sections(path: Path) -> list[Section]:
    """Return the sections of a page in order."""
    text = path.read_text(encoding="utf-8")
    blank = CODE_BLOCK.sub(lambda m: " " * len(m[0]), text)  # positions stay
    heads = list(re.finditer(r"^(#{1,6}) (.+)$", blank, re.MULTILINE))
    seen: Counter[str] = Counter()
    found = []
    for number, head in enumerate(heads):
        name = slug(head[2])
        anchor = f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1
        end = next(
            (later.start() for later in heads[number + 1 :] if len(later[1]) <= len(head[1])),
            len(text),
        )
        found.append(Section(anchor, head[2], text[head.end() : end]))
    return found


def section_of(path: Path, anchor: str) -> Section:
    """Return the section of a page with this anchor."""
    return next(section for section in sections(path) if section.anchor == anchor)


def shell_lines(text: str) -> list[str]:
    """Return the commands of the shell blocks in a text: continued lines joined, comments and
    blanks left out.
    """
    blocks = re.findall(r"^[ ]*```bash\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL)
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return language and text of each block of code, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Link:
    """A link to a file of the project.

    Attributes:
        text: the words that a reader clicks.
        file: the file that it leads to.
        anchor: the heading there; empty for the page itself.
    """

    text: str
    file: Path
    anchor: str


def links(path: Path, text: str | None = None) -> Iterator[Link]:
    """Yield the links of a page, or of a part of it, to files of the project."""
    shown = without_code(path.read_text(encoding="utf-8") if text is None else text)
    images = re.findall(r"(?:src|srcset)=\"([^\"]+)\"", shown)
    for words, target in [
        *((match["text"], match["target"]) for match in LINK.finditer(shown)),
        *(("", i) for i in images),
    ]:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        yield Link(words, (path.parent / name).resolve() if name else path.resolve(), anchor)


def broken_links(path: Path) -> list[str]:
    """Describe each link of a page whose file or heading does not exist."""
    broken = []
    for link in links(path):
        shown = link.file.relative_to(ROOT) if link.file.is_relative_to(ROOT) else link.file
        if not link.file.exists():
            broken.append(f"[{link.text}]: {shown} does not exist")
        elif link.anchor and link.anchor not in (
            anchors := [section.anchor for section in sections(link.file)]
        ):
            broken.append(
                f"[{link.text}]: {shown} has no heading #{link.anchor}; it has {', '.join(anchors)}"
            )
    return broken
