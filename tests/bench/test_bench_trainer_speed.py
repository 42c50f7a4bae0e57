"""Trainer speed, a whole run, optimizer choices and the ceiling, measured on the CPU: mechanics, and
plain PyTorch against the trainer.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import optimizer_choices, trainer_speed, whole_run
from bench.gpu import ceiling, processes, random_checkpoint
from bench.gpu.plain_decoder import PlainDecoder
from bench.gpu.processes import BenchError
from bench.gpu.shapes import PEAK_FLOPS, SHAPES, shard_shapes
from bench.gpu.synthetic import Work, geometry_of, random_bin, random_weights
from bench.gpu.training_stack import RowsAsTheyCome
from bench.measured import COMMIT_VARIABLE
from bench.whole_run import longest_gap, summarise
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
        ours(packed.tokens, packed.packing)[packed.sources],
        packed.targets,
        packed.sequences,
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
    assert packed.packing.longest == 100
    assert packed.positions.tolist() == list(range(60, 100)) * 8


def test_a_bin_without_room_for_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="4 sequences of 100 tokens do not fit a bin of 399"):
        random_bin(Work(length=100, tokens=399, group=4), 1024, CPU)


@pytest.mark.usefixtures("forked_children")
def test_a_tiny_choice_is_planned_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    status = optimizer_choices.main(
        ["--output", str(tmp_path), "--device", "cpu", "--only", "1.7B, adamw-8bit, offloaded"]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    (row,) = json.loads((tmp_path / "optimizer_choices.json").read_text())["results"]
    assert row["measured"]["commit"] == "abc"
    assert row["choice"]["optimizer"] == "adamw-8bit"
    assert row["bytes"]["planned"] > row["host_bytes"]["planned"] > 6 * row["trained_parameters"]
    assert row["bytes"]["measured"] > row["host_bytes"]["planned"]
    assert min(row["seconds"][part]["min"] for part in ("gradient", "update", "write_weights")) > 0
    assert "1.7B, adamw-8bit, offloaded" in printed


def test_a_choice_that_does_not_fit_is_skipped_with_its_reason() -> None:
    large = replace(optimizer_choices.CHOICES[-2], shape="qwen2.5-72b", device="cpu")
    assert "of host memory; " in str(optimizer_choices.refusal(large))


def row(tokens: int, wait: float, train: float) -> dict[str, float | int]:
    return {
        "tokens": tokens,
        "sequences": 2,
        "seconds_wait": wait,
        "seconds_train": train,
        "forwarded_tokens": 3 * tokens,
    }


def test_the_first_steps_are_left_out_and_the_rest_is_over_the_wall_clock() -> None:
    rows = [(100.0, row(999, 50.0, 9.0)), (110.0, row(400, 2.0, 6.0)), (120.0, row(600, 3.0, 4.0))]
    found = summarise(rows, 1)
    assert found["steps"] == 2
    assert found["seconds"] == 20.0
    assert found["trained_tokens_per_second"] == 50.0
    assert found["waiting_share"] == 0.25
    assert found["seconds_by_phase"] == {"wait": 5.0, "train": 10.0}
    assert found["forwarded_tokens_per_second_of_training"] == 300.0
    assert found["mean_length"] == 250.0
    rows[1][1]["forwarded_targets"] = 100
    assert summarise(rows, 1) == found | {
        "trained_tokens": 700,
        "trained_tokens_per_second": 35.0,
    }, "only what is computed"
    with pytest.raises(BenchError, match="3 steps are too few, with 3 left out"):
        summarise(rows, 3)


def test_figures_of_several_gpus_are_divided_by_their_number() -> None:
    figures = {
        "steps": 4, "trained_tokens_per_second": 900.0, "seconds_by_phase": {"sync": 2.0},
        "flops_per_second_of_training": 0.5 * 3 * PEAK_FLOPS,
    }  # fmt: skip
    assert whole_run.per_gpu(figures, 3) == {
        "trainer_gpus": 3,
        "trained_tokens_per_second_and_gpu": 300.0,
        "update_seconds": 0.5,
        "mfu": 0.5,
    }
    del figures["flops_per_second_of_training"]
    assert "mfu" not in whole_run.per_gpu(figures, 3)
    assert [whole_run.percent(share) for share in (0.123, None)] == ["12.3 %", "-"]


def test_the_longest_gap_is_that_of_a_stream_and_not_between_streams() -> None:
    streams = [[0.0, 5.0, 5.1], [9.0, 9.3], [20.0]]
    assert longest_gap(streams, 1.0) == 0.3
    assert longest_gap(streams, 0.0) == 5.0
    assert longest_gap(streams, 10.0) is None


def test_rows_are_taken_when_their_line_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = RowsAsTheyCome(file)
    rows.look()
    file.write_text('{"step": 1}\n{"st')
    rows.look()
    assert list(rows) == [{"step": 1}]
    with file.open("a") as more:
        more.write('ep": 2}\n')
    rows.look()
    assert [one["step"] for one in rows] == [1, 2]
    assert rows.rows[0][0] <= rows.rows[1][0]


@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture"])
def test_a_random_checkpoint_ends_answers_by_chance_and_names_every_token(
    tmp_path: Path, shape: str
) -> None:
    vocab = SHAPES[shape]["vocab_size"]
    answer = random_checkpoint.write({"shape": shape, "folder": str(tmp_path), "cap": 64})
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert answer["end_tokens"] == len(ends) == len(set(ends)) == 2 * vocab // 64
    assert max(ends) < vocab
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == ends
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert model.num_parameters() == answer["parameters"]
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == vocab
    assert all(tokenizer.convert_ids_to_tokens(number) for number in range(vocab))


def test_what_cannot_run_here_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert (
        whole_run.main(["--output", str(tmp_path), "--questions", "nowhere.jsonl", "--dry-run"])
        == 0
    )
    parts = json.loads((tmp_path / "whole_run.json").read_text())["parts"]
    assert parts == {
        part: {"skipped": "there is no nowhere.jsonl; give GSM8K's train.jsonl with --questions"}
        for part in parts
    }
    assert list(parts) == ["ours", "trl"]


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_children")
def test_our_part_runs_with_real_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    arguments = [
        "--output",
        str(tmp_path / "out"),
        "--questions",
        str(questions),
        "--dry-run",
        "--parts",
        "ours",
    ]
    status = whole_run.main(arguments)
    assert status == 0, capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "whole_run.json").read_text())
    found = data["parts"]["ours"]
    assert found["steps"] == data["settings"]["steps"] - data["settings"]["leave_out"] == 2
    assert found["sequences"] == 2 * data["settings"]["sequences"]
    assert found["trained_tokens"] > 0
    assert found["longest_gap_seconds"] > 0
    assert found["client_failures"] == []
    assert {"wait", "train", "sync"} <= found["seconds_by_phase"].keys()


def test_pairs_send_each_receiver_its_shards(tmp_path: Path) -> None:
    found = ceiling.measure(
        "tiny", ["cpu"] * 4, tmp_path, repeats=2, seconds=240, gibibyte=1 << 16, pairs=True
    )
    assert "not_measured" not in found
    patterns = found["patterns"]
    assert patterns["broadcast_1gib"]["bytes"] == 2 << 16
    elements = sum(math.prod(shape) for rank in range(2) for shape in shard_shapes("tiny", rank, 2))
    assert patterns["shards_sent_coalesced"]["bytes"] == 4 * elements  # float32 on a CPU
    assert found["model_gb_per_s"] == patterns["shards_sent_coalesced"]["gb_per_s"] > 0
