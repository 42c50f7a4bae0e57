"""Files that are written a tensor at a time equal the files that the format's library writes from
all tensors.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from example_trainer.models import safetensors_writer
from example_trainer.models.safetensors_writer import write_safetensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(1, 50))
def test_a_file_is_byte_for_byte_the_librarys(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtype: torch.dtype,
    named: bool,
    at_once: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    metadata = {"format": "pt"} if named else None
    moved = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(safetensors_writer, "_AT_ONCE", at_once)
        entries = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(
            folder / "ours", entries, tensors.items(), metadata, lambda: moved.append(1)
        )
    save_file(tensors, folder / "theirs", metadata=metadata)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert len(moved) == sum(-(-tensor.nbytes // at_once) for tensor in tensors.values())


def test_any_order_several_dtypes_and_views_are_read_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {"z": whole[:, 2:4], "a": whole[1:3].bfloat16(), "m": whole.t()}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "file", entries, tensors.items())
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensors",
    [
        [("b", torch.zeros(2))],
        [("a", torch.zeros(3))],
        [("a", torch.zeros(2).bfloat16())],
        [],
        [("a", torch.zeros(2))] * 2,
    ],
)
def test_anything_else_than_was_promised_is_an_error(
    tmp_path: Path, tensors: list[tuple[str, torch.Tensor]]
) -> None:
    with pytest.raises(ValueError, match=r"was to come|zip\(\)"):
        write_safetensors(tmp_path / "file", {"a": (torch.float32, (2,))}, tensors)
