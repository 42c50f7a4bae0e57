"""The commands as classes, for programs that start an environment themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.envs.base import BaseEnv
from atroposlib.inference.client import ReasoningConfig


def write(path: str, told: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(told))


class Quiet(BaseEnv):
    """Asks no model."""

    name = "quiet"

    async def setup(self) -> None:
        self.ready = True

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        assert self.config.data_path_to_save_groups is not None
        told = {
            "ready": self.ready,
            "group_size": self.config.group_size,
            "max_n": self.server.max_n_completions,
        }
        write(self.config.data_path_to_save_groups, told)


def test_a_command_runs_with_the_fields_that_are_given(tmp_path: Path) -> None:
    command = Quiet.get_cli_evaluate_config_cls()
    path = str(tmp_path / "told.json")
    given = command(
        **{
            "env.group_size": 3,
            "env.data_path_to_save_groups": path,
            "env.use_wandb": False,
            "testing": True,
            "max_n_completions": 2,
        }
    )
    assert given.run() == 0  # type: ignore[attr-defined]
    assert json.loads(Path(path).read_text()) == {"ready": True, "group_size": 3, "max_n": 2}


def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (Quiet.get_cli_serve_config_cls(), Quiet.get_cli_process_config_cls()):
        with pytest.raises(ValidationError, match=r"env\.groupsize"):
            command(**{"env.groupsize": 3})
        assert command(**{"env.group_size": "many"}).run() == 2  # type: ignore[attr-defined]
        assert "error: --env.group_size 'many'" in capsys.readouterr().err


def test_an_effort_becomes_tokens_where_an_endpoint_takes_only_those() -> None:
    config = ReasoningConfig(effort="high")
    assert config.build_extra_body() == {"reasoning": {"enabled": True, "effort": "high"}}
    assert config.build_extra_body(use_max_tokens=True) == {
        "reasoning": {"enabled": True, "max_tokens": 25600}
    }
    assert ReasoningConfig(effort="low", max_tokens=2000).build_extra_body(use_max_tokens=True) == {
        "reasoning": {"enabled": True, "max_tokens": 2000}
    }
