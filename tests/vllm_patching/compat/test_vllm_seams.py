"""Every name of vLLM's that the project hangs on exists in the vLLM that is installed here."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from scripts.vllm_seams import CORE, SEAMS, VllmSource

ROOT = Path(__file__).resolve().parents[3]


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
