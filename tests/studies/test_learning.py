"""studies/learning/trainings.py without its trainings: what is compared, in which order, what counts as
divergence, tables and pictures.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figure_tables import NAMED, NOT_YET
from bench.gpu.processes import Child
from bench.results_book import Book
from example_trainer.simple_rl import parse_arguments, trainer_config
from studies.learning import plots, trainings
from studies.learning.plan import (
    CHAPTERS,
    CORRECTIONS,
    TINY,
    VARIANTS,
    estimated_seconds,
    gpus_of,
    plan,
    refusal,
    shown_in,
)
from studies.learning.summary import (
    HEADS,
    POINTS,
    band,
    curves,
    divergence,
    downsampled,
    figures,
    over_seeds,
    steps_of,
    variant_rows,
)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_command_of_simple_rl(name: str) -> None:
    variant = VARIANTS[name]
    config = trainer_config(parse_arguments(list(variant.flags)), port=1)
    assert config.deterministic == (name == "exact")
    assert (config.max_staleness or 0) == (
        int(name.rpartition("_")[2]) if name.rpartition("_")[2].isdigit() else 0
    )
    assert (config.correction != "none") == any(
        name.startswith(c) for c in CORRECTIONS if c != "sequence_kl"
    )
    assert (config.ppo_epochs, config.minibatches) == ((2, 2) if name.endswith("_2x2") else (1, 1))
    assert config.dtype == ("float32" if name == "two_dtypes" else "auto")


def test_every_variant_is_shown_and_every_first_seed_comes_first() -> None:
    assert {variant for chapter in CHAPTERS for variant in shown_in(chapter)} == set(
        VARIANTS.values()
    )
    trainings = plan(list(VARIANTS), (7, 8))
    assert [training.seed for training in trainings] == [7] * len(VARIANTS) + [8] * len(VARIANTS)
    assert [training.name for training in plan(["gspo", "exact"], (3,))] == ["exact 3", "gspo 3"]


def test_a_variant_gets_gpus_or_a_reason() -> None:
    (two,) = plan(["two_dtypes"], (0,))
    (one,) = plan(["stale_4"], (0,))
    assert [gpus_of(two, slot, 4) for slot in range(4)] == ["0,1", "1,2", "2,3", "3,0"]
    assert [gpus_of(one, slot, 4) for slot in range(4)] == ["0", "1", "2", "3"]
    assert gpus_of(two, 0, 1) == "0"
    assert [refusal(variant, on_cpu=False) for variant in VARIANTS.values()] == [None] * len(
        VARIANTS
    )
    assert refusal(VARIANTS["exact"], on_cpu=True) == "what it compares is on GPUs alone"
    assert [refusal(VARIANTS[name], on_cpu=True) for name in TINY] == [None] * len(TINY)
    assert estimated_seconds(69, 24, 400.0) == 3 * 400.0


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=500))
def test_a_kept_curve_is_short_and_has_the_same_mean(values: list[float | None]) -> None:
    kept = downsampled(values)
    assert len(kept) == len(steps_of(len(values))) <= POINTS
    places = steps_of(len(values))
    assert places == sorted(places)
    assert all(1 <= place <= len(values) for place in places)
    if None not in values and values and len(values) % len(kept) == 0:
        assert sum(kept) / len(kept) == pytest.approx(sum(values) / len(values), abs=1e-3)  # type: ignore[arg-type]


def rows_of(rewards: list[float], kl: float = 1e-4) -> list[dict[str, Any]]:
    noise = random.Random(0)
    return [
        {
            "reward_mean": r + noise.uniform(-0.1, 0.1),
            "kl": kl,
            "seconds_wait": 1.0,
            "seconds_train": 0.5,
            "ess": None,
        }
        for r in rewards
    ]


RISING = [-0.5 + step / 100 for step in range(100)]


def test_only_a_run_that_falls_apart_has_diverged() -> None:
    assert divergence(rows_of(RISING), "") is None
    assert divergence(rows_of([-0.9] * 100), "") is None, "nothing was there to be lost"
    assert divergence(rows_of([*RISING[:60], *[0.0] * 40]), "") is None, "a slump"
    fallen = divergence(rows_of([*RISING[:90], *[-0.9] * 10]), "")
    assert fallen is not None
    assert fallen.startswith("reward fell from 0.")
    apart = rows_of(RISING)
    for row in apart[40:]:
        row["kl"] = 3.0
    assert divergence(apart, "") == "KL of 3 nats a token at step 50"
    assert divergence(
        rows_of(RISING[:5]),
        "ERROR 07:00:00 the gradient of x is NaN or infinite at optimizer step 5; …",
    ) == ("not finite after step 5")
    assert divergence([], "") is None


@pytest.mark.parametrize("tail", [1, 5, 9])
def test_the_last_steps_count_where_the_windows_do_not_come_out_even(tail: int) -> None:
    """In runs of 101 to 109 steps a window has eleven."""
    steps = 100 + tail
    rows = rows_of([0.8] * (steps - 11) + [-0.9] * 11)
    assert (divergence(rows, "") or "").startswith("reward fell from 0.")
    assert figures(rows, [])["reward_last"] == pytest.approx(-0.9, abs=0.1)
    rows = rows_of([0.8] * steps)
    for row in rows[-2:]:
        row["kl"] = 4.0
    assert (divergence(rows, "") or "").endswith(f"nats a token at step {steps}")
    assert figures(rows, [])["kl_max"] == pytest.approx(4.0 * 2 / 11, rel=1e-2)


def test_a_run_that_another_error_ends_is_no_result_even_if_it_had_diverged() -> None:
    rows = rows_of(RISING, kl=3.0)
    assert divergence(rows, "") is not None
    assert divergence(rows, "ERROR 07:00:00 the vLLM server ended with code -9") is None


def run_of(variant: str, seed: int, rewards: list[float], solved: float) -> dict[str, Any]:
    rows = rows_of(rewards)
    evaluations = [
        {"weight_version": v, "metrics": {"solved": s}} for v, s in ((0, 0.2), (100, solved))
    ]
    return {
        "variant": variant, "seed": seed, "status": "done", "diverged": divergence(rows, ""), "last_line": "", "seconds": 9.0,
        "steps": len(rows), "figures": figures(rows, evaluations), "curves": curves(rows),
        "evaluation": {"weight_version": [0, 100], "solved": [0.2, solved]},
        "measured": {"commit": "abc", "date": "2026-11-22 14:00", "run": "one"},
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two variants of the staleness chapter, two seeds each; one run of theirs has diverged, and a
    third has failed.
    """
    fallen = [*RISING[:90], *[-0.9] * 10]
    runs = {
        "ordinary 0": run_of("ordinary", 0, RISING, 0.6),
        "ordinary 1": run_of("ordinary", 1, RISING, 0.4),
        "stale_16 0": run_of("stale_16", 0, fallen, 0.0),
        "stale_16 1": run_of("stale_16", 1, RISING, 0.5),
        "stale_4 0": run_of("stale_4", 0, RISING[:3], 0.5)
        | {"status": "failed", "last_line": "out of memory"},
    }
    path = tmp_path / "learning.json"
    path.write_text(
        json.dumps(
            {"measured": {"commit": "abc", "date": "2026-11-22 14:00", "run": "one"}, "runs": runs}
        )
    )
    return path


def test_tables_have_means_over_seeds_and_say_what_diverged(results: Path) -> None:
    book = Book(results.parent)
    assert book.undated() == []
    runs = book.get("learning", "runs")
    rows = variant_rows(runs, [(variant.name, variant.label) for variant in shown_in("staleness")])
    assert [row[:2] for row in rows] == [["ordinary kernels", "2"], ["16 steps old", "2"]]
    found = dict(zip(HEADS, rows[0], strict=True))
    assert found["solved after"] == "50.0% ± 14.1%"
    assert found["diverged"] == "0"
    assert rows[1][-1].startswith("reward fell from ")
    assert over_seeds([runs["ordinary 0"]], "solved_last") == (0.6, 0.0)
    assert over_seeds([], "solved_last") is None
    table = NAMED["learning_staleness"](book)
    assert "| 1 of 2 |" in next(
        line for line in table.splitlines() if line.startswith("| 16 steps old |")
    )
    assert table.startswith(
        "![Uncorrected, of one age throughout](images/learning_staleness.png)\n\n| "
    )
    assert table.endswith("Measured on 2026-11-22.")
    assert NAMED["learning_staleness"](Book(results.parent / "nowhere")) == NOT_YET
    assert NAMED["learning_divergences"](book) == "1 of 4 trainings diverged."
    told = trainings.report(
        json.loads(results.read_text()) | {"skipped": {"exact": "its kernels want a GPU"}}
    )
    assert "stale_4 0: failed: out of memory" in told
    assert "exact: not trained: its kernels want a GPU" in told


def test_a_table_of_a_mixture_says_how_many_trainings_are_missing(tmp_path: Path) -> None:
    late = {"measured": {"commit": "abc", "date": "2026-11-29 08:00", "run": "two"}}
    runs = {
        "exact_0 0": run_of("exact_0", 0, RISING, 0.6),
        "replay_4 0": run_of("replay_4", 0, RISING, 0.4) | late,
        "ordinary_0 0": run_of("ordinary_0", 0, RISING, 0.4) | {"status": "failed"},
    }
    page: dict[str, Any] = {"runs": runs, "missing": ["ordinary_0 0"]}
    path = tmp_path / "moe_learning_vllm033.json"
    path.write_text(json.dumps(page))
    table = NAMED["moe_learning"](Book(tmp_path))
    assert table.count("0 of 1 |") == 2
    assert table.endswith(
        "Measured from 2026-11-22 to 2026-11-29. 1 of 3 trainings are still to be run."
    )
    path.write_text(json.dumps(page | {"missing": []}))
    assert NAMED["moe_learning"](Book(tmp_path)).endswith("to 2026-11-29.")


def test_bands_reach_from_the_least_to_the_greatest() -> None:
    runs = [([1.0, 2.0, 3.0], [0.0, None, 4.0]), ([1.0, 2.0], [2.0, 6.0])]
    assert band(runs) == ([1.0, 2.0, 3.0], [1.0, 6.0, 4.0], [0.0, 6.0, 4.0], [2.0, 6.0, 4.0])


def test_a_picture_is_drawn_of_each_chapter_that_was_trained(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plots.main([str(results), "--output", str(tmp_path / "images")]) == 0
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "images").iterdir()}
    assert set(drawn) == {"learning_arithmetic.png", "learning_staleness.png"}
    assert min(drawn.values()) > 20_000
    assert "nothing of losses_2x2 was trained" in capsys.readouterr().out


def test_what_is_there_is_kept_what_fails_is_told_and_what_has_no_time_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One training is finished already; of the other, simple_rl.py does not know a flag.

    Then there are three, and no time.
    """
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--tiny", "--only", "stale_1"]
    other = ["--", "--no-such-flag"]
    args = trainings.parse_arguments([*arguments, "--seeds", "0", *other])
    with ExitStack() as stack:
        flags = trainings.Learning(args, tmp_path, stack)._flags(plan(["stale_1"], (0,))[0])
    assert not any(str(tmp_path) in flag for flag in flags), (
        "no folder of this machine in the results"
    )
    finished = run_of("stale_1", 0, RISING, 0.5) | {
        "flags": flags,
        "made_of": trainings.made_of(args.model),
    }
    kept = tmp_path / "trainings" / "stale_1-0" / "result.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(finished))
    assert trainings.main([*arguments, "--seeds", "0", "1", *other]) == 1
    runs = json.loads((tmp_path / "learning.json").read_text())["runs"]
    assert runs["stale_1 0"] == finished
    assert (runs["stale_1 1"]["status"], runs["stale_1 1"]["steps"]) == ("failed", 0)
    assert "unrecognized arguments: --no-such-flag" in runs["stale_1 1"]["last_line"]
    assert not (tmp_path / "trainings" / "stale_1-1" / "result.json").exists(), (
        "the next time it is tried again"
    )
    assert "kept, and not trained again: stale_1 0\n" in capsys.readouterr().out
    assert trainings.main([*arguments, "--seeds", "0", "1", "2", "--seconds", "30", *other]) == 0
    told = capsys.readouterr().out
    assert "2 trainings of 3 steps, 1 at a time on 1 CPU, 106 s each: about 3.5 minutes" in told
    assert "no time is left for 2 trainings; the same command goes on with them" in told


def test_what_another_model_or_other_code_came_to_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--output",
        str(tmp_path),
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "stale_1",
        "--seeds",
        "0",
        "1",
        "2",
    ]
    args = trainings.parse_arguments(arguments)
    now = trainings.made_of(args.model)
    with ExitStack() as stack:
        sitting = trainings.Learning(args, tmp_path, stack)
        sitting.made_of = now
        for training, made_of in zip(
            plan(["stale_1"], (0, 1, 2)),
            ({"model": "another"}, {"model": "another", "code": "other"}, {}),
            strict=True,
        ):
            kept = sitting._folder(training) / "result.json"
            kept.parent.mkdir(parents=True)
            kept.write_text(
                json.dumps(
                    {"flags": sitting._flags(training), "made_of": now | made_of, "status": "done"}
                )
            )
        assert [training.seed for training in sitting._left_to_do()] == [0, 1]
    told = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" is of other ")[2] for line in told[:2]] == ["model", "model and code"]
    assert told[2:] == ["kept, and not trained again: stale_1 2"]


def test_what_an_earlier_file_has_is_taken_over_and_the_rest_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same flags and model, whatever the code; a run that failed, or has fewer steps, is trained
    again.
    """
    arguments = [
        "--output",
        str(tmp_path / "new"),
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "stale_1",
        "gspo",
    ]
    earlier = tmp_path / "earlier.json"
    args = trainings.parse_arguments(
        [*arguments, "--seeds", "0", "1", "--seconds", "30", "--add-to", str(earlier)]
    )
    with ExitStack() as stack:
        sitting = trainings.Learning(args, tmp_path, stack)
        made_of = trainings.made_of(args.model) | {"code": "of last week"}
        runs = {}
        for training in plan(["stale_1", "gspo", "cispo"], (0, 1)):
            runs[training.name] = run_of(training.variant.name, training.seed, RISING, 0.5)
            runs[training.name] |= {"flags": sitting._flags(training), "made_of": made_of}
    runs["stale_1 1"] |= {"status": "failed"}
    runs["gspo 0"] |= {"flags": [*runs["gspo 0"]["flags"], "--steps", "2"]}
    runs["gspo 1"] |= {"made_of": made_of | {"model": "another"}}
    earlier.write_text(json.dumps({"runs": runs}))
    assert (
        trainings.main(
            [*arguments, "--seeds", "0", "1", "--seconds", "30", "--add-to", str(earlier)]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert f"gspo 0 of {earlier} is left out: it is of other flags\n" in told
    assert f"gspo 1 of {earlier} is left out: it is of other model\n" in told
    assert "kept, and not trained again: stale_1 0\n" in told
    assert "no time is left for 3 trainings" in told
    data = json.loads((tmp_path / "new" / "learning.json").read_text())
    assert data["runs"] == {name: runs[name] for name in ("stale_1 0", "cispo 0", "cispo 1")}
    every = {training.name for training in plan(list(VARIANTS), (0, 1))}
    assert set(data["missing"]) == every - set(data["runs"])
    assert "not there yet: exact 0, " in told
    assert trainings.main([*arguments, "--add-to", str(tmp_path / "none.json")]) == 1
    assert "--add-to " in capsys.readouterr().out


def test_trainings_end_before_mps_also_beside_one_that_has_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS waits for its programs when it ends."""
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--tiny", "--mps"]
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked to end', flush=True), sys.exit()))\n"
        "print('begun', flush=True)\n"
        "if sys.argv[1] == '1': time.sleep(600)"
    )
    children: list[Child] = []

    def mps(folder: Path, stack: ExitStack) -> dict[str, str]:
        stack.callback(lambda: ends.extend(child.poll() for child in children))
        return {}

    ends: list[int | None] = []
    monkeypatch.setattr(trainings, "start_mps", mps)
    with ExitStack() as stack:
        sitting = trainings.Learning(trainings.parse_arguments(arguments), tmp_path, stack)
        for number, training in enumerate(plan(["stale_1"], (0, 1))):
            log = tmp_path / f"{number}.log"
            child = Child(training.name, [sys.executable, "-c", program, str(number)], log, {})
            children.append(child)
            sitting.running.append(trainings.Running(training, (0, 0), child, tmp_path, 0.0))
        deadline = time.monotonic() + 120
        while children[0].poll() is None or "begun\n" not in (tmp_path / "1.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(ends) == 2
    assert None not in ends
    assert (tmp_path / "1.log").read_text().splitlines() == ["begun", "asked to end"]


def test_weights_and_code_have_digests_of_their_own(tmp_path: Path) -> None:
    model, code = (
        tmp_path / "model" / "model.safetensors",
        tmp_path / "example_trainer" / "deep" / "step.py",
    )
    for path in (model, code):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"one")
    first = trainings.made_of(model.parent, tmp_path)
    assert first == trainings.made_of(model.parent, tmp_path)
    model.write_bytes(b"two")
    second = trainings.made_of(model.parent, tmp_path)
    assert (second["model"] != first["model"], second["code"] == first["code"]) == (True, True)
    code.rename(code.with_name("other.py"))
    third = trainings.made_of(model.parent, tmp_path)
    assert (third["model"] == second["model"], third["code"] != second["code"]) == (True, True)
    assert all((trainings.ROOT / folder).is_dir() for folder in trainings.CODE)


def test_without_a_model_it_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--output",
        str(tmp_path / "out"),
        "--model",
        str(tmp_path / "none"),
        "--device",
        "cpu",
    ]
    assert trainings.main(arguments) == 1
    assert "there is no model in" in capsys.readouterr().out
