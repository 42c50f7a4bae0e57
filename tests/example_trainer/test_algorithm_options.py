"""Meaning of the algorithm's options together, and contradictions among them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from example_trainer.algorithm.advantages import METHODS, Method, find_advantages
from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.training.step import make_objective

MINE = """
tried = []
def loss(inputs, settings):
    tried.append(settings.dual_clip)
    return -inputs.log_ratio.exp() * inputs.advantages
def advantages(scores): return [[score - 0.5 for score in group] for group in scores]
def no_loss(inputs, settings): return None
"""


def parsed(words: str) -> TrainerConfig:
    return parse_config(["--model-name", "m", *shlex.split(words)])


def test_without_a_word_it_is_grpo() -> None:
    config = parsed("")
    assert (
        config.method
        == METHODS["grpo"]
        == Method("grpo", "group", True, "token", 0.2, None, None, "loss")
    )
    assert (
        config.clip_high,
        config.kl_coef,
        config.entropy_coef,
        config.ppo_epochs,
        config.minibatches,
    ) == (0.2, 0, 0, 1, 1)
    assert (config.correction, config.correction_high, config.correction_ratio) == (
        "token_truncate",
        2.0,
        "proximal",
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_functions_and_a_line_of_help(name: str) -> None:
    config = parsed(f"--loss {name}")
    assert config.method == METHODS[name]
    assert callable(make_objective(config).loss)
    assert callable(find_advantages(config.method.advantages, config.method.advantage_std))
    assert f"{name}," in (TrainerConfig.model_fields["loss"].description or "").replace(" or ", " ")


@pytest.mark.parametrize(
    ("words", "clip", "changed"),
    [
        ("--loss dapo", (0.2, 0.28), {}),
        # one bound for both sides
        ("--loss dapo --clip-eps 0.1", (0.1, 0.1), {"clip_eps": 0.1, "clip_eps_high": None}),
        ("--loss dapo --clip-eps-high 0.4", (0.2, 0.4), {"clip_eps_high": 0.4}),
        ("--loss gspo --clip-eps 0.001 --clip-eps-high 0.002", (0.001, 0.002), {"clip_eps": 1e-3, "clip_eps_high": 2e-3}),
        ("--loss cispo --clip-eps-high 4", (1.0, 4.0), {"clip_eps_high": 4.0}),
        ("--loss dual_clip --dual-clip 5", (0.2, 0.2), {"dual_clip": 5.0}),
        ("--loss dr_grpo --advantage-std --loss-normalisation token", (0.2, 0.2), {"advantage_std": True,
         "loss_normalisation": "token"}),
        ("--loss rloo --kl-coef 0.1 --kl-in loss", (0.2, 0.2), {"kl_in": "loss"}),
        ("--loss grpo --advantages leave_one_out --no-advantage-std", (0.2, 0.2), {"advantages": "leave_one_out",
         "advantage_std": False}),
    ],
)  # fmt: skip
def test_flags_win_over_the_methods_choices(
    words: str, clip: tuple[float, float], changed: dict[str, object]
) -> None:
    config = parsed(words)
    own = METHODS[config.loss]
    assert (config.method.clip_eps, config.clip_high) == clip
    assert {
        key: value for key, value in vars(config.method).items() if value != getattr(own, key)
    } == changed


@pytest.mark.parametrize(
    "words",
    [
        "--kl-in reward --kl-coef 0",
        "--correction none --correction-low 0.2 --correction-high 3",
        "--correction none --sequence-kl-limit 0.1",
        "--truncated-answers mask --overlong-buffer 9",
        "--distill-in loss --distill-coef 0",
        "--advantages group --advantage-beta 0.2",
        "--minibatches 64 --ppo-epochs 3 --loss rloo",
    ],
)
def test_what_is_switched_off_in_so_many_words_keeps_its_settings(words: str) -> None:
    """A flag that switches off what a file sets up must not need the file to be changed."""
    assert parsed(words).loss


@pytest.mark.parametrize("place", ["beside the file", "current directory"])
def test_functions_of_the_users_are_found(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mine_" + place.replace(" ", "_")
    files, here = tmp_path / "files", tmp_path / "here"
    files.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ((files if place == "beside the file" else here) / f"{name}.py").write_text(MINE)
    (files / "c.yaml").write_text(f"loss: {name}:loss\nadvantages: {name}:advantages\n")
    config = parse_config(
        ["--config", str(files / "c.yaml"), "--model-name", "m", "--dual-clip", "3"]
    )
    assert config.method == Method(f"{name}:loss", advantages=f"{name}:advantages", dual_clip=3.0)
    assert find_advantages(config.method.advantages)([[1.0]]) == [[0.5]]
    module = sys.modules[name]
    assert module.tried == [], "a loss is tried once, when the objective is made of it"
    objective = make_objective(config)
    assert objective.loss is module.loss
    assert module.tried == [3.0] * 3, "with what the flags say"
    other = parse_config(
        ["--config", str(files / "c.yaml"), "--model-name", "m", "--loss", f"{name}:no_loss"]
    )
    with pytest.raises(
        ConfigError,
        match=f"^--loss {name}:no_loss: it returned NoneType; expected is a function of LossInp",
    ):
        make_objective(other)
    with pytest.raises(
        ConfigError,
        match=r"^--loss nowhere:f: there is no module nowhere in the current directory, beside the",
    ):
        make_objective(parsed("--loss nowhere:f"))
    with pytest.raises(
        ConfigError,
        match=f"^--advantage-std has no part in --advantages {name}:advantages: only group, batch, ",
    ):
        parse_config(["--config", str(files / "c.yaml"), "--model-name", "m", "--advantage-std"])
