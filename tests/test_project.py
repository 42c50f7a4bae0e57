"""The project as a whole: promised log lines, reading size, plain English, commands of the README
that exist, no debris.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

from tests import language
from tests.conftest import WAITING
from tests.language import documents
from tests.pages import broken_links

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "atroposlib",
    "environments",
    "example_trainer",
    "vllm_patching",
    "scripts",
    "studies",
    "bench",
    "tests",
)

PROMISED_LINES = {
    "vllm_patching example_trainer/vllm_api_server.py": (
        "✓ Exported ",
        "✓ Shared memory setup complete!",
        "✓ Weight updater thread started (name: ",
        "WeightUpdater_TP",
        "Uvicorn running on http://",
    ),
    "example_trainer vllm_patching": (
        "✓ Gloo group created",
        "✓ NCCL group created",
        "✓ All ranks synchronized and ready",
        "Mapped ",
        " params from vLLM to trainer",
        "Step {step}/{steps}",
    ),
}
"""Folders and files -> text that people grep for, which must survive rewording."""


def sources(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return [name for name in listed.split("\0") if name]


@pytest.mark.parametrize(
    ("places", "text"),
    [(places, text) for places, texts in PROMISED_LINES.items() for text in texts],
)
def test_log_lines_that_people_grep_for_are_written_somewhere(places: str, text: str) -> None:
    assert any(
        text in path.read_text(encoding="utf-8")
        for place in places.split()
        for path in sources(place)
    )


MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 12
LONG_FUNCTIONS = {
    "atroposlib": 0,
    "example_trainer": 0,
    "vllm_patching": 0,
    "tests": 0,
}
COMPLEX_FUNCTIONS = {
    "atroposlib": 2,
    "example_trainer": 3,
    "vllm_patching": 2,
    "tests": 10,
}
"""Functions above a limit, per package. These counts may only fall."""


def long_functions(folder: str) -> list[str]:
    """Return the functions of a package that have more than MAX_FUNCTION_LINES lines."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno} lines"
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("folder", CODE)
def test_functions_are_short(folder: str) -> None:
    found = long_functions(folder)
    assert len(found) <= LONG_FUNCTIONS.get(folder, 0), "\n".join(found)


@pytest.mark.parametrize("folder", CODE)
def test_functions_are_simple(folder: str) -> None:
    """Cyclomatic complexity, as ruff counts it."""
    limit = f"lint.mccabe.max-complexity={MAX_COMPLEXITY}"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "C901",
        "--config",
        limit,
        "--output-format",
        "concise",
        folder,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = [line for line in done.stdout.splitlines() if "C901" in line]
    assert done.returncode == (1 if found else 0), done.stderr
    assert len(found) <= COMPLEX_FUNCTIONS.get(folder, 0), done.stdout


def test_no_folder_of_tests_hides_a_package() -> None:
    """tests/ comes first on sys.path: a regular package tests/atroposlib would be imported in place
    of atroposlib.
    """
    packages = [name for name in CODE if (ROOT / "tests" / name / "__init__.py").exists()]
    assert packages == []


def test_packages_of_the_project_are_all_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = {
        pattern.rstrip("*")
        for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {
        "scripts",
        "studies",
        "tests",
        "bench",
    }
    assert folders == included
    for (
        folder
    ) in folders:  # a folder with modules but without __init__.py would silently not be installed
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks an __init__.py"


def test_requirements_name_what_the_project_depends_on() -> None:
    """A requirements file installs everything that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *optional["gsm8k"],
        *optional["trainer"],
        *optional["ray"],
        *optional["dev"],
    ]
    names = {plain(re.split(r"[<>=\[ ;]", line)[0]) for line in asked}
    for file in ("requirements.txt", "requirements-cpu.txt", "requirements-gpu.txt"):
        listed = {
            plain(m)
            for m in re.findall(r"^([A-Za-z0-9_.-]+)", (ROOT / file).read_text(), re.MULTILINE)
        }
        assert names - listed - {"torch"} == set(), (
            f"missing in {file}"
        )  # PyTorch comes with vLLM, or is installed before


def test_no_property_has_a_time_limit() -> None:
    """An example that is slow for once, on a busy machine, must not fail a test."""
    assert settings.default is not None
    assert settings.default.deadline is None


def plain(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> list[str]:
    """One line for each package of a locked list, with its hashes."""
    lines = [
        line for line in (ROOT / file).read_text().replace("\\\n", " ").splitlines() if line.strip()
    ]
    return [line for line in lines if not line.lstrip().startswith("#")]


@pytest.mark.parametrize(
    "file", ["requirements-cpu.txt", "requirements-gpu.txt", "requirements-environments.txt"]
)
def test_every_locked_package_is_pinned_by_hash(file: str) -> None:
    assert len(locked(file)) > (5 if file == "requirements-environments.txt" else 100)
    assert [
        line[:60] for line in locked(file) if "==" not in line or "--hash=sha256:" not in line
    ] == []


def test_each_lock_holds_its_own_build_of_vllm() -> None:
    cuda = ("torchvision", "torchaudio", "torchcodec", "triton", "nvidia")
    assert not any(line.startswith(cuda) for line in locked("requirements-cpu.txt"))
    asked = re.search(r"^vllm==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert asked is not None
    assert any(line.startswith(f"{asked[0]} ") for line in locked("requirements-gpu.txt"))


def test_what_optional_environments_need_changes_nothing_that_is_locked() -> None:
    added = {line.partition("==")[0] for line in locked("requirements-environments.txt")}
    others = {line.partition("==")[0] for line in locked("requirements-cpu.txt")}
    assert not added & others
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = re.findall(
        r"^[a-z].*", (ROOT / "requirements-environments.in").read_text(), re.MULTILINE
    )
    assert asked == extras["reasoning-gym"]


@pytest.mark.parametrize("package", ["ray", "torchao"])
def test_every_list_names_one_release(package: str) -> None:
    """Nodes of a Ray cluster refuse each other if they have several; 8-bit moments are read by the
    release that wrote them.
    """
    files = [
        "pyproject.toml",
        "requirements.txt",
        "requirements-cpu.in",
        "requirements-cpu.txt",
        "requirements-gpu.txt",
    ]
    files += (
        ["example_trainer/requirements.txt", "example_trainer/training/quantised.py"]
        if package == "torchao"
        else []
    )
    found = {
        re.findall(rf"\b{package}(?:\[default\])?==([\w.]+)", (ROOT / file).read_text())[0]
        for file in files
    }
    assert len(found) == 1


def test_shell_scripts_parse_and_can_be_run() -> None:
    scripts = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 4
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=120)
        assert os.access(script, os.X_OK), f"{script} is not executable"


def test_continuous_integration_runs_the_test_command() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_no_debris_is_tracked() -> None:
    debris = re.compile(r"(^|/)(__pycache__|runs|wandb|\.venv)/|\.(log|pyc|orig|rej|swp)$|egg-info")
    assert [name for name in tracked() if debris.search(name)] == []


def test_nothing_points_outside_the_repository() -> None:
    """Absolute paths of one machine are useless on others."""
    # Put together here, so that this file itself holds none of them.
    wanted = re.compile(
        "|".join(
            re.escape("/" + word)
            for word in ("work" + "/main", "work" + "/shared", "home" + "/user", "opt" + "/wheels")
        )
    )
    found = []
    for name in tracked():
        path = ROOT / name
        if path.is_file() and path.suffix in {
            ".py",
            ".sh",
            ".md",
            ".toml",
            ".txt",
            ".yaml",
            ".yml",
            ".json",
            "",
        }:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {m.group()}" for m in wanted.finditer(text)]
    assert found == []


def commands(document: Path) -> list[str]:
    """Files and modules that the shell blocks of a document run."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```",
        document.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        found += re.findall(r"(?:^|[\s;&|])(\./[\w./-]+\.sh|scripts/[\w./-]+)", line)
        found += re.findall(r"python3?(?: -u)? ([\w./-]+\.py)\b", line)
        found += [f"-m {module}" for module in re.findall(r"python3? (?:-u )?-m ([\w.]+)", line)]
    return found


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_documents_exist(document: Path) -> None:
    missing = []
    for command in commands(document):
        if command.startswith("-m "):
            module = command[3:].replace(".", "/")
            ours = module.split("/")[0] in CODE
            if ours and not (
                (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists()
            ):
                missing.append(command)
        elif command not in WRITTEN_BY_THE_READER and not (ROOT / command).exists():
            missing.append(command)
    assert missing == []


OTHER_PROGRAMS_FLAGS = {
    "--logprobs-mode",
    "--help",
    "--tensor-parallel-size",
    "--dtype",
    "--gpu-memory-utilization",
    "--enable-lora",
    "--enforce-eager",
    "--disable-custom-all-reduce",
    "--compilation-config",
    "--nproc-per-node",
    "--all",
}
"""Flags in the READMEs that vLLM, torchrun and shell scripts define."""


def test_flags_in_the_readmes_exist() -> None:
    from atroposlib.cli.run_api import ApiOptions
    from example_trainer.config import TrainerConfig
    from example_trainer.launcher.options import SWITCHES, options_with_values
    from example_trainer.launcher.quickstart import options as quickstart

    stack = (*SWITCHES, *(name for name, *_ in options_with_values()))
    stack += tuple(quickstart.options_with_values())
    known = {
        "--" + name.replace("_", "-")
        for name in (*TrainerConfig.model_fields, *ApiOptions.model_fields, *stack)
    } | OTHER_PROGRAMS_FLAGS
    for path in (path for folder in CODE if folder != "tests" for path in sources(folder)):
        text = path.read_text(encoding="utf-8")
        known |= {
            "--" + name
            for name in re.findall(r"(?:add_argument|\boption)\(\s*\"(?:--)?([\w-]+)\"", text)
        }
    pages = (ROOT / name / "README.md" for name in (".", "example_trainer", "docs"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w.-])", text))
    assert len(named) > 30
    assert named - known == set()


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_the_documents_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


WRITTEN_BY_THE_READER = {
    "my_losses.py",
    "test_my_losses.py",
    "coins_server.py",
    "short_coins_server.py",
    *(
        f"{folder}{name}_server.py"
        for folder in ("environments/", "tests/environments/test_")
        for name in ("word_count", "find_coin")
    ),
}
"""Files whose writing a document explains."""


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    there = [f"/{name}" for name in tracked()]
    # A table that is made of a results file may name files of others.
    written = re.sub(r"<!--=.*?<!--/-->", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w/.*-])((?:[\w-]+/)*[\w-]+\.py)\b", written))
    named -= WRITTEN_BY_THE_READER
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set()


def test_no_hard_phrase_or_long_sentence_is_left_but_the_listed_ones() -> None:
    lines = language.complaints(language.all_hits(), language.LISTED)
    assert lines == [], "\n".join(lines)


def test_scripts_run_by_path_find_the_repository(tmp_path: Path) -> None:
    """The quick start is run by path from any folder; its --help needs no installation."""
    path = ROOT / "example_trainer" / "launcher" / "quickstart" / "__main__.py"
    done = subprocess.run(
        [sys.executable, "-S", path, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--bridge" in done.stdout


def test_the_files_that_wait_are_there() -> None:
    assert [file for file in sorted(WAITING) if not (ROOT / file).is_file()] == []
