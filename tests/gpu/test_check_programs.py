"""The programs of this folder without a GPU: the rows that they judge, their configurations, and plan
against use.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.gpu.checks import run_checks
from bench.gpu.processes import BenchError
from bench.measured import COMMIT_VARIABLE
from example_trainer.async_grpo.settings import read_settings
from tests.gpu import (
    check_async_exact,
    check_exact_layouts,
    check_learned_layouts,
    check_memory_plan,
)
from tests.gpu.check_fleet_faults import rows_of, shown, summary
from tests.gpu.check_training_modes import MODES, Run, ranks_in
from tests.tiny_models import ON_GPUS


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_run_on_ray_accepts_what_it_is_given(tmp_path: Path, device: str, copies: int) -> None:
    file = check_async_exact.configuration(device, copies, True, tmp_path / "run", tmp_path)
    settings = read_settings(file)
    assert settings.orchestration.exact_resume
    assert settings.shares_gpus == (copies == 1)
    assert bool(settings.training.get("deterministic")) == (device == "cuda")
    assert ("--enforce-eager" in settings.inference.server_args) == (device == "cuda")
    values = settings.trainer_values
    assert (
        values["batch_size"] * values["gradient_accumulation_steps"]
        == check_async_exact.GROUP * check_async_exact.BATCH
    )


STEPS = [["a", 0.0, 5, 5, 0], ["b", 0.5, 6, 6, 0]]


class FakeRun:
    """A run whose processes are none."""

    def __init__(self, found: dict[str, Any], taken: int) -> None:
        self.found, self.taken, self.driver = (
            found,
            taken,
            SimpleNamespace(poll=lambda: 0),
        )

    def start(self) -> None: ...

    def in_the_middle(self) -> bool:
        return True

    def kill(self) -> int:
        return self.taken

    def finish(self) -> dict[str, Any]:
        return self.found


@pytest.mark.parametrize(
    ("found", "taken", "told"),
    [
        ({"steps": STEPS, "weights": "w"}, 1, None),
        (
            {"steps": [STEPS[0], ["c", 0.5, 6, 6, 0]], "weights": "w"},
            1,
            "steps of the run that was killed",
        ),
        ({"steps": STEPS, "weights": "v"}, 1, "weights of the run that was killed"),
        ({"steps": STEPS, "weights": "w"}, 2, "not in the middle"),
    ],
)
def test_another_step_or_other_weights_are_a_failure(
    found: dict[str, Any], taken: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_async_exact, "Run", lambda *arguments: FakeRun(found, taken))
    benchmark: Any = SimpleNamespace(
        args=SimpleNamespace(seconds=1.0, steps=2), work=None, stack=None
    )
    whole = {"steps": STEPS, "weights": "w"}
    if told:
        with pytest.raises(BenchError, match=told):
            check_async_exact.Benchmark._killed(benchmark, whole)
        return
    row = check_async_exact.Benchmark._killed(benchmark, whole)
    assert row["killed_after_step"] == 1
    text = check_async_exact.report(
        {"runs": {"whole": whole, "killed": row, "other": {"failed": "it ended"}}}
    )
    assert [line.split() for line in text.splitlines()[2:4]] == [
        ["whole", "2", "11", "0", "w"],
        ["killed", "2", "1", "11", "0", "w"],
    ]
    assert "it ended" in text


def test_it_is_killed_between_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_async_exact.main(["--output", str(tmp_path), "--steps", "3", "--kill-after", "3"])
    assert "less than --steps 3" in capsys.readouterr().err


REPORT = """<testsuites><testsuite>
<testcase name="test_one_of_three_fails[direct-one_gpu-begin-kill]" time="3.5"><properties>
 <property name="update_s" value="0.25"/><property name="back_s" value="1.5"/></properties></testcase>
<testcase name="test_one_of_three_fails[direct-two_gpus-begin-kill]" time="0.0"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_all_are_gone_and_back[direct-one_gpu]" time="9.0"><failure message="assert 1 == 2"/></testcase>
</testsuite></testsuites>"""


def test_rows_say_what_ran_whether_it_was_good_and_what_it_took(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    one, other = rows = rows_of("one GPU", report)
    assert (one["test"], one["case"], one["good"]) == (
        "one_of_three_fails",
        "direct-one_gpu-begin-kill",
        True,
    )
    assert (one["update_s"], one["back_s"], one["seconds"]) == (0.25, 1.5, 3.5)
    assert (other["test"], other["good"]) == ("all_are_gone_and_back", False)
    assert "update_s" not in other
    found = summary(rows)
    assert (found["tests"], found["good"], found["update"]["max"], found["back"]["n"]) == (
        2,
        1,
        250.0,
        1,
    )
    assert "one of three fails" in shown(rows)


@pytest.mark.usefixtures("forked_children")
def test_a_tiny_configuration_is_planned_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    status = check_memory_plan.main(
        ["--output", str(tmp_path), "--device", "cpu", "--only", "reference_1.7b"]
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    written = json.loads((tmp_path / "memory_plan.json").read_text())
    (row,) = written["results"]
    assert row["measured"]["commit"] == "abc"
    assert row["allocated"].keys() - {"end of the forward pass"} == row["planned"].keys()
    parts = (
        "backward of the loss",
        "backward of the layers",
        "end of the backward pass",
        "optimizer",
        "update of the server",
    )
    assert row["allocated"]["greatest"] == max(row["allocated"][part] for part in parts)
    assert (
        row["allocated"]["after connecting"] > row["allocated"]["after loading"]
    )  # columns for vLLM's two ranks
    assert "backward of the loss" in printed


def test_the_plan_was_right_on_gpus() -> None:
    """Compare the committed bytes: at the greatest moment, and wherever a step may be at its
    greatest.
    """
    rows = json.loads(
        (Path(__file__).resolve().parents[2] / "bench" / "results" / "memory_plan.json").read_text()
    )["results"]
    assert {"full", "offload", "lora", "fsdp2"} <= {
        row["configuration"]["name"].partition("_")[0] for row in rows
    }
    for row in rows:
        shared = row["planned"].keys() & row["allocated"].keys()
        assert {
            key: row["planned"][key] / row["allocated"][key] for key in shared
        } == pytest.approx(dict.fromkeys(shared, 1.0), abs=0.1), row["configuration"]["name"]


def test_each_step_counts_once_also_where_its_weights_are_not_served(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    # Served after every second step; the third was done again after a kill.
    rows = [(1, 0, "a"), (2, 2, "b"), (3, 2, "lost"), (3, 2, "c"), (4, 4, "d")]
    written = [
        json.dumps({"step": step, "weight_version": version, "checksum": sum_})
        for step, version, sum_ in rows
    ]
    metrics.write_text("\n".join(written) + "\n", encoding="utf-8")
    run = SimpleNamespace(processes=SimpleNamespace(metrics=metrics))
    assert [row["checksum"] for row in Run.learned(run)] == ["a", "b", "c", "d"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gpus", "trainer"),
    [
        ("broadcast_direct", 1, "0"),
        ("broadcast_tp2_fsdp2", 2, "1,0"),  # each rank to the other GPU
        ("broadcast_two_servers", 2, "1"),
        ("broadcast_two_servers", 3, "2"),
        ("broadcast_fsdp2", 2, "0,1"),
        ("single_copy_tp2", 2, "0,1"),
        ("deterministic_single_copy_tp2", 4, "0,1"),
        ("deterministic_broadcast_tp2", 2, "1"),
        ("deterministic_broadcast_tp2_fsdp2", 2, "0,1"),
        ("deterministic_broadcast_tp2_fsdp2", 4, "2,3"),
    ],
)
def test_a_trainer_without_gpus_of_its_own_is_put_on_vllm_s(
    name: str, gpus: int, trainer: str
) -> None:
    mode = MODES[name].on(gpus)
    assert mode.trainer_gpus == trainer
    assert mode.gpus_needed <= gpus


def test_a_trainer_s_own_server_is_put_on_the_gpus_that_this_program_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(device="cuda", steps=8, kill_after=0, eager=True)
    run: Any = SimpleNamespace(mode=MODES["restart"], args=args, ports=[9001], handing_on=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Run.trainer_options(run)["vllm_gpus"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert Run.trainer_options(run)["vllm_gpus"] == "2"


def mode_run(name: str) -> Any:
    args = SimpleNamespace(steps=2, device="cpu")
    return SimpleNamespace(name=name, mode=MODES[name], args=args)


def test_a_replay_without_experts_and_a_mixture_that_differs_are_failures() -> None:
    rows = [{"step": 1}, {"step": 2}]
    found = {
        "params": "3/3", "served": [2], "kl": [0.0, 0.001], "compared_tokens": 5, "mismatched_tokens": 0,
        "rerouted_share": [0.01, 0.02],
    }  # fmt: skip
    Run.judge(mode_run("mixture_replay"), found, rows)
    with pytest.raises(BenchError, match="replayed in 1 of 2 steps"):
        Run.judge(mode_run("mixture_replay"), found | {"rerouted_share": [0.01]}, rows)
    found = found | {"rerouted_share": [], "kl": [0.0, 0.1]}
    Run.judge(mode_run("mixture"), found, rows)
    with pytest.raises(BenchError, match=r"KL to the rollouts. policy reached 0\.1"):
        Run.judge(mode_run("mixture_deterministic"), found, rows)
    with pytest.raises(BenchError, match=r"0 of 5 tokens differ, KL 0\.001"):
        Run.judge(mode_run("mixture_deterministic"), found | {"kl": [0.0, 0.001]}, rows)


def test_ranks_are_counted_by_the_trainers_log(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("07:53:11 [Bridge] Broadcast\n")
    assert ranks_in(log) == 1
    log.write_text(
        "07:53:11 [Ranks] Starting 2 ranks, one for each of vLLM's at http://localhost:9001\n"
    )
    assert ranks_in(log) == 2


def cell_of(tokens: int, mismatched: int) -> dict[str, Any]:
    counters = {"preemptions": 0, "prefix_cache_hits": 3, "max_difference": 0.0}
    return {"tokens": tokens, "mismatched": mismatched, **counters}


def test_layouts_are_exact_only_if_enough_is_compared_and_the_control_differs() -> None:
    cells = {"64 at a time": cell_of(10**6, 0), check_exact_layouts.CONTROL: cell_of(50, 49)}
    layout: dict[str, Any] = {"cells": {**cells, "broken": {"failed": "no answer"}}}
    data = {"layouts": {"one rank": {"cells": cells}, "FSDP2 over 2": layout}}
    assert check_exact_layouts.total(layout) == {"tokens": 10**6, "mismatched": 0}
    assert check_exact_layouts.judged(data, on_gpu=True) == []
    told = check_exact_layouts.report(data)
    assert "FSDP2 over 2: 1000000 tokens compared, 0 differ" in told
    layout["cells"]["8 at a time"] = cell_of(5, 2)
    reason = "FSDP2 over 2: 8 at a time: 2 of 5 tokens differ"
    assert check_exact_layouts.judged(data, True) == [reason]
    layout["cells"] = {"64 at a time": cell_of(9, 0), check_exact_layouts.CONTROL: cell_of(50, 0)}
    few, control = check_exact_layouts.judged(data, True)
    assert few.startswith("FSDP2 over 2: 9 tokens compared, at least 1000000")
    assert "control" in control
    assert check_exact_layouts.judged(data, on_gpu=False) == []


def test_a_layout_that_failed_before_its_cells_is_a_failure() -> None:
    data = {"layouts": {"single copy": {"load": {"failed": "no memory"}}}}
    few, control = check_exact_layouts.judged(data, True)
    assert "0 tokens compared" in few
    assert "control" in control


@pytest.mark.parametrize(
    ("number", "layouts", "brief"), [(0, 1, False), (0, 3, False), (1, 3, False), (0, 1, True)]
)
def test_the_cells_of_every_layout_sample_enough_tokens(
    number: int, layouts: int, brief: bool
) -> None:
    cells = [*check_exact_layouts.cells_of(number, layouts, brief).values()]
    cells += [check_exact_layouts.SYNC_CELL] * check_exact_layouts.UPDATES
    sampled = sum(cell["requests"] * sum(cell["new"]) / 2 for cell in cells)
    assert sampled > 1.02 * check_exact_layouts.LEAST_TOKENS


@pytest.mark.parametrize(
    ("words", "name", "parts"),
    [
        ("", "exact_layouts_qwen3-0.6b_tp2", [1]),
        ("--trainer-ranks 2", "exact_layouts_qwen3-0.6b_tp2_fsdp2", [1]),
        ("--bridge single-copy", "exact_layouts_qwen3-0.6b_tp2_single_copy", [4]),
        (
            "--tensor-parallel 4 --trainer-ranks 1 2 4 --shape qwen3-1.7b --version-ending _v",
            "exact_layouts_qwen3-1.7b_tp4_fsdp2_fsdp4_v",
            [1, 1, 1],
        ),
    ],
)
def test_a_results_file_is_named_by_its_layouts(
    words: str, name: str, parts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        check_exact_layouts, "run_and_report", lambda args, *_: seen.append(args) or 0
    )
    assert check_exact_layouts.main(["--output", str(tmp_path), *words.split()]) == 0
    (args,) = seen
    assert args.name == name
    layouts = check_exact_layouts.layouts_of(args)
    controls = [layout.other_plan(args.tensor_parallel) for layout in layouts]
    assert controls == parts
    assert args.tensor_parallel not in controls


def test_checks_that_a_time_limit_ends_leave_what_was_seen(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"

    def ends() -> tuple[bool, str]:
        raise KeyboardInterrupt

    def fails() -> tuple[bool, str]:
        return False, "7 rows differ"

    checks = {"first": lambda: (True, "3 runs"), "second": fails, "third": ends}
    with pytest.raises(KeyboardInterrupt):
        run_checks("Checks.", checks, ["--json", str(file)], needs_gpu=False)
    written = json.loads(file.read_text())
    assert written["asked"] == 3
    assert written["checks"] == {
        "first": {"passed": True, "seen": "3 runs"},
        "second": {"passed": False, "seen": "7 rows differ"},
    }


def test_architectures_are_tried_at_once_and_each_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(name: str, device: str) -> tuple[bool, Any]:
        if name == "hangs":
            time.sleep(60)
        if name == "dies":
            os._exit(3)
        if name == "raises":
            raise ValueError("a shape")
        return True, {"how": device}

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(check_learned_layouts, "update_one", tried)
    names = ["hangs", "good", "dies", "raises"]
    check_learned_layouts.fork_all(names, tmp_path, "cpu", at_once=2, seconds=2)
    ended: Any = SimpleNamespace(poll=lambda: 0)
    outcomes = check_learned_layouts.Outcomes([*names, "never began"], tmp_path, ended)
    seen = {name: check() for name, check in outcomes.items()}
    assert seen["good"] == (True, {"how": "cpu"})
    assert not seen["raises"][0]
    assert re.search(r"in tried\n.*\nValueError: a shape$", seen["raises"][1], re.DOTALL)
    for name, reason in (
        ("hangs", "no outcome in 2 s"),
        ("dies", "its process ended"),
        ("never began", "the process that forks has ended with 0"),
    ):
        assert not seen[name][0]
        assert seen[name][1].startswith(reason)


def test_architectures_that_the_cpu_build_updates_are_left_to_it() -> None:
    assert {*ON_GPUS} <= {*check_learned_layouts.BY_DEFAULT}
    assert not {"Mixtral", "Mamba2", "Qwen3"} & {*check_learned_layouts.BY_DEFAULT}
