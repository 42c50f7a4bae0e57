"""The defaults that the pages give are the program's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example_trainer.config import TrainerConfig, flag_of
from tests.conftest import ROOT

PAGE = ROOT / "example_trainer" / "README.md"
FIELDS = {flag_of(name): field for name, field in TrainerConfig.model_fields.items()}
PROSE = {
    "--loss", "--advantages", "--tokens-per-microbatch", "--share-prefixes", "--max-staleness", "--gradient-checkpointing",
    "--vllm-gpus", "--config",
}  # fmt: skip
"""Flags whose default the table describes in words, because it depends on other options."""


def rows() -> list[tuple[list[str], list[str]]]:
    """Flags and defaults of each row of the table of the trainer's options."""
    text = PAGE.read_text(encoding="utf-8").partition("| trainer (`grpo.py`) | default | |")[2]
    found = []
    for line in text.split("\n\n")[0].splitlines()[2:]:
        flags, default = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3])
        found.append(
            (re.findall(r"`(--[\w-]+)`", flags), [part.strip() for part in default.split(",")])
        )
    return found


def is_default(word: str, flag: str) -> bool:
    """Return whether a cell of the page names the default of a flag."""
    field = FIELDS[flag]
    if field.is_required():
        return word == "required"
    if word == "off":
        return not field.default
    plain = re.sub(r" (?:s|\(.*\))$", "", word).strip("`")
    number = isinstance(field.default, int | float)
    return float(plain) == field.default if number else plain == str(field.default)


def test_the_defaults_in_the_table() -> None:
    compared = 0
    for flags, defaults in rows():
        if PROSE & set(flags):
            continue
        assert len(defaults) in (1, len(flags)), flags
        for flag, word in zip(
            flags, defaults * (len(flags) if len(defaults) == 1 else 1), strict=True
        ):
            assert is_default(word, flag), (
                f"{flag}: the page says {word!r}, the program {FIELDS[flag].default!r}"
            )
            compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", PAGE, *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_defaults_in_the_prose(page: Path) -> None:
    """`--flag` (10) and `--flag` (600 s) name the default."""
    named = r"`(--[\w-]+)` \((\d+(?:\.\d+)?(?:e-\d+)?)(?: s\b|[);,:])"
    for flag, number in re.findall(named, page.read_text(encoding="utf-8")):
        if flag in FIELDS:
            assert float(number) == FIELDS[flag].default, f"{page.name}: {flag} ({number})"
