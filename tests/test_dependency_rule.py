"""Allowed imports between packages.

Read from the syntax trees, followed through every module of the project, imports in functions too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import deque
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ("atroposlib", "environments", "example_trainer", "vllm_patching")
"""Content of a wheel."""
PACKAGES = (*PACKAGED, "scripts", "studies")
UNPACKAGED = ("scripts", "studies", "bench", "tests")
BELOW_TRAINER = ("launcher", "child_processes")


def rest_of(package: str, *without: str) -> tuple[str, ...]:
    """The modules and packages in a package, without some."""
    return tuple(
        f"{package}.{path.stem}"
        for path in sorted((ROOT / package).iterdir())
        if path.stem not in ("__init__", *without)
        and (path.suffix == ".py" or (path / "__init__.py").exists())
    )


REST_OF_TRAINER = rest_of("example_trainer", *BELOW_TRAINER)
"""The trainer without the launcher and the folder from which the launcher may import."""

NEVER = {
    "atroposlib": (
        "torch",
        "vllm",
        "example_trainer",
        "vllm_patching",
        "environments",
        *UNPACKAGED,
    ),
    "environments": ("torch", "vllm", "example_trainer", "vllm_patching", *UNPACKAGED),
    "vllm_patching": ("example_trainer", "atroposlib", "environments", *UNPACKAGED),
    "example_trainer": ("atroposlib.service", "atroposlib.cli", "environments", *UNPACKAGED),
    "example_trainer.launcher": ("torch", "vllm", *REST_OF_TRAINER, "vllm_patching"),
    "example_trainer.launcher.quickstart": (
        "torch",
        "vllm",
        *REST_OF_TRAINER,
        "vllm_patching",
        # These two need Python's own library alone, and so does the quick start's first process.
        *rest_of("atroposlib", "compat", "one_line_parser"),
    ),
}
"""Package -> what none of its modules may import, neither itself nor through another module of the
project."""

ROOMS = (
    "async_grpo",
    "simple_rl",
    "simple_defaults",
    "reference_worker",
    "grpo",
    "parameter_server",
    "training",
    "observe",
    "deterministic",
    "weight_bridge",
    "batch",
    "command_line",
    "config",
    "parallel",
    "batch_invariant_backward",
    "models",
    "algorithm",
    "vllm_client",
    "process",
    "api_keys",
    "out_of_memory",
    "prerequisites",
    "errors",
    "launcher",
    "child_processes",
)
"""The trainer's rooms, the uppermost first: doors open downwards only."""
SERVER_ROOMS = (
    "server",
    "batch_invariant",
    "worker",
    "engine_core",
    "transport",
    "compat",
    "protocol",
    "weights",
)
"""Packages that run inside vLLM, in the same way: `batch_invariant` has a worker of its own."""
SERVICE_ROOMS = (
    "app",
    "routes",
    "service",
    "metrics",
    "queue",
    "pending_groups",
    "run_state",
    "fleet",
    "scheduling",
    "group_reader",
    "schemas",
    "sqlite_store",
    "store",
    "records",
)
"""The rollout service's modules, the uppermost first: routes, then the service, the queue, request
schemas, the store."""
SDK_ROOMS = (
    "compat",
    "cli",
    "envs",
    "inference",
    "dashboard",
    "service",
    "service_client",
    "command_line",
    "web",
    "sandbox",
    "utils",
    "wire",
    "errors",
    "one_line_parser",
    "type_definitions",
)
"""Packages around it, in the same way. Nothing but the package itself imports `compat`."""
DETACHED = ("vllm_api_server",)
"""Entry points that need nothing of the trainer, and that nothing in it needs."""


def module_name(path: Path, root: Path) -> str:
    """`atroposlib/api/server.py` -> `atroposlib.api.server`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(path: Path, root: Path) -> set[str]:
    """Every name that the module imports, `from a import b` as both `a` and `a.b`."""
    name = module_name(path, root)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


@cache
def import_graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Module -> what it imports; the packages around each imported module count as imported, as
    Python does it.
    """
    graph = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            names = imported_by(path, root)
            around = {
                name.rsplit(".", depth)[0]
                for name in names
                for depth in range(1, name.count(".") + 1)
            }
            graph[module_name(path, root)] = names | around
    return graph


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(graph: dict[str, set[str]], package: str, forbidden: tuple[str, ...]) -> list[str]:
    """Chains of imports that lead from a module of the package to something forbidden, the shortest
    for each module.
    """
    chains = []
    for start in sorted(module for module in graph if within(module, package)):
        queue, seen = deque([(start,)]), {start}
        while queue:
            chain = queue.popleft()
            bad = sorted(
                name for name in graph[chain[-1]] if any(within(name, word) for word in forbidden)
            )
            if bad:
                chains.append(" -> ".join([*chain, bad[0]]))
                break
            for name in sorted(graph[chain[-1]] & graph.keys() - seen):
                seen.add(name)
                queue.append((*chain, name))
    return chains


def upward(
    graph: dict[str, set[str]], package: str, rooms: tuple[str, ...], detached: tuple[str, ...] = ()
) -> list[str]:
    """Imports within a package that go to a room further up, to a detached one, or that have no
    place in the order.
    """
    found = []
    for module, names in sorted(graph.items()):
        room = module.removeprefix(f"{package}.").partition(".")[0]
        if not within(module, package) or module == package:
            continue
        if room not in rooms + detached:
            found.append(f"{module} is in no room; give {room} a place")
            continue
        for name in sorted(names & graph.keys() - {package}):
            other = name.removeprefix(f"{package}.").partition(".")[0]
            if (
                within(name, package)
                and other != room
                and (room in detached or other not in rooms[rooms.index(room) :])
            ):
                found.append(f"{module} -> {name}")
    return found


@pytest.mark.parametrize("package", NEVER)
def test_packages_keep_to_their_room(package: str) -> None:
    graph = import_graph(ROOT, PACKAGES)
    assert any(within(module, package) for module in graph), f"no modules found in {package}"
    assert violations(graph, package, NEVER[package]) == []


@pytest.mark.parametrize(
    ("package", "rooms", "detached"),
    [
        ("example_trainer", ROOMS, DETACHED),
        ("vllm_patching", SERVER_ROOMS, ()),
        ("atroposlib.service", SERVICE_ROOMS, ()),
        ("atroposlib", SDK_ROOMS, ()),
    ],
)
def test_the_doors_of_a_package_open_downwards(
    package: str, rooms: tuple[str, ...], detached: tuple[str, ...]
) -> None:
    graph = import_graph(ROOT, (package.split(".")[0],))
    depth = package.count(".") + 1
    inside = [module.split(".") for module in graph if within(module, package)]
    assert {names[depth] for names in inside if len(names) > depth} == {*rooms, *detached}
    assert upward(graph, package, rooms, detached) == []


def test_what_runs_an_environment_is_behind_its_public_modules() -> None:
    graph = import_graph(ROOT, PACKAGES)
    private = "atroposlib.envs.runner"
    outside = {
        module: names
        for module, names in graph.items()
        if not within(module, "atroposlib.envs") and not within(module, "atroposlib.compat")
    }
    assert [
        module for module, names in outside.items() if any(within(name, private) for name in names)
    ] == []


def test_a_door_that_opens_upwards_is_found(tmp_path: Path) -> None:
    """The control, one file for each way to break the rule."""
    files = {
        "a/__init__.py": "",
        "a/entry.py": "from a import apart\nfrom a.up.m import f",
        "a/up/__init__.py": "",
        "a/up/m.py": "from a.up import n\nfrom a.low import g",
        "a/up/n.py": "def f():\n    from a.entry import main",
        "a/low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .up.m import h",
        "a/apart.py": "import a.low",
        "a/new.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert upward(import_graph(tmp_path, ("a",)), "a", ("entry", "up", "low"), ("apart",)) == [
        "a.apart -> a.low",
        "a.entry -> a.apart",
        "a.low -> a.up",
        "a.low -> a.up.m",
        "a.new is in no room; give new a place",
        "a.up.n -> a.entry",
    ]


def test_the_rule_covers_all_that_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in included} == set(PACKAGED) <= NEVER.keys()
    assert [package for package in PACKAGED if not set(UNPACKAGED) <= set(NEVER[package])] == []


def test_the_service_imports_none_of_the_heavy_packages() -> None:
    """The types of openai alone took 30 MiB of the service's 106."""
    heavy = ("openai", "aiohttp", "torch", "transformers", "datasets")
    names = "import sys, atroposlib.cli.run_api; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "atroposlib.service.service" in loaded
    assert [name for name in heavy if name in loaded] == []


def test_what_starts_processes_needs_the_standard_library_alone() -> None:
    """A guard is started with `python -I -S`, which has nothing else."""
    room = "example_trainer.child_processes"
    graph = {
        module: names
        for module, names in import_graph(ROOT, ("example_trainer",)).items()
        if within(module, room)
    }
    used = {
        name
        for names in graph.values()
        for name in names
        if name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert graph
    assert [
        name for name in sorted(used) if name != "example_trainer" and not within(name, room)
    ] == []


@pytest.mark.parametrize(
    ("files", "chain"),
    [
        ({"a/__init__.py": "", "a/m.py": "def f():\n    import torch.nn as nn"}, "a.m -> torch"),
        (
            {
                "a/__init__.py": "",
                "a/m.py": "from b import n",
                "b/__init__.py": "",
                "b/n.py": "from torch import nn",
            },
            "a.m -> b.n -> torch",
        ),
        (
            {
                "a/__init__.py": "",
                "a/m.py": "from b.sub import x",
                "b/__init__.py": "import torch",
                "b/sub.py": "",
            },
            "a.m -> b -> torch",
        ),
        (
            {"a/__init__.py": "", "a/m.py": "from . import n", "a/n.py": "import vllm.config"},
            "a.m -> a.n -> vllm",
        ),
        (
            {
                "a/__init__.py": "",
                "a/deep/__init__.py": "",
                "a/deep/m.py": "from ..n import f",
                "a/n.py": "import torch",
            },
            "a.deep.m -> a.n -> torch",
        ),
    ],
)
def test_the_rule_sees_every_way_round(tmp_path: Path, files: dict[str, str], chain: str) -> None:
    """The control: a tree that breaks the rule is caught, with the shortest way in."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = violations(import_graph(tmp_path, ("a", "b")), "a", ("torch", "vllm"))
    assert chain in found


def test_names_that_only_begin_alike_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "m.py").write_text("import torchvision\nimport vllm_patching\n")
    assert violations(import_graph(tmp_path, ("a",)), "a", ("torch", "vllm")) == []
