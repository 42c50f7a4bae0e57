"""engine_clock.py: the content of a file of sums; and only the process with the engine core is
measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench.gpu import engine_clock


def test_calls_and_seconds_are_added_up_and_left_in_the_file(tmp_path: Path) -> None:
    clock = engine_clock.Clock(tmp_path / "clock.json")
    halve = clock.around("steps", lambda number: number / 2)
    assert [halve(3), halve(4)] == [1.5, 2.0]
    with pytest.raises(TypeError):
        halve("three")
    clock.write()
    calls, wall, busy = json.loads((tmp_path / "clock.json").read_text(encoding="utf-8"))["steps"]
    assert calls == 3
    assert wall >= 0
    assert busy >= 0


def test_what_is_spent_is_of_the_time_between_two_looks() -> None:
    before = {"schedule": [10, 1.0, 0.5], "gather": [4, 1.0, 1.0]}
    after = {"schedule": [20, 3.0, 1.0], "gather": [4, 1.0, 1.0], "encode": [2, 0.5, 0.25]}
    found = engine_clock.spent(before, after, tokens=1e6)
    assert found == {
        "schedule": {"us": 2.0, "processor_us": 0.5},
        "encode": {"us": 0.5, "processor_us": 0.25},
    }


def test_clocks_are_put_in_once_and_what_a_version_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EngineCore:
        def step(self) -> str:
            return "stepped"

    module = ModuleType("vllm.v1.engine.core")
    module.__dict__["EngineCore"] = EngineCore
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    monkeypatch.setattr(
        engine_clock,
        "CLOCKS",
        {"steps": [("vllm.v1.engine.core", "EngineCore", name) for name in ("step", "lost")]},
    )
    plain = EngineCore.step
    engine_clock.install()
    assert EngineCore.step is plain  # without the name of a file
    monkeypatch.setenv(engine_clock.FILE, str(tmp_path / "clock.json"))
    engine_clock.install()
    once = EngineCore.step
    engine_clock.install()
    assert EngineCore.step is once is not plain
    assert EngineCore().step() == "stepped"
    assert json.loads((tmp_path / "clock.json").read_text(encoding="utf-8"))["steps"][0] == 1


def test_each_step_is_noted_with_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EngineCore: ...

    class Scheduler:
        def schedule(self, tokens: dict[str, int]) -> SimpleNamespace:
            return SimpleNamespace(
                total_num_scheduled_tokens=sum(tokens.values()), num_scheduled_tokens=tokens
            )

    core, scheduling = ModuleType("vllm.v1.engine.core"), ModuleType("vllm.v1.core.sched.scheduler")
    core.__dict__["EngineCore"], scheduling.__dict__["Scheduler"] = EngineCore, Scheduler
    for module in (core, scheduling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(engine_clock.STEPS_FILE, str(tmp_path / "steps.txt"))
    engine_clock.install()
    engine_clock.install()
    for tokens in ({"a": 1, "b": 30}, {}, {"b": 1}):  # a step of nothing is none
        assert Scheduler().schedule(tokens).num_scheduled_tokens == tokens
    found = engine_clock.read_steps(tmp_path / "steps.txt")
    assert [step[1:] for step in found] == [(31, 2), (1, 1)]
    assert found[0][0] <= found[1][0]


def test_what_is_computed_anew_is_what_follows_an_update() -> None:
    usual = [(0.1 * n, 8, 8) for n in range(100)]  # one token for each of eight answers
    anew = {20: (2.0, 900, 5), 21: (2.1, 308, 8), 50: (5.0, 400, 8), 99: (9.9, 400, 8)}
    steps = [anew.get(n, step) for n, step in enumerate(usual)]
    found = engine_clock.computed_anew(steps, [(1.95, 2.0), (4.0, 4.2), (9.0, 9.6)])
    assert found[0] == {"tokens": 900 - 5 + 308 - 8, "steps": 2, "seconds": pytest.approx(0.2)}
    assert found[1] == {"tokens": 0, "steps": 0, "seconds": 0}, (
        "half a second later it is somebody's prompt"
    )
    assert found[2]["tokens"] == 0, "what had not ended is not known"


def test_the_variables_name_the_plugin(tmp_path: Path) -> None:
    found = SimpleNamespace(**engine_clock.variables(tmp_path / "clock.json"))
    assert str(engine_clock.PLUGIN_FOLDER) in found.PYTHONPATH.split(":")
    points = next(engine_clock.PLUGIN_FOLDER.glob("*.dist-info/entry_points.txt")).read_text(
        encoding="utf-8"
    )
    assert f"{engine_clock.__name__}:{engine_clock.install.__name__}" in points
