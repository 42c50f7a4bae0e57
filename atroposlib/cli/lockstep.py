"""`lockstep new-env NAME`: begin an environment, as a file that works and a test that passes."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from atroposlib.errors import UsageError

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST_NAME = 60
TAKEN = ("single_turn", "multi_turn", "base", "graded")
"""Their classes have the names of the SDK's own."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lockstep", description="Lockstep's commands.")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "new-env", help="write a new environment with its test", description=__doc__
    )
    new.add_argument("name", help="such as word_count: small letters, digits and underscores")
    new.add_argument(
        "--multi-turn",
        action="store_true",
        help="a conversation with a tool, not a question and an answer",
    )
    new.add_argument(
        "--folder",
        type=Path,
        help="where it goes (default: environments, if there is such a folder, or here)",
    )
    new.add_argument(
        "--tests",
        type=Path,
        help="where its test goes (default: tests/environments, if it is there, or beside it)",
    )
    return parser.parse_args(argv)


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
        UsageError: the name cannot be used, a file is there already, or a folder is not; nothing
            was written.
    """
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{name!r} is no name of an environment: small letters, digits and single underscores, {LONGEST_NAME} at most, "
            "such as word_count"
        )
    if name.endswith("_server") or keyword.iskeyword(name) or name in TAKEN:
        why = (
            "the file's name gets _server by itself"
            if name.endswith("_server")
            else "Python or the SDK has that name"
        )
        raise UsageError(
            f"{name!r} cannot be used ({why}): choose another, such as my_{name.removesuffix('_server')}"
        )
    path, test_path = folder / f"{name}_server.py", tests / f"test_{name}_server.py"
    for file in (path, test_path):
        if not file.parent.is_dir():
            raise UsageError(
                f"there is no folder {file.parent}: make it, or name another (--folder, --tests)"
            )
        if file.exists():
            raise UsageError(f"{file} exists: choose another name, or move it away")
    kind = "multi_turn" if multi_turn else "single_turn"
    templates = Environment(
        loader=PackageLoader("atroposlib.cli"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    words = {
        "name": name,
        "title": name.replace("_", " ").capitalize(),
        "class_name": "".join(word.capitalize() for word in name.split("_")) + "Env",
        "module": imported_as(path),
        "path": path,
    }
    texts = {path: f"{kind}.py.jinja", test_path: f"test_{kind}.py.jinja"}
    written: list[Path] = []
    try:
        for file, template in texts.items():
            with file.open("x", encoding="utf-8") as out:
                written.append(file)
                out.write(templates.get_template(template).render(words))
    except OSError as error:
        for file in written:
            file.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name another folder (--folder, --tests)"
        ) from None
    return path, test_path


def imported_as(path: Path) -> str:
    """The name under which a test imports a file: with the packages that it is in."""
    parts, folder = [path.stem], path.absolute().parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def main(argv: list[str] | None = None) -> None:
    """Do what was asked for."""
    arguments = parse_arguments(argv)
    folder = arguments.folder or (Path("environments") if Path("environments").is_dir() else Path())
    ours = Path("tests", "environments")
    tests = arguments.tests or (
        ours if arguments.folder is None and folder != Path() and ours.is_dir() else folder
    )
    try:
        path, test_path = new_environment(arguments.name, arguments.multi_turn, folder, tests)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(
        f"{path}\n{test_path}\n\nTry it:\n    python -m pytest {test_path}\n    python {path} --help\n"
    )
    page = "multi-turn" if arguments.multi_turn else "your-environment"
    print(f"How to see what a model makes of it, and to train one on it: docs/{page}.md")


if __name__ == "__main__":
    main()
