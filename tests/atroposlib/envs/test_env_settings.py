"""Flags, YAML and defaults: precedence, and one clear line for everything that is wrong."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline
from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.envs.runner.command_line import merge, parse_flags, read_config
from atroposlib.errors import UsageError


class TaskConfig(BaseEnvConfig):
    levels: list[int] = Field(default=[1])
    note: str = "plain"


SERVER = [APIServerConfig(base_url="http://one/v1", server_type="vllm")]


def settings(
    arguments: str = "",
    yaml_content: dict[str, Any] | None = None,
    servers: Any = SERVER,
    **defaults: Any,
) -> Any:
    return merge(
        TaskConfig(**defaults),
        servers,
        parse_flags(arguments.split(), TaskConfig),
        yaml_content or {},
    )


@given(
    default=st.integers(1, 99),
    in_yaml=st.none() | st.integers(1, 99),
    flag=st.none() | st.integers(1, 99),
)
def test_flags_win_over_yaml_and_yaml_over_defaults(
    default: int, in_yaml: int | None, flag: int | None
) -> None:
    arguments = f"--env.group_size {flag}" if flag else ""
    content = {"env": {"group_size": in_yaml}} if in_yaml else {}
    expected = flag or in_yaml or default
    assert settings(arguments, content, group_size=default).env.group_size == expected


def test_a_flag_that_repeats_the_default_still_wins_over_yaml() -> None:
    assert settings("--env.group_size 4", {"env": {"group_size": 9}}).env.group_size == 4


def test_what_a_command_changes_lies_between_defaults_and_yaml() -> None:
    changed = merge(TaskConfig(note="default"), SERVER, {}, {}, {"note": "command"})
    assert changed.env.note == "command"
    in_file = merge(
        TaskConfig(note="default"), SERVER, {}, {"env": {"note": "file"}}, {"note": "command"}
    )
    assert in_file.env.note == "file"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--env.group_size=8", "group_size", 8),
        ("--env.group-size 8", "group_size", 8),
        ("--env.use_wandb", "use_wandb", True),
        ("--env.use_wandb --env.group_size 2", "use_wandb", True),
        ("--env.use_wandb false", "use_wandb", False),
        ("--env.use_wandb=False", "use_wandb", False),
        ("--env.max_batches_offpolicy -1", "max_batches_offpolicy", -1),
        ("--env.wandb_name None", "wandb_name", None),
        ("--env.eval_handling LIMIT_TRAIN", "eval_handling", EvalHandlingEnum.LIMIT_TRAIN),
        ("--env.levels [1,3]", "levels", [1, 3]),
        ("--env.note 7", "note", "7"),
        ("--env.worker_timeout 1.5", "worker_timeout", 1.5),
    ],
)
def test_values_of_flags_get_the_fields_types(arguments: str, field: str, value: object) -> None:
    assert getattr(settings(arguments).env, field) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--env.group_sise 8", "unknown flag --env.group_sise (did you mean --env.group_size?)"),
        ("--group_size 8", "unknown flag --group_size (did you mean --env.group_size?)"),
        ("--openai.base_uri x", "did you mean --openai.base_url?"),
        ("--zzzz 1", "unknown flag --zzzz; --help"),
        ("--env.group_size", "--env.group_size: expected one argument"),
        ("--env.note --env.use_wandb", "--env.note: expected one argument"),
        ("train", "'train' is neither a command"),
        ("--env.group_size many", "--env.group_size 'many': "),
        ("--env.group_size 0", "--env.group_size 0: "),
        ("--env.worker_timeout nan", "--env.worker_timeout 'nan': Input should be a finite num"),
        ("--env.worker_timeout .inf", "--env.worker_timeout '.inf': "),
        ("--env.levels [1,x]", "--env.levels.1 'x': "),
        ("--openai.server_type hal", "--openai.server_type 'hal': "),
    ],
)
def test_wrong_flags_get_one_line_that_names_them(arguments: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        settings(arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"env": {"group_sise": 8}},
            "unknown key 'group_sise' in `env` of the YAML file (did you mean group_size?)",
        ),
        (
            {"openai": {"base_uri": "x"}},
            "unknown key 'base_uri' in `openai` of the YAML file (did you mean base_url?)",
        ),
        ({"openai": [{"base_url": "x"}, {"bse_url": "y"}]}, "unknown key 'bse_url'"),
        ({"environment": {}}, "unknown key 'environment' in the YAML file"),
        ({"env": [1]}, "`env` of the YAML file must hold keys and values"),
        ({"env": {"group_size": "many"}}, "--env.group_size 'many'"),
    ],
)
def test_wrong_yaml_gets_one_line_that_names_it(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"^.+$") as refusal:
        settings("", content)
    assert message in str(refusal.value)


def test_yaml_written_for_atropos_may_hold_what_does_not_exist_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own examples do: `weight` of a server, settings that no class has, a table for another
    trainer.
    """
    server = {"base_url": "http://one/v1", "model_name": "m", "weight": 1.0}
    content = {
        "env": {"group_size": 6, "start_tok_length": 4096},
        "openai": [server],
        "tinker": {"lora_rank": 32},
    }
    made = settings("", content)
    assert made.env.group_size == 6
    assert (
        "`env` of the YAML file has settings that do not exist, and they are ignored: start_tok_length"
        in caplog.text
    )
    assert (
        "`openai` of the YAML file has settings that do not exist, and they are ignored: weight"
        in caplog.text
    )


def test_yaml_file_faults(tmp_path: Path) -> None:
    broken, empty, scalar = (
        tmp_path / name for name in ("broken.yaml", "empty.yaml", "scalar.yaml")
    )
    broken.write_text("env: [")
    empty.write_text("")
    scalar.write_text("42")
    assert read_config(str(empty)) == {}
    for path in (broken, scalar, tmp_path / "missing.yaml"):
        with pytest.raises(UsageError, match=path.name):
            read_config(str(path))
    broken.write_text("env: {temperature: .nan}")
    with pytest.raises(UsageError, match=r"'\.nan' in line 1, column 20 is not a finite number"):
        read_config(str(broken))


@pytest.mark.parametrize(
    ("flags", "content", "message"),
    [
        ("", {"env": {"group_size": True}}, "--env.group_size True: a boolean is not a number"),
        ("--env.group_size yes", {}, "--env.group_size True: a boolean is not a number"),
        ("", {"openai": {"timeout": False}}, "--openai.timeout False: a boolean is not a number"),
        (
            "--env.max_batches_offpolicy true",
            {},
            "--env.max_batches_offpolicy True: a boolean is not a number",
        ),
    ],
)
def test_a_boolean_is_not_a_number(flags: str, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(flags, content)
    assert str(caught.value).startswith(message)


def test_server_settings_merge_field_by_field() -> None:
    merged = settings("--openai.timeout 7", {"openai": {"model_name": "m"}}).servers
    assert [(s.base_url, s.model_name, s.timeout, s.server_type) for s in merged] == [
        ("http://one/v1", "m", 7, "vllm")
    ]


def test_several_servers_come_from_yaml_and_exclude_flags() -> None:
    content = {"openai": [{"base_url": "http://a"}, {"base_url": "http://b"}]}
    assert [server.base_url for server in settings("", content).servers] == ["http://a", "http://b"]
    with pytest.raises(UsageError, match=r"--openai\.timeout: 2 servers are configured"):
        settings("--openai.timeout 7", content)


def test_several_default_servers_stay_as_they_are() -> None:
    two = [APIServerConfig(base_url="http://a"), APIServerConfig(base_url="http://b")]
    assert settings("", servers=two).servers == two


def test_a_bare_baseline_stays_unless_a_server_is_named() -> None:
    assert type(settings("", servers=ServerBaseline()).servers) is ServerBaseline
    named = settings("--openai.base_url http://x", servers=ServerBaseline(timeout=5)).servers
    assert [(server.base_url, server.timeout) for server in named] == [("http://x", 5)]


def test_manager_flags_work_with_and_without_namespace() -> None:
    assert settings("--testing").manager.testing
    assert settings("--server.max_n_completions 3").manager.max_n_completions == 3
    assert settings("", {"slurm": True}).manager.slurm
    assert settings("", {"server": {"slurm": True}}).manager.slurm


def test_python_code_may_name_settings_that_no_longer_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert BaseEnvConfig(group_size=3, long_gone=1).group_size == 3  # type: ignore[call-arg]
    assert "no setting named 'long_gone'" in caplog.text
