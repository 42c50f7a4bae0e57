"""Which sampler a server has on a machine with and without a CUDA compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_patching.compat.sampler import VARIABLE, sample_without_compiler


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A folder with a compiler, as /usr/local/cuda."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return tmp_path / "cuda"


def test_without_a_compiler_vllm_samples_itself(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    assert sample_without_compiler(environment, tmp_path / "cuda")
    assert environment[VARIABLE] == "0"


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_value_that_is_set_is_kept(value: str, tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), VARIABLE: value}
    assert not sample_without_compiler(environment, tmp_path / "cuda")
    assert environment[VARIABLE] == value


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME", "CUDA_PATH", "default"])
def test_with_a_compiler_vllm_chooses(where: str, cuda: Path, tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    if where != "default":
        environment[where] = str(cuda / "bin" if where == "PATH" else cuda)
    default = cuda if where == "default" else tmp_path / "nowhere"
    assert not sample_without_compiler(environment, default)
    assert VARIABLE not in environment


def test_a_folder_that_is_named_and_has_none_counts_as_none(cuda: Path, tmp_path: Path) -> None:
    """FlashInfer looks nowhere else then."""
    environment = {"PATH": str(cuda / "bin"), "CUDA_HOME": str(tmp_path)}
    assert sample_without_compiler(environment, cuda)
