"""The quick start's command line: what it takes, and one clear line for what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from environments.arithmetic_server import MAX_HELD_OUT, OPERAND_DIGITS
from environments.calculator_server import LEVELS as CALCULATOR_LEVELS
from example_trainer.launcher.command_line import ROOT, LauncherError
from example_trainer.launcher.quickstart import options
from example_trainer.launcher.quickstart.options import choose_bridge, parse
from example_trainer.launcher.starter_models import CALCULATOR_MODEL, STARTER_MODEL


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_defaults(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "visible_gpus", lambda: ())
    monkeypatch.setenv("LOCKSTEP_SECONDS_SETUP", "7")
    parsed = parse(["--model", model])
    assert (parsed.bridge, parsed.device, parsed.seconds_setup) == ("broadcast", "cpu", 7.0)
    assert parsed.eval_size >= 200
    assert (parsed.environment, parsed.output) == ("arithmetic", ROOT / "runs" / "quickstart")
    assert (parsed.steps, parsed.lr) == (
        options.STEPS["arithmetic"],
        options.LEARNING_RATES["arithmetic"],
    )


def test_each_environment_has_its_own_defaults_and_help_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parsed = parse(["--cpu", "--environment", "calculator"])
    assert (parsed.steps, parsed.lr) == (
        options.STEPS["calculator"],
        options.LEARNING_RATES["calculator"],
    )
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"(default: {options.LEARNING_RATES['arithmetic']:g} for arithmetic" in text


def test_everything_given(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--bridge single-copy --steps 5 --cpu --lr 0 --seed 3 --difficulty 3,1 --eval-size 200 --output out --model model"
    parsed = parse(line.split())
    assert (parsed.bridge, parsed.steps, parsed.lr, parsed.seed) == ("single-copy", 5, 0.0, 3)
    assert parsed.difficulty == (1, 3)
    assert parsed.output == tmp_path / "out"
    assert parsed.model == model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stepz", "5"], ["--stepz"]),
        (["--steps", "0"], ["--steps", "'0'", "at least 1"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--lr", "-1"], ["--lr", "'-1'"]),
        (["--lr", "nan"], ["--lr", "'nan'"]),
        (["--seed", "1.5"], ["--seed", "'1.5'"]),
        (["--seed", str(2**31)], ["--seed", str(2**31 - 1)]),
        (["--bridge", "pigeon"], ["--bridge", "pigeon", "broadcast", "single-copy"]),
        (["--environment", "chess"], ["--environment", "chess", "arithmetic", "calculator"]),
        (["--difficulty", "1,0"], ["--difficulty", "'1,0'"]),
        (["--gpu", "--cpu"], ["--gpu", "--cpu", "not allowed"]),
        (["--eval-size", "0"], ["--eval-size"]),
        (["--eval-size", "1001"], ["--eval-size", "1000"]),
        (["extra"], ["extra"]),
    ],
)
def test_bad_values_are_named_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize("given", ["/no/such/folder", "./nowhere", "no-such-model", "a/b/c"])
def test_a_model_that_cannot_exist_is_refused(given: str) -> None:
    with pytest.raises(LauncherError, match=f"--model {given}: no such folder"):
        parse(["--cpu", "--model", given])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"has no config\.json"):
        parse(["--cpu", "--model", str(tmp_path)])


def test_the_limits_are_the_environments() -> None:
    assert options.MOST_EVAL_PROBLEMS == MAX_HELD_OUT
    assert {
        "arithmetic": max(OPERAND_DIGITS),
        "calculator": max(CALCULATOR_LEVELS),
    } == options.LEVELS


def test_each_environment_has_levels_and_a_folder_of_its_own(model: str) -> None:
    parsed = parse(["--cpu", "--model", model, "--environment", "calculator", "--difficulty", "4"])
    assert (parsed.environment, parsed.difficulty) == ("calculator", (4,))
    assert (parsed.output, parsed.steps) == (
        ROOT / "runs" / "calculator",
        options.STEPS["calculator"],
    )
    taught = parse(["--cpu", "--environment", "calculator"])
    assert (taught.model, parse(["--cpu"]).model) == (str(CALCULATOR_MODEL), str(STARTER_MODEL))
    with pytest.raises(
        LauncherError, match="--difficulty 1,4: the levels of --environment arithmetic are 1 to 3"
    ):
        parse(["--cpu", "--model", model, "--difficulty", "1,4"])


def test_a_hub_name_passes() -> None:
    assert parse(["--cpu", "--model", "Qwen/Qwen3-0.6B"]).model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("asked", "gpus", "chosen"),
    [
        (None, (), "broadcast"),
        (None, (0,), "single-copy"),
        (None, (0, 1), "broadcast"),
        ("single-copy", (), "single-copy"),
        ("broadcast", (), "broadcast"),
        ("single-copy", (2, 3), "single-copy"),
    ],
)
def test_the_bridge_follows_the_gpus(asked: str | None, gpus: tuple[int, ...], chosen: str) -> None:
    assert choose_bridge(asked, gpus) == chosen


def test_broadcast_on_one_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(LauncherError, match="use --bridge single-copy"):
        choose_bridge("broadcast", (0,))


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "nvidia-smi"
    listing.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-bb)'\n"
    )
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert options.visible_gpus() == (0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert options.visible_gpus() == (1,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert options.visible_gpus() == ()
    listing.write_text("#!/bin/sh\nexit 9\n")
    assert options.visible_gpus() == ()


def test_the_script_refuses_before_it_sets_anything_up(tmp_path: Path) -> None:
    """A typing mistake must not cost the minutes of a first installation."""
    done = subprocess.run(
        [ROOT / "scripts" / "quickstart.sh", "--no-such-option"],
        env={
            **os.environ,
            "LOCKSTEP_VENV": str(tmp_path / "venv"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--no-such-option" in done.stderr
    assert not (tmp_path / "venv").exists()
