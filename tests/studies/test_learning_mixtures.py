"""The arms of studies/learning/mixtures.py, without their trainings."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from example_trainer.simple_rl import parse_arguments, trainer_config
from studies.learning import mixtures
from studies.learning.mixtures import Mixtures, unknown_flags
from studies.learning.plan import MIXTURES, Variant, plan
from studies.learning.trainings import made_of
from vllm_patching.weights.families import Geometry


@pytest.mark.parametrize("name", MIXTURES)
def test_an_arm_is_a_command_of_simple_rl(name: str) -> None:
    arm, (kind, _, age) = MIXTURES[name], name.partition("_")
    assert unknown_flags(arm) is None
    config = trainer_config(parse_arguments(list(arm.flags)), port=1)
    assert config.deterministic == (kind == "exact")
    assert config.router_replay == (kind == "replay")
    assert config.max_staleness == int(age)
    assert config.correction == "none"


def test_flags_that_simple_rl_does_not_take_are_named() -> None:
    made_up = Variant("x", "y", "z", ("--no-such-flag",))
    reason = unknown_flags(made_up)
    assert reason is not None
    assert "unrecognized arguments: --no-such-flag" in reason


def test_a_try_makes_a_mixture_and_keeps_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished arm of the same flags, model and code is not trained again."""

    def start(self: Mixtures, training: object) -> None:
        raise AssertionError(f"{training} is started")

    monkeypatch.setattr(Mixtures, "_start", start)
    words = ["--output", str(tmp_path), "--device", "cpu", "--tiny", "--only", "ordinary_0"]
    args = mixtures.parse_arguments(words)
    mixtures.mixture.main(["--output", str(args.model), "--experts", "4"])
    geometry = Geometry.from_config(json.loads((args.model / "config.json").read_text()))
    assert geometry.num_experts == 4
    with ExitStack() as stack:
        study = Mixtures(args, tmp_path, stack)
        (training,) = plan(["ordinary_0"], (0,), MIXTURES)
        folder = study._folder(training)
        folder.mkdir(parents=True)
        kept = {
            "variant": "ordinary_0", "seed": 0, "status": "done", "diverged": None,
            "flags": study._flags(training), "made_of": made_of(args.model),
            "figures": {"reward_last": 0.5}, "last_line": "", "seconds": 1.0,
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(kept))
    assert mixtures.main(words) == 0
    assert "kept, and not trained again: ordinary_0 0" in capsys.readouterr().out
    results = json.loads((tmp_path / "mixtures.json").read_text())
    assert results["runs"]["ordinary_0 0"]["figures"] == {"reward_last": 0.5}
    assert "exact_0 0" in results["missing"]
