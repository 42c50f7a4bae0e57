"""`lockstep new-env NAME`: begin an environment, as a file that works and a test that passes."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, Field

from atroposlib.command_line import parse_options
from atroposlib.errors import UsageError

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST_NAME = 60
TAKEN = ("single_turn", "multi_turn", "base", "graded")
"""Their classes have the names of the SDK's own."""


class NewEnvironment(BaseModel):
    """The options of the command."""

    command: Literal["new-env"] = Field(description="new-env: write a new environment and its test")
    name: str = Field(description="such as word_count: small letters, digits and underscores")
    multi_turn: bool = Field(
        default=False, description="a conversation with a tool, not a question and an answer"
    )
    folder: Path | None = Field(
        default=None,
        description="where it goes (default: environments, if there is such a folder, or here)",
    )
    tests: Path | None = Field(
        default=None,
        description="where its test goes (default: tests/environments, if it is there, or beside "
        "the environment)",
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> NewEnvironment:
    """Read the command line."""
    description = "Begin an environment, as a file that works and a test that passes."
    positional = ("command", "name")
    return parse_options(NewEnvironment, arguments, "lockstep", description, positional)


def check_name(name: str) -> None:
    """Refuse a name that an environment cannot have.

    Raises:
        UsageError: the message names another one.
    """
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{name!r} cannot name an environment: give small letters, digits and single "
            f"underscores, {LONGEST_NAME} at most, such as word_count"
        )
    if name.endswith("_server"):
        raise UsageError(
            f"{name!r} cannot be used (the file's name gets _server by itself): choose another, "
            f"such as my_{name.removesuffix('_server')}"
        )
    if keyword.iskeyword(name) or name in TAKEN:
        raise UsageError(
            f"{name!r} cannot be used (Python or the SDK has that name): choose another, such as "
            f"my_{name}"
        )


def new_environment(name: str, multi_turn: bool, folder: Path, tests: Path) -> tuple[Path, Path]:
    """Write an environment and its test.

    Args:
        name: of the environment.
        multi_turn: a conversation with a tool.
        folder: where the environment goes.
        tests: where its test goes.

    Returns:
        Both files.

    Raises:
        UsageError: the name cannot be used, a file exists, or a folder is missing; nothing was
            written.
    """
    check_name(name)
    path, test_path = folder / f"{name}_server.py", tests / f"test_{name}_server.py"
    for file in (path, test_path):
        if not file.parent.is_dir():
            raise UsageError(
                f"there is no folder {file.parent}: make it, or name another (--folder, --tests)"
            )
        if file.exists():
            raise UsageError(f"{file} exists: choose another name, or move it away")
    words = {
        "name": name,
        "title": name.replace("_", " ").capitalize(),
        "class_name": "".join(word.capitalize() for word in name.split("_")) + "Env",
        "module": imported_as(path),
        "path": path,
    }
    templates = Environment(
        loader=PackageLoader("atroposlib.cli"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    template = "single_turn.py.jinja"
    if multi_turn:
        template = "multi_turn.py.jinja"
    texts = {
        path: templates.get_template(template).render(words),
        test_path: templates.get_template(f"test_{template}").render(words),
    }
    try:
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        for written in texts:
            written.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name another folder (--folder, --tests)"
        ) from None
    return path, test_path


def first_folder(*names: str) -> Path:
    """Return the first folder that exists, or the current one."""
    return next((Path(name) for name in names if Path(name).is_dir()), Path())


def imported_as(path: Path) -> str:
    """Return the name under which a test imports a file: with the packages that it is in."""
    parts, folder = [path.stem], path.absolute().parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def main(argv: list[str] | None = None) -> None:
    """Write the environment, and print what to do with it."""
    options = parse_arguments(argv)
    folder = options.folder or first_folder("environments")
    tests = options.tests or folder
    if options.tests is None and options.folder is None and folder != Path():
        tests = first_folder("tests/environments", str(folder))
    try:
        path, test_path = new_environment(options.name, options.multi_turn, folder, tests)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(
        f"{path}\n{test_path}\n\nTry it:\n    python -m pytest {test_path}\n    python {path} --help\n"
    )
    page = "multi-turn" if options.multi_turn else "your-environment"
    print(f"docs/{page}.md has the commands to try a model on it, and to train one on it")


if __name__ == "__main__":
    main()
