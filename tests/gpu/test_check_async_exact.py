"""async_exact.py: what it starts is what a run on Ray accepts, and nothing passes for equal that is
not.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu.processes import BenchError
from example_trainer.async_grpo.settings import read_settings
from tests.gpu import check_async_exact


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
