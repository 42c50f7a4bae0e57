"""The measurement of the trainer's speed, on the CPU: mechanics, and that plain PyTorch computes
what the trainer does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import trainer_speed
from bench.gpu import processes
from bench.gpu.plain_decoder import PlainDecoder
from bench.gpu.synthetic import Work, geometry_of, random_bin, random_weights
from example_trainer.models.decoder import Decoder
from example_trainer.models.ops import reference
from tests.forked_ranks import RANKS

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")


@pytest.mark.usefixtures("forked_children")
def test_cases_are_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are forked; test_bench_processes.py shows that torchrun starts them."""

    def command(module: str, ranks: int = 1) -> list[str]:
        script = str(processes.ROOT / f"{module.replace('.', '/')}.py")
        return [
            sys.executable,
            "-u",
            "-m",
            *(["tests.forked_ranks", script] if ranks == RANKS else [module]),
        ]

    monkeypatch.setattr(processes, "module_command", command)
    names = ["1.7B, 512", "1.7B, 512, plain PyTorch", "14B, 4k, FSDP2 over two GPUs"]
    status = trainer_speed.main(
        ["--output", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--only", *names]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    written = json.loads((tmp_path / "trainer_speed.json").read_text())
    assert list(written["cases"]) == [names[2], *names[:2]]  # what needs several GPUs comes first
    for name, found in written["cases"].items():
        assert found["measured"]["date"]
        assert found["case"]["shape"] == "tiny"
        one = found["pass"]
        ranks = found["case"]["ranks"]
        assert one["forwarded_tokens_per_second"] == pytest.approx(
            ranks * found["sequences"] * found["case"]["length"] / one["seconds"], rel=1e-2
        )
        assert one["peak_bytes"] > 4 * found["parameters"] / ranks, name
        assert ("step" in found) == ("plain" not in name)
    assert "plain PyTorch" in printed


@pytest.mark.usefixtures("forked_children")
def test_what_saving_costs_the_steps_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["8B, one GPU, offloaded", "1.7B, 512, with a checkpoint"]
    assert (
        trainer_speed.main(
            ["--output", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--only", *names]
        )
        == 0
    )
    written = json.loads((tmp_path / "trainer_speed.json").read_text())["cases"]
    assert written[names[0]]["case"]["offload"]
    assert written[names[0]]["step"]["bins"] == 2
    found = written[names[1]]
    saved = found["checkpoint"]
    assert saved["bytes"] > 16 * found["parameters"]  # weights, masters and two moments, in float32
    assert 0 < saved["begin_seconds"] <= saved["complete_seconds"]
    assert len(saved["step_seconds_before"]) == 5 <= len(saved["step_seconds_after"])
    assert all(
        seconds > 0 for when in ("before", "after") for seconds in saved[f"step_seconds_{when}"]
    )
    assert f"{names[1]}: {saved['bytes'] / 1e9:.2f} GB, complete after" in capsys.readouterr().out


def test_a_case_that_needs_more_gpus_or_more_time_is_left_out_with_the_reason(
    tmp_path: Path,
) -> None:
    arguments = [
        "--output",
        str(tmp_path),
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--only",
        "1.7B, 512",
        "--seconds",
        "1",
    ]
    assert trainer_speed.main(arguments) == 0
    written = json.loads((tmp_path / "trainer_speed.json").read_text())
    assert written["cases"] == {"1.7B, 512": {"skipped": "--seconds 1 leave no time for it"}}


def test_what_one_gpu_is_measured_for_has_plain_pytorch_beside_it() -> None:
    names = [name for name, case in trainer_speed.CASES.items() if case.ranks == 1]
    for length in ("512", "4k", "32k"):
        ways = ["", ", plain PyTorch, layers compiled", ", plain PyTorch", ", deterministic"]
        block = [f"1.7B, {length}{way}" for way in ways]
        at = names.index(block[0])
        assert names[at : at + 4] == block
        cases = [trainer_speed.CASES[name] for name in block]
        assert len({(case.work, case.checkpointing, case.repeats) for case in cases}) == 1


class TestLonger:
    """Longer and longer sequences, by a stand-in for the process that tries one."""

    @pytest.fixture
    def written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        stand_in = tmp_path / "stand_in_for_speed.py"
        answer = "{'case': asked, 'out_of_memory': 'full'} if asked['length'] > 256 else {'case': asked, 'pass': PASS}"
        keys = (
            "forwarded_tokens_per_second",
            "sequence_tokens_per_second",
            "mfu",
            "mfu_counted",
            "peak_bytes",
        )
        stand_in.write_text(
            "from bench.gpu.processes import answer_once\n"
            f"PASS = dict.fromkeys({keys}, 1.0)\nanswer_once(lambda asked: {answer})\n",
            encoding="utf-8",
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(trainer_speed.ROOT)]))
        start = trainer_speed.Task

        def changed(name: str, module: str, *rest: Any, **more: Any) -> Any:
            return start(name, "stand_in_for_speed", *rest, **more)

        monkeypatch.setattr(trainer_speed, "Task", changed)
        monkeypatch.setattr(trainer_speed, "LONGEST", [1 << 14, 1 << 15, 1 << 16, 1 << 17])
        arguments = [
            "--output",
            str(tmp_path),
            "--device",
            "cpu",
            "--shape",
            "tiny",
            "--only",
            "longest",
        ]
        assert trainer_speed.main(arguments) == 0
        found: dict[str, Any] = json.loads((tmp_path / "trainer_speed.json").read_text())
        return found

    def test_each_has_a_row_and_those_after_one_that_failed_say_so(
        self, written: dict[str, Any]
    ) -> None:
        assert written["longest_sequence"] == 256
        rows = [f"1.7B, one sequence of {length}k" for length in (16, 32, 64, 128)]
        assert list(written["longest"]) == rows
        assert written["longest"][rows[2]]["out_of_memory"] == "full"
        assert written["longest"][rows[3]] == {"skipped": f"{rows[2]} did not train"}


def test_plain_pytorch_computes_what_the_trainer_computes() -> None:
    geometry = geometry_of("tiny")
    packed = random_bin(Work(length=24, tokens=128, prompt=9, group=2), geometry.vocab_size, CPU)
    ours, plain = (
        Decoder(geometry, torch.float32, CPU, ops=reference),
        PlainDecoder(geometry, torch.float32, CPU),
    )
    random_weights(ours)
    named = dict(ours.named_parameters())
    with torch.no_grad():
        plain.embedding.copy_(named["model.embed_tokens.weight"])
        plain.norm_last.copy_(named["model.norm.weight"])
        for theirs, mine in zip(plain.layers, ours.model.layers, strict=True):
            for name, source in {
                "qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj",
                "norm_in": "input_layernorm", "norm_post": "post_attention_layernorm", "norm_q": "self_attn.q_norm",
                "norm_k": "self_attn.k_norm",
            }.items():  # fmt: skip
                getattr(theirs, name).copy_(mine.get_submodule(source).weight)
    lengths = packed.lengths.tolist()
    expected, _ = ours.chosen_logprobs(
        ours(packed.tokens, packed.packing())[packed.sources],
        packed.targets,
        packed.sequences(),
        64,
        1.0,
    )
    found = plain(packed.tokens, lengths, packed.sources, packed.targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.parametrize("share", [False, True])
def test_a_bin_holds_the_sequences_that_were_asked_for(share: bool) -> None:
    work = Work(length=100, tokens=1000, prompt=60, group=4, share=share)
    packed = random_bin(work, 1024, CPU, seed=3)
    assert packed.counts.tolist() == [40] * work.sequences == [40] * 8
    assert len(packed.tokens) == (2 * (60 + 4 * 40) if share else 8 * 100)
    assert packed.packing().longest == 100
    assert packed.positions.tolist() == list(range(60, 100)) * 8


def test_a_bin_without_room_for_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="4 sequences of 100 tokens do not fit a bin of 399"):
        random_bin(Work(length=100, tokens=399, group=4), 1024, CPU)
