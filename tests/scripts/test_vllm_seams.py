"""The comparison of two versions of vLLM, on small source trees."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts import vllm_seams
from scripts.vllm_seams import NoVllm, compare, main, open_source


def package(folder: Path, files: dict[str, str]) -> Path:
    """Write a package `vllm` with these files, and return the folder around it."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    seams = ("vllm.a:f", "vllm.a:g", "vllm.a:Base.run", "vllm.new:h|vllm.old:h", "vllm.a:lost")
    monkeypatch.setattr(vllm_seams, "SEAMS", seams)
    old = package(
        tmp_path / "old",
        {
            "a.py": "def f(): return 1\ndef g(x): pass\nlost = 1\nclass Base:\n  def run(self): pass\n",
            "old.py": "def h(): pass\n",
        },
    )
    new = package(
        tmp_path / "new",
        {
            "a.py": "# f\ndef f():\n    return 1\ndef g(x, y): pass\nclass Base:\n  def run(self): pass\n",
            "new.py": "def h(): pass\n",
        },
    )
    return old, new


def test_each_state_is_named(versions: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = (open_source(path, tmp_path) for path in versions)
    assert compare(old, new) == [
        ("same", "vllm.a:f"),
        ("changed", "vllm.a:g"),
        ("same", "vllm.a:Base.run"),
        ("moved", "vllm.new:h|vllm.old:h"),
        ("gone", "vllm.a:lost"),
    ]


def test_a_lost_name_gives_status_1(
    versions: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path) for path in versions]) == 1
    printed = capsys.readouterr().out
    assert "gone     vllm.a:lost\n" in printed
    assert "vllm.a:f" not in printed
    assert printed.endswith("2 same, 1 changed, 1 moved, 1 gone\n")


def test_a_wheel_reads_like_its_folder(versions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (versions[1] / "vllm").rglob("*.py"):
            archive.write(path, path.relative_to(versions[1]))
    unpacked = open_source(wheel, tmp_path / "scratch")
    assert {state for state, _ in compare(unpacked, open_source(versions[1], tmp_path))} == {
        "same",
        "gone",
    }


def test_a_folder_without_vllm_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoVllm, match="holds no vllm/__init__"):
        open_source(tmp_path, tmp_path)
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
