"""Which names a vLLM has, read from its source: nothing is imported, so one for another kind of
machine can be looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


class VllmSource:
    """A vLLM's package folder."""

    def __init__(self, package: Path) -> None:
        self._root = package.parent
        self._trees: dict[str, ast.Module | None] = {}

    def has(self, seam: str) -> bool:
        """Report if a name `module:attribute`, `module:Class.attribute` (inherited, or set on self,
        counts too), or a module `module:` exists.
        """
        module, _, attributes = seam.partition(":")
        tree = self._tree(module)
        if tree is None or not attributes:
            return tree is not None
        first, _, inside = attributes.partition(".")
        if inside:
            return inside in self._members(module, first)
        every = [
            self._absolute(module, node)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and _is_star(node)
        ]
        return first in _names(tree.body) or any(self.has(f"{other}:{first}") for other in every)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            place = self._root.joinpath(*module.split("."))
            paths = [
                path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()
            ]
            self._trees[module] = ast.parse(paths[0].read_text(encoding="utf-8")) if paths else None
        return self._trees[module]

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that is imported from, in full."""
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        parents = parts[: len(parts) - node.level + is_package]
        return ".".join([*parents, *filter(None, [node.module])])

    def _members(self, module: str, name: str) -> set[str]:
        """Names in a class and in those it inherits from, as far as vLLM's own go."""
        tree = self._tree(module)
        if tree is None:
            return set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(
                (alias.asname or alias.name) == name for alias in node.names
            ):
                return self._members(self._absolute(module, node), name)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found = _names(node.body) | set(_set_on_self(node))
                for base in node.bases:
                    found |= self._members(module, base.id) if isinstance(base, ast.Name) else set()
                return found
        return set()


def _names(body: Iterable[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for statement in body:
        for node in (
            [statement, *ast.walk(statement)]
            if isinstance(statement, (ast.If, ast.Try))
            else [statement]
        ):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def _is_star(node: ast.ImportFrom) -> bool:
    return any(alias.name == "*" for alias in node.names)


def _set_on_self(node: ast.AST) -> Iterable[str]:
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            yield inner.attr
