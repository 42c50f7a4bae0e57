#!/usr/bin/env python3
"""Count the small faults in pure logic that the tests notice, in the default tier and in all tests.

    python bench/mutations.py                       # 60 mutants over ten modules
    python bench/mutations.py --mutants 10 --seed 3

A mutant is one module with one change: a comparison, a constant, a boolean operator, an arithmetic
operator, a return value or a removed statement. Each runs in a copy of the tracked files against
the test files that import the module or have its name. The files of the default tier come first,
then the nightly ones. The first failure kills the mutant, and pytest stops there. A run that
exceeds its time kills it too. The same seed gives the same mutants of the same code. The unchanged
modules must pass first. Prints a table and writes bench/results/mutations.json. Survivors are
listed with their change.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu.summary import table
from bench.measured import measured

MODULES: dict[str, tuple[str, ...]] = {
    "atroposlib/service/group_reader.py": (),
    "atroposlib/service/scheduling.py": (
        "tests/atroposlib/service/test_queue.py",
        "tests/atroposlib/service/test_stateful.py",
    ),
    "atroposlib/wire.py": (),
    "atroposlib/inference/responses.py": (),
    "environments/arithmetic_server.py": (),
    "example_trainer/algorithm/advantages.py": (),
    "example_trainer/batch/packing.py": (),
    "example_trainer/weight_bridge/stream.py": (),
    "vllm_patching/server/state.py": (),
    "vllm_patching/weights/sharding.py": (),
}
"""Pure logic of every package -> tests that reach it through another module."""
SLOW_FOLDERS = ("tests/e2e/", "tests/gpu/")
"""Tests of whole processes, which meet most modules but are not about one of them."""
TIERS = {"default": "not nightly", "nightly": "nightly"}
"""Name of a tier -> the markers that select it, in the order in which they run."""
NO_TESTS = 5
"""Exit status of pytest that selected no test."""
OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
"""Operator -> the operator in its place."""
SPOKEN = re.compile(r"(log|logger|logging|warnings)\.|print\(")
"""Statements that only write a line."""


@dataclass(frozen=True)
class Site:
    """A place in a module that a mutant changes."""

    line: int
    kind: str
    before: str
    after: str


class Mutator(ast.NodeTransformer):
    """Lists the sites of a module, and changes the one with the number `target`."""

    def __init__(self, target: int | None = None) -> None:
        self.target = target
        self.sites: list[Site] = []

    def _changed(self, node: ast.expr | ast.stmt, kind: str, other: ast.AST) -> Any:
        self.sites.append(Site(node.lineno, kind, ast.unparse(node), ast.unparse(other)))
        if len(self.sites) - 1 != self.target:
            return None
        return ast.fix_missing_locations(ast.copy_location(other, node))

    def visit_Compare(self, node: ast.Compare) -> Any:
        other = OTHER[type(node.ops[0])]()
        changed = ast.Compare(node.left, [other, *node.ops[1:]], node.comparators)
        return self._changed(node, "comparison", changed) or self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return self._changed(node, "constant", ast.Constant(not node.value)) or node
        if isinstance(node.value, int | float):
            return self._changed(node, "constant", ast.Constant(node.value + 1)) or node
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        changed = ast.BoolOp(OTHER[type(node.op)](), node.values)
        return self._changed(node, "boolean", changed) or self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if not isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        return self._changed(node, "boolean", node.operand) or self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in OTHER or isinstance(node.left, ast.Constant | ast.JoinedStr):
            return self.generic_visit(node)
        changed = ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        return self._changed(node, "arithmetic", changed) or self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None or ast.unparse(node.value) == "None":
            return node
        changed = ast.Return(ast.Constant(None))
        return self._changed(node, "return value", changed) or self.generic_visit(node)

    def _statement(self, node: ast.stmt) -> Any:
        return self._changed(node, "removed statement", ast.Pass()) or self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant) or SPOKEN.match(ast.unparse(node)):
            return node
        return self._statement(node)

    visit_Raise = visit_AugAssign = visit_Delete = _statement

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body = [self.visit(statement) for statement in node.body]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node


def sites_of(source: str) -> list[Site]:
    """List every place of a module that a mutant can change."""
    mutator = Mutator()
    mutator.visit(ast.parse(source))
    return mutator.sites


def mutant(source: str, number: int) -> str:
    """Return the module with a change at its site of this number."""
    return ast.unparse(Mutator(number).visit(ast.parse(source)))


def sample(module: str, source: str, count: int, seed: int) -> list[int]:
    """Draw the numbers of `count` sites; a smaller sample is the beginning of a larger one."""
    numbers = list(range(len(sites_of(source))))
    random.Random(f"{seed} {module}").shuffle(numbers)
    return numbers[:count]


def mirrored_tests(module: str, tree: Path = ROOT) -> list[str]:
    """List the test files that import a module, have its name, or are listed with it."""
    folder, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    imports = re.compile(
        rf"^(from {folder}\.{name} import|import {folder}\.{name}\b|from {folder} import .*\b{name}\b)",
        re.MULTILINE,
    )
    files = {
        str(path.relative_to(tree)): path for path in sorted((tree / "tests").rglob("test_*.py"))
    }
    return [
        file
        for file, path in files.items()
        if not file.startswith(SLOW_FOLDERS)
        and (
            file in MODULES.get(module, ())
            or path.stem == f"test_{name}"
            or imports.search(path.read_text(encoding="utf-8"))
        )
    ]


def copy_tree(target: Path) -> None:
    """Copy every tracked file into an empty folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def first_failure(tree: Path, tests: Sequence[str], markers: str, seconds: float) -> str | None:
    """Run tests in a copy of the tree; return what failed first, None if all passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, "-m", markers, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"not ended after {seconds:.0f} s"
    if ended.returncode in (0, NO_TESTS):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    last = [*ended.stdout.splitlines(), *ended.stderr.splitlines()][-1:]
    return failed[1] if failed else f"pytest (status {ended.returncode}: {''.join(last)})"


def try_module(
    tree: Path, module: str, numbers: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Run the tests of a module against its mutants; ends the program if they fail without one."""
    source = (tree / module).read_text(encoding="utf-8")
    sites, tests = sites_of(source), mirrored_tests(module, tree)
    for markers in TIERS.values():
        broken = first_failure(tree, tests, markers, seconds)
        if broken:
            sys.exit(f"mutations: {broken} fails with {module} unchanged: repair it first")
    rows = []
    for number in numbers:
        (tree / module).write_text(mutant(source, number), encoding="utf-8")
        begin = time.monotonic()
        row: dict[str, Any] = {"module": module, **asdict(sites[number]), "killed_by": None}
        for tier, markers in TIERS.items():
            row["failed"] = first_failure(tree, tests, markers, seconds)
            if row["failed"]:
                row["killed_by"] = tier
                break
        row["seconds"] = round(time.monotonic() - begin, 1)
        rows.append(row)
        print(f"{module}:{row['line']} {row['kind']}: {row['killed_by'] or 'SURVIVED'}", flush=True)
    (tree / module).write_text(source, encoding="utf-8")
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the numbers of mutants and of killed ones for each module and in all, and the
    survivors.
    """
    parts = {module: [row for row in rows if row["module"] == module] for module in MODULES}
    counts = [
        [
            name,
            len(part),
            sum(row["killed_by"] == "default" for row in part),
            sum(row["killed_by"] is not None for row in part),
        ]
        for name, part in (parts | {"in all": rows}).items()
    ]
    survivors = [
        f"survived: {row['module']}:{row['line']} {row['kind']}: {row['before']} -> {row['after']}"
        for row in rows
        if row["killed_by"] is None
    ]
    return "\n".join([table(["module", "mutants", "default", "--all"], counts), *survivors])


def main() -> None:
    """Draw the mutants, run their tests, print the table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=60, help="number of mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--seconds", type=float, default=600, help="limit of one pytest run")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/mutations.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for place, module in enumerate(MODULES):
            share = len(range(place, options.mutants, len(MODULES)))
            source = (Path(folder) / module).read_text(encoding="utf-8")
            numbers = sample(module, source, share, options.seed)
            if numbers:
                rows += try_module(Path(folder), module, numbers, options.seconds)
    print(report(rows))
    result = {"measured": measured(), "seed": options.seed, "mutants": rows}
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
