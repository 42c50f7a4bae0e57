"""List the names of the public SDK that its environments, and its tests of API and utilities,
import.

    python tests/atroposlib/compat/list_public_names.py CLONE    # writes public_names.json beside this file

CLONE is a checkout of https://github.com/NousResearch/atropos. Only files are read; nothing of it
is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PACKAGE = "atroposlib"
USERS = ("environments", f"{PACKAGE}/tests")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source_of(clone: Path, module: str) -> Path | None:
    """Return the file of a module of the clone; None if it has none."""
    path = clone.joinpath(*module.split("."))
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


def imported_names(clone: Path) -> set[tuple[str, str]]:
    """Return each (module, name) that a file of USERS imports from the package."""
    pairs = set()
    for file in sorted(file for folder in USERS for file in (clone / folder).rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] == PACKAGE
            ):
                pairs |= {(node.module, alias.name) for alias in node.names}
    return pairs


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    listed = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [parameter.arg for parameter in listed if parameter.arg not in ("self", "cls")]


def members(definition: ast.ClassDef) -> dict[str, list[str] | None]:
    """Return the public members of a class: parameters of methods, None for attributes."""
    found: dict[str, list[str] | None] = {}
    for node in definition.body:
        if isinstance(node, DEFINITIONS) and (
            not node.name.startswith("_") or node.name == "__init__"
        ):
            is_property = any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            found[node.name] = None if is_property else parameters(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
    return {
        name: facts
        for name, facts in found.items()
        if name == "__init__" or not name.startswith("_")
    }


def facts_of(clone: Path, module: str, name: str) -> tuple[bool, Any]:
    """Return whether the public package has a name, and its facts: members, parameters, or None for
    any other name.
    """
    file = source_of(clone, module)
    if file is None:
        return source_of(clone, f"{module}.{name}") is not None, None
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True, members(node)
        if isinstance(node, DEFINITIONS) and node.name == name:
            return True, parameters(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return True, None
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return True, None
    return source_of(clone, f"{module}.{name}") is not None, None


def public_names(clone: Path) -> dict[str, dict[str, Any]]:
    """Return module -> name -> facts for every imported name that the public package has."""
    listed: dict[str, dict[str, Any]] = defaultdict(dict)
    for module, name in sorted(imported_names(clone)):
        exists, facts = facts_of(clone, module, name)
        if exists and not module.startswith(f"{PACKAGE}.tests"):
            listed[module][name] = facts
    return dict(listed)


def main() -> None:
    names = public_names(Path(sys.argv[1]))
    target = Path(__file__).with_name("public_names.json")
    target.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{sum(map(len, names.values()))} names of {len(names)} modules: {target}")


if __name__ == "__main__":
    main()
