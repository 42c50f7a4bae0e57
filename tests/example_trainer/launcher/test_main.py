"""The command line behind scripts/start.sh, status.sh, logs.sh, restart.sh and stop.sh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer.launcher import __main__ as command
from example_trainer.launcher.command_line import ROOT

CONFIG = str(ROOT / "example_trainer" / "configs" / "arithmetic_async_cpu.yaml")


class Replaced(Exception):
    """Stands for the end of this process's program."""


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--ray"], ["--config", CONFIG]),
        (["--steps", "3", "--ray"], ["--config", CONFIG, "--steps", "3"]),
        (["--ray", "--config", "a.yaml"], ["--config", "a.yaml"]),
        (["--ray", "--config=a.yaml"], ["--config=a.yaml"]),
    ],
)
def test_a_run_on_ray_gets_every_other_word(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], words: list[str]
) -> None:
    def replace(program: str, arguments: list[str], variables: dict[str, str]) -> None:
        assert program == sys.executable
        assert arguments == [sys.executable, "-m", "example_trainer.async_grpo", *words]
        assert variables["PYTHONPATH"].split(":") == [str(ROOT), "/elsewhere"]
        raise Replaced

    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr("os.execve", replace)
    with pytest.raises(Replaced):
        command.start(typed)
    assert Path(CONFIG).is_file()


@pytest.mark.parametrize("name", command.COMMANDS)
def test_a_shell_command_without_an_installation_names_the_remedy(
    name: str, tmp_path: Path
) -> None:
    script = [ROOT / "scripts" / f"{name}.sh"]
    done = subprocess.run(
        script,
        env={"PATH": "/usr/bin:/bin", "LOCKSTEP_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert (
        done.stderr == f"{name}: {tmp_path}/bin/python is not there: run scripts/setup.sh first\n"
    )
