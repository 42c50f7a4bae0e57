"""Metrics as they grow, the lines and tables a person sees, and what is written at the end."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.quickstart.display import (
    MetricsFile,
    TrainingDisplay,
    plain_line,
    sampled,
)
from example_trainer.launcher.quickstart.options import LEVELS, Options
from example_trainer.launcher.quickstart.plan import Plan, Ports
from example_trainer.launcher.quickstart.plot import draw, smooth
from example_trainer.launcher.quickstart.report import (
    Evaluation,
    Phases,
    print_closing_table,
    said,
    span,
    subtitle,
    summarise,
    weight_updates,
    write_summary,
)
from example_trainer.launcher.quickstart.run import LOCK, fingerprint, open_output, read_evaluation
from example_trainer.launcher.roles import Command, cores
from example_trainer.launcher.starter_models import BATCHES

OPTIONS = Options(
    bridge="broadcast",
    steps=3,
    model="owner/name",
    gpus=(),
    lr=1e-3,
    seed=0,
    difficulty=(),
    eval_size=256,
    output=Path("out"),
    keep_running=False,
    seconds_setup=1.25,
    environment="arithmetic",
)


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number, "reward_mean": 0.1 * number, "loss": -0.01, "kl": 2e-4, "entropy": 0.5, "tokens": 1000,
        "tokens_per_second": 1234.5, "response_length_mean": 12.25, "queue_size": 3, "age_mean": 0.5, "age_max": 1,
        "weight_version": number, "params_mapped": 26, "params_total": 26, "bytes_moved": 50, "checksum": "ab",
        "seconds_wait": 1.0, "seconds_train": 2.0, "seconds_sync": 0.5,
    } | changes  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_file_read_while_it_is_written_gives_every_line_once(cuts: list[int]) -> None:
    import tempfile

    lines = [step(n) for n in range(1, 4)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        metrics = MetricsFile(Path(folder) / "metrics.jsonl")
        assert metrics.read_new() == []
        got, position = [], 0
        for cut in [*(20 * cut for cut in cuts), len(data)]:
            with metrics.path.open("ab") as file:
                file.write(data[position : position + cut])
            position += cut
            got += metrics.read_new()
        assert got == metrics.steps == lines
        assert metrics.total("tokens") == 3000


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text('{"step": 1}\n[1]\n')
    with pytest.raises(LauncherError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        metrics.read_new()


LAST_LINES = [(49, 0.75), (50, 0.875), (50, 0.0)]
"""Step and share of right answers of an environment's last lines."""


def test_every_sampled_answer_counts_in_the_plot() -> None:
    lines = [{"step": 1, "train/percent_correct": 0.25, "train/response_length": 9.5}, {"step": 2}]
    assert sampled(lines) == [{"step": 1, "reward_mean": -0.5, "response_length_mean": 9.5}]
    with_tools = [line | {"train/tool_use": 0.125} for line in lines]
    assert sampled(with_tools)[0]["tool_use"] == 0.125


def test_answers_after_the_last_batch_are_no_second_point_in_the_plot() -> None:
    lines = [
        {"step": step, "train/percent_correct": share, "train/response_length": 20.0}
        for step, share in LAST_LINES
    ]
    assert [(step["step"], step["reward_mean"]) for step in sampled(lines)] == [
        (49, 0.5),
        (50, 0.75),
    ]


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=200), 3, seconds_between_lines=3600) as display:
        for number in (1, 2, 3):
            display.add([step(number, solved=0.5)])
    first, last = out.getvalue().splitlines()  # the second came too soon after the first
    assert first.startswith("step 1/3 ")
    assert last.startswith("step 3/3 ")
    assert "\x1b" not in out.getvalue()
    for part in (
        "reward +0.300",
        "loss -0.0100",
        "KL 2.0e-04",
        "entropy 0.500",
        "tokens/s 1,23",
        "solved 50%",
        "queue 3",
        "age 0.5/1",
        "version 3",
    ):
        assert part in last


def test_missing_values_are_dashes_not_errors() -> None:
    assert plain_line({"step": 1, "kl": None}, 5).startswith(
        "step 1/5  solved -  reward -  loss -  KL -"
    )


def test_a_terminal_gets_one_table() -> None:
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=120, force_terminal=True), 3) as display:
        display.add([step(1), step(2)])
    assert "reward" in out.getvalue()
    assert "2/3" in out.getvalue()


def test_summary_has_the_promised_keys_and_the_closing_table_the_figures(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m", steps=[step(n) for n in (1, 2, 3)])
    phases = Phases({"start": 20.0, "evaluate before": 5.0, "train": 61.0, "evaluate after": 5.0})
    before, after = Evaluation(0.5, 256, 10.0, 0), Evaluation(0.9375, 256, 18.0, 3)
    summary = summarise(OPTIONS, metrics, before, after, phases)
    promised = {
        "eval_before": 0.5, "eval_after": 0.9375, "steps": 3, "weight_updates": 3, "params_mapped": 26, "params_total": 26,
        "bridge": "broadcast", "seconds_setup": 1.2, "seconds_train": 61.0,
    }  # fmt: skip
    assert {key: summary[key] for key in promised} == promised
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary

    out = io.StringIO()
    print_closing_table(
        Console(file=out, width=100), summary, {"reward plot": tmp_path / "reward.png"}
    )
    for part in (
        "50.0%",
        "93.8%",
        "10.0",
        "18.0",
        "26/26",
        "1 min 01 s",
        "of it sync",
        str(tmp_path / "reward.png"),
    ):
        assert part in out.getvalue(), part

    draw(tmp_path / "reward.png", metrics.steps, 0.5, 0.9375, 256, subtitle(summary))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_use_of_a_tool_has_a_column_a_row_and_a_curve(tmp_path: Path) -> None:
    assert "solved 25%  used tool 12%  reward" in plain_line(
        step(1, solved=0.25, used=0.12), 5, tools=True
    )
    phases = Phases({"train": 61.0})
    metrics = MetricsFile(tmp_path / "m", steps=[step(n, tool_use=n / 4) for n in (1, 2, 3)])
    before, after = Evaluation(0.03, 256, 9.0, 0, 0.011), Evaluation(0.99, 256, 30.0, 3, 1.0)
    summary = summarise(replace(OPTIONS, environment="calculator"), metrics, before, after, phases)
    assert (summary["environment"], summary["tool_use_before"], summary["tool_use_after"]) == (
        "calculator",
        0.011,
        1.0,
    )
    out = io.StringIO()
    print_closing_table(
        Console(file=out, width=100), summary, {"reward plot": tmp_path / "reward.png"}
    )
    assert re.search(r"used the tool\W+1\.1%\W+100\.0%", out.getvalue())
    draw(tmp_path / "reward.png", metrics.steps, 0.03, 0.99, 256, subtitle(summary))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_said_is_all_that_came_after_the_question() -> None:
    roles = {
        "system": "You may.",
        "user": "3 * 4 = ?",
        "assistant": "<calc>3*4</calc>\n",
        "tool": "12",
    }
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    assert said(messages) == ["<calc>3*4</calc>", "12"]


def test_weight_updates_count_only_newer_versions(tmp_path: Path) -> None:
    assert (
        weight_updates(
            MetricsFile(
                tmp_path,
                steps=[step(1), step(2), step(3, weight_version=2), step(4, weight_version=None)],
            )
        )
        == 2
    )


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(1, 9))
def test_smoothing_keeps_length_and_bounds(values: list[float], width: int) -> None:
    mean = smooth(values, width)
    assert len(mean) == len(values)
    assert min(values) - 1e-9 <= min(mean)
    assert max(mean) <= max(values) + 1e-9
    assert smooth(values, 1) == values


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.99, "1 min 00 s"), (151, "2 min 31 s")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    "text", ["", "{}", '{"correct": null}', '{"correct": 0, "num_problems": 0}', "[]"]
)
def test_a_useless_evaluation_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(text)
    with pytest.raises(LauncherError, match=r"evaluation\.json cannot be used"):
        read_evaluation(path)


def test_a_second_run_clears_its_own_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with open_output(folder):
        (folder / "logs").mkdir()
        (folder / "logs" / "vllm.log").write_text("old")
        (folder / "summary.json").write_text("{}")
        (folder / "notes.txt").write_text("mine")
        with pytest.raises(LauncherError, match="in use by another quick start"):
            open_output(folder)
        assert (folder / "summary.json").exists()
    with open_output(folder):
        assert sorted(entry.name for entry in folder.iterdir()) == [LOCK, "notes.txt"]


def test_a_checkpoint_that_changes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint("owner/name") == {}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(LauncherError, match=r"holds other files \(thesis\.tex\)"):
        open_output(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_output_that_cannot_be_written_is_named() -> None:
    with pytest.raises(LauncherError, match="--output /proc/nowhere cannot be written"):
        open_output(Path("/proc/nowhere"))


@pytest.mark.parametrize(
    ("bridge", "flag", "gpu"),
    [("broadcast", "--use-shared-memory", "5"), ("single-copy", "--single-copy", "4")],
)
def test_the_plan_hands_ports_bridge_and_gpus_to_every_process(
    bridge: str, flag: str, gpu: str
) -> None:
    plan = Plan(
        replace(OPTIONS, bridge=bridge, gpus=(4, 5)),
        Ports(service=1111, vllm=2222, rendezvous=3333),
    )
    assert plan.vllm().variables["CUDA_VISIBLE_DEVICES"] == "4"
    assert plan.trainer().variables["CUDA_VISIBLE_DEVICES"] == gpu
    assert flag in plan.trainer().arguments
    for command in (plan.vllm(), plan.trainer()):
        assert command.variables["MASTER_PORT"] == "3333"
        assert "2222" in command.arguments
    assert plan.vllm().variables["VLLM_ENABLE_SHARED_WEIGHTS"] == "1"
    for command in (plan.environment(), plan.trainer()):
        assert "http://localhost:1111" in command.arguments
    assert all(line in plan.script() for line in ("MASTER_PORT=3333", "--port 1111", flag))
    assert "environments/arithmetic_server.py" in plan.script()
    other = replace(plan, options=replace(plan.options, environment="calculator"))
    assert all(
        "environments/calculator_server.py" in c.arguments
        for c in (other.environment(), other.evaluation("x", Path()))
    )


def test_the_stack_shares_the_cores_and_keeps_groups_of_equal_scores_where_a_task_is_soon_solved() -> (
    None
):
    plan = Plan(replace(OPTIONS, gpus=()), Ports(service=1111, vllm=2222, rendezvous=3333))
    sampling, training = (
        int(command.variables["OMP_NUM_THREADS"]) for command in (plan.vllm(), plan.trainer())
    )
    assert (sampling, training) == (max(1, cores() // 2), cores())
    assert "--env.ensure_scores_are_not_same false" in plan.environment().typed()
    other = replace(plan, options=replace(plan.options, environment="calculator"))
    assert "--env.ensure_scores_are_not_same true" in other.environment().typed()


@pytest.mark.parametrize("environment", sorted(LEVELS))
def test_environment_and_trainer_agree_on_the_shape_of_a_batch(environment: str) -> None:
    plan = Plan(
        replace(OPTIONS, environment=environment), Ports(service=1111, vllm=2222, rendezvous=3333)
    )

    def value(command: Command, flag: str) -> int:
        return int(command.arguments[command.arguments.index(flag) + 1])

    shape, trainer, serving = BATCHES[environment], plan.trainer(), plan.environment()
    assert (
        value(trainer, "--batch-size") * value(trainer, "--gradient-accumulation-steps")
        == shape.rollouts
    )
    assert value(serving, "--env.group_size") == shape.group_size
    # The batch that is trained on and each batch ahead of it fit into the work in progress, and
    # into one vLLM batch.
    ahead = value(serving, "--env.max_batches_offpolicy")
    at_once = value(serving, "--env.max_num_workers_per_node")
    assert at_once == (1 + ahead) * shape.groups
    assert at_once * shape.group_size <= value(plan.vllm(), "--max-num-seqs")
