"""Write docs/options.md, the page of all options, from what each program prints for --help.

    python -m scripts.options_page            # write the page
    python -m scripts.options_page --check    # exit with status 1 if the page differs

Each option's text is in its program alone. The script reads help at a width at which no line wraps.
It sets no variable that could change a default.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
HELP_SECONDS = 240

_SERVER_FLAGS = (
    "import argparse; from vllm_patching.server.flags import add_flags; "
    "parser = argparse.ArgumentParser(); add_flags(parser); parser.print_help()"
)


@dataclass(frozen=True)
class Program:
    """One section of the page.

    Attributes:
        title: heading, as a reader types the program.
        command: arguments of Python, or a shell script.
        note: a sentence below the heading.
    """

    title: str
    command: tuple[str, ...]
    note: str = ""


PROGRAMS = (
    Program("scripts/quickstart.sh", ("scripts/quickstart.sh", "--help")),
    Program(
        "scripts/start.sh",
        ("scripts/start.sh", "--help"),
        "[Operations](operations.md) shows how to use it.",
    ),
    Program("scripts/status.sh", ("scripts/status.sh", "--help")),
    Program("scripts/logs.sh", ("scripts/logs.sh", "--help")),
    Program("scripts/restart.sh", ("scripts/restart.sh", "--help")),
    Program("scripts/stop.sh", ("scripts/stop.sh", "--help")),
    Program(
        "run-api",
        ("-m", "atroposlib.cli.run_api", "--help"),
        "The [rollout service](rollout-service.md).",
    ),
    Program(
        "view-run",
        ("-m", "atroposlib.cli.view_run", "--help"),
        "The [page](ui.md) of runs that have ended.",
    ),
    Program(
        "environments/*_server.py",
        ("environments/arithmetic_server.py", "serve", "--help"),
        "All [environments](environments.md) share these flags. Some have more: see their `serve --help`.",
    ),
    Program(
        "grpo.py",
        ("example_trainer/grpo.py", "--help"),
        "The [trainer](../example_trainer/README.md).",
    ),
    Program(
        "vllm_api_server.py",
        ("-c", _SERVER_FLAGS),
        "The server also takes all flags of `vllm serve`. These are the additional ones.",
    ),
    Program("simple_rl.py", ("example_trainer/simple_rl.py", "--help")),
    Program("reference_worker", ("-m", "example_trainer.reference_worker", "--help")),
    Program(
        "parameter_server",
        ("-m", "example_trainer.parameter_server", "--help"),
        "See [its page](parameter-server.md).",
    ),
    Program(
        "async_grpo",
        ("-m", "example_trainer.async_grpo", "--help"),
        "See [asynchronous runs](async.md).",
    ),
    Program("atropos-sft-gen", ("-m", "atroposlib.cli.sft", "--help")),
    Program("atropos-dpo-gen", ("-m", "atroposlib.cli.dpo", "--help")),
)
"""In the order of the page."""


def help_of(program: Program) -> str:
    """Return what a program prints for --help, without wrapped lines.

    Raises:
        SystemExit: the program failed; its last line is in the message.
    """
    command = [*program.command]
    if not command[0].endswith(".sh"):
        command.insert(0, sys.executable)
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LOCKSTEP_VENV", "TMPDIR")
        if name in os.environ
    }
    variables = {**kept, "COLUMNS": "10000", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=HELP_SECONDS,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise SystemExit(
            f"{program.title} --help ended with status {done.returncode}: {' '.join(last)}"
        )
    return done.stdout


@dataclass(frozen=True)
class Option:
    """One row of a table. `section` is the heading above it in the help."""

    section: str
    flag: str
    default: str
    text: str


_HEADING = re.compile(r"^([A-Za-z][^:]*):$")
_ENTRY = re.compile(r"^ {2}(?P<flag>\S(?:.*?\S)??)(?: {2,}(?P<text>\S.*))?$")
_DEFAULT = re.compile(
    r" ?\((?:default: (?P<default>[^()]*(?:\([^()]*\)[^()]*)*)|(?P<required>required))\)$"
)
_SKIPPED = ("-h, --help",)


def options_of(text: str) -> Iterator[Option]:
    """Yield the options in a help text of argparse."""
    section, flag, parts = "", "", list[str]()
    for line in [*text.splitlines(), "end:"]:
        heading, entry = _HEADING.match(line), _ENTRY.match(line)
        if flag and (heading or entry):
            yield _option(section, flag, " ".join(parts))
            flag = ""
        if heading:
            section = heading[1]
        elif entry and (entry["flag"].startswith("-") or section == "positional arguments"):
            flag, parts = entry["flag"], [entry["text"] or ""]
        elif flag and line.startswith("   "):
            parts.append(line.strip())


def _option(section: str, flag: str, text: str) -> Option:
    text = " ".join(text.split())
    at_the_end = _DEFAULT.search(text)
    default = ""
    if at_the_end:
        default = at_the_end["required"] or at_the_end["default"]
        text = text[: at_the_end.start()]
    if default in ("None", "[]"):
        default = ""
    return Option(section, flag, default, text)


def table(options: list[Option]) -> str:
    """Return a table of Markdown."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in options:
        cells = (f"`{option.flag}`", f"`{option.default}`" if option.default else "", option.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def section_of(program: Program, text: str) -> str:
    """Return a program's part of the page."""
    options = [option for option in options_of(text) if not option.flag.startswith(_SKIPPED)]
    if not options:
        raise SystemExit(f"{program.title} --help lists no option: is its format another one now?")
    parts = [f"## {program.title}", program.note]
    for name in dict.fromkeys(option.section for option in options):
        plain = name.lower() in ("", "options", "positional arguments", "commands")
        if not plain:
            parts.append(f"**{name}**")
        parts.append(table([option for option in options if option.section == name]))
    return "\n\n".join(filter(None, parts))


HEAD = """# Options

This page lists the options of every program, as `--help` prints them. `python -m scripts.options_page` writes it, and a test
compares it with the programs. A flag of a Python program is also a key of its YAML file (`--config FILE`). The
[trainer's page](../example_trainer/README.md) explains the options that matter first.
"""


def page() -> str:
    """Return the whole page."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        texts = list(pool.map(help_of, PROGRAMS))
    links = "\n".join(f"- [{program.title}](#{_anchor(program.title)})" for program in PROGRAMS)
    sections = "\n\n".join(
        section_of(program, text) for program, text in zip(PROGRAMS, texts, strict=True)
    )
    begin, end = (
        "<!-- generated by python -m scripts.options_page -->",
        "<!-- end of what is generated -->",
    )
    return f"{HEAD}\n{links}\n\n{begin}\n\n{sections}\n\n{end}\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/options.md from the programs' --help.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 if the page differs"
    )
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/options.md differs from the programs' --help: run `python -m scripts.options_page`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
