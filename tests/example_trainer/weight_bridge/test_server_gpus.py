"""Servers of the trainer's own: their GPUs, and the records of started ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.child_processes.vllm_flags import Degrees
from example_trainer.errors import ConfigError
from example_trainer.weight_bridge.server_gpus import (
    GpuMemory,
    ServerFlags,
    choose_server_gpus,
    read_memory,
    seen_gpus,
    usable_degrees,
)
from example_trainer.weight_bridge.server_record import read_record, record_file, write_record
from vllm_patching.weights.families import Geometry


def geometry(heads: int = 16, key_heads: int = 2, intermediate: int = 11008) -> Geometry:
    return Geometry(
        "Qwen2ForCausalLM", 151936, 2048, intermediate, 36, heads, key_heads, 128, 32768, 1e-6, 1e6
    )


@pytest.mark.parametrize(
    ("asked", "seen", "trainer", "vllm_args", "gpus", "degree", "beside"),
    [
        (None, ["0"], 0, "", ("0",), 1, True),
        (None, ["0", "1"], 0, "", ("1",), 1, False),
        (None, ["4", "5", "6"], 0, "", ("5", "6"), 2, False),
        (None, ["0", "1", "2", "3"], 0, "", ("1", "2"), 2, False),
        (None, ["0", "1", "2", "3", "4"], 2, "", ("0", "1", "3", "4"), 4, False),
        (None, ["0", "1", "2", "3"], 0, "-tp 1", ("1",), 1, False),
        (None, ["0", "1"], 0, "--tensor_parallel_size=2", ("1", "0"), 2, True),
        (None, ["0", "1", "2", "3", "4"], 0, "-dp 2", ("1", "2", "3", "4"), 2, False),
        ("1", ["0"], 0, "", ("1",), 1, False),
        ("0", ["0"], 0, "", ("0",), 1, True),
        ("2,3", ["0", "1"], 0, "", ("2", "3"), 2, False),
        ("2,3", ["0", "1"], 0, "-dp 2", ("2", "3"), 1, False),
        (None, ["GPU-a", "GPU-b"], 1, "", ("GPU-a",), 1, False),
    ],
)
def test_the_server_gets_what_the_trainer_does_not_use(
    asked: str | None,
    seen: list[str],
    trainer: int,
    vllm_args: str,
    gpus: tuple[str, ...],
    degree: int,
    beside: bool,
) -> None:
    place = choose_server_gpus(asked, seen, trainer, geometry(), ServerFlags.of(vllm_args).size)
    assert (place.gpus, place.tensor_parallel, place.beside_trainer) == (gpus, degree, beside)


@pytest.mark.parametrize(
    ("asked", "seen", "vllm_args", "message"),
    [
        ("1,1", ["0"], "", "--vllm-gpus 1,1 names a GPU twice"),
        (
            "1,2,3",
            ["0"],
            "",
            r"--vllm-gpus 1,2,3: 3 GPUs, and a server of this model \(16 heads, 2 key heads\) can have 1, 2, 4,",
        ),
        ("1", ["0"], "-tp 2", "--vllm-gpus 1: 1 GPUs, and the degrees in --vllm-args need 2"),
        (None, ["0"], "-tp 2", r"a vLLM server of 2 GPUs, and this trainer sees 1 \(0\)"),
        (None, ["0"], "-tp two", "--tensor-parallel-size or -tp is 'two': give the number of GPUs"),
        (
            None,
            ["0"],
            "--gpu-memory-utilization much",
            "--vllm-args .* cannot be used: could not convert",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    asked: str | None, seen: list[str], vllm_args: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_server_gpus(asked, seen, 0, geometry(), ServerFlags.of(vllm_args).size)


@given(
    st.integers(1, 9),
    st.data(),
    st.sampled_from([1, 2, 7, 12, 14, 16, 40]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_every_choice_divides_the_model_and_leaves_the_trainer_its_gpu(
    count: int, data: st.DataObject, heads: int, key_heads: int
) -> None:
    model = geometry(heads * key_heads, key_heads)
    trainer, size = (
        data.draw(st.integers(0, count - 1)),
        Degrees(None, data.draw(st.sampled_from([1, 2]))),
    )
    seen = [str(number) for number in range(10, 10 + count)]
    if size.data > max(1, count - 1) and size.data > count:
        with pytest.raises(ConfigError):
            choose_server_gpus(None, seen, trainer, model, size)
        return
    place = choose_server_gpus(None, seen, trainer, model, size)
    degree = place.tensor_parallel
    assert len(place.gpus) == degree * size.data == len(set(place.gpus))
    assert set(place.gpus) <= set(seen)
    assert degree & (degree - 1) == 0
    assert model.num_heads % degree == 0
    assert model.num_kv_heads % degree == 0 or degree % model.num_kv_heads == 0
    assert place.beside_trainer == (count - 1 < size.data)
    larger = [
        one for one in usable_degrees(model, 16) if one > degree and one * size.data <= count - 1
    ]
    assert not larger, "no GPU that could serve is left idle"


def test_the_gpus_that_a_process_sees() -> None:
    assert seen_gpus(2, {}) == ["0", "1"]
    assert seen_gpus(2, {"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
    assert seen_gpus(1, {"CUDA_VISIBLE_DEVICES": "GPU-1234"}) == ["GPU-1234"]
    assert seen_gpus(1, {"CUDA_VISIBLE_DEVICES": "4,-1,5"}) == ["4"], (
        "CUDA reads up to what is not there"
    )


def test_the_flags_that_memory_is_planned_by() -> None:
    flags = ServerFlags.of(
        "--max_model_len=512 --gpu-memory-utilization 0.3 --max-model-len 1024 -tp 2 --seed 1"
    )
    assert (flags.max_model_len, flags.utilization, flags.size) == (1024, 0.3, Degrees(2, 1))
    assert ServerFlags.of("--max-model-len auto") == ServerFlags(Degrees(), None, None)


def test_what_nvidia_smi_lists() -> None:
    found = read_memory("0, GPU-a, 81559, 1559\n1, GPU-b, [N/A], [N/A]\n")
    assert found == {
        "0": GpuMemory(80000 << 20, 81559 << 20),
        "GPU-a": GpuMemory(80000 << 20, 81559 << 20),
    }


def test_a_record_follows_no_link_and_is_private(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep this")
    folder = tmp_path / "servers"
    folder.mkdir()
    record_file(9001, folder).symlink_to(precious)
    (folder / f"9001.{os.getpid()}").symlink_to(precious)
    write_record(9001, os.getpid(), tmp_path / "log", folder)
    assert precious.read_text() == "keep this"
    written = record_file(9001, folder)
    assert not written.is_symlink()
    assert written.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert read_record(9001, folder) is not None
    assert [path.name for path in folder.iterdir()] == ["9001.json"]


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "servers"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link; remove it, or set TMPDIR"):
        write_record(9001, os.getpid(), tmp_path / "log", link)
    assert list((tmp_path / "elsewhere").iterdir()) == []
