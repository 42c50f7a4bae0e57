"""Options: every one of them a flag and a YAML key, flags win, and what is wrong is one line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from example_trainer.api_keys import SECRETS, revealed, without_secrets
from example_trainer.command_line import parse_config
from example_trainer.config import SECTIONS, TrainerConfig, flag_of
from example_trainer.errors import ConfigError
from tests.forked_commands import run_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_defaults() -> None:
    config = parse_config(["--model-name", "m"])
    assert (config.weight_bridge_mode, config.use_shared_memory, config.single_copy) == (
        "none",
        False,
        False,
    )
    assert (config.vllm_port, config.training_steps, config.batch_size, config.lr) == (
        9001,
        10,
        2,
        1e-5,
    )
    assert (str(config.save_path), config.gradient_accumulation_steps) == (
        "trained_model_checkpoints",
        32,
    )
    assert (config.atropos_url, config.bridge_timeout, config.service_timeout) == (
        "http://localhost:8000",
        120,
        300,
    )
    assert config.sequences_per_step == 64
    assert (config.vllm_restart_interval, config.starts_vllm, config.keep_optimizer_states) == (
        3,
        True,
        1,
    )


def test_when_vllm_is_restarted() -> None:
    def restarts(*flags: str) -> list[int]:
        config = parse_config(["--model-name", "m", *flags])
        return [step for step in range(12) if config.restarts_vllm_at(step)]

    assert restarts() == [3, 6, 9], "not after the last step, which is step 10"
    assert restarts("--vllm-restart-interval", "4", "--training-steps", "50") == [4, 8]
    assert restarts("--vllm-restart-interval", "0") == []
    assert restarts("--max-staleness", "2") == [2, 4, 6, 8], (
        "rollouts of older weights would be dropped"
    )
    assert restarts("--max-staleness", "0") == list(range(1, 10))
    assert restarts("--max-staleness", "7") == [3, 6, 9]
    assert restarts("--weight-bridge-mode", "shared_vllm") == []


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("2", 2), ("all", "all")])
def test_optimizer_states_are_kept_for_none_some_or_all(text: str, value: object) -> None:
    assert (
        parse_config(["--model-name", "m", "--keep-optimizer-states", text]).keep_optimizer_states
        == value
    )


@pytest.mark.parametrize(
    "command",
    [
        "--model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --vllm-port 9001 --lr 1e-6 --batch-size 4 "
        "--training-steps 100 --use-shared-memory",
        "--model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --single-copy --training-steps 100",
        "--model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode none --training-steps 100 --vllm-restart-interval 10 "
        "--batch-size 2 --lr 1e-5",
        "--model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only --lora-r 16 --lora-alpha 32 --training-steps 100 "
        "--batch-size 2 --lr 1e-4",
    ],
)
def test_the_documented_commands_are_understood(command: str) -> None:
    words = shlex.split(command)
    config = parse_config(words)
    given = {words[i] for i in range(len(words)) if words[i].startswith("--")}
    changed = {flag_of(name) for name in config.model_fields_set}
    assert changed == given


def test_every_field_is_a_flag_and_a_key(tmp_path: Path) -> None:
    values = {
        "model_name": "m", "dtype": "float32", "device": "cpu", "weight_bridge_mode": "none", "vllm_host": "h",
        "vllm_servers": ["a:1"], "weight_transfer": "direct", "parameter_servers": [], "push_every": 1,
        "vllm_api_key": "k", "vllm_restart_interval": 3, "vllm_command": "c", "vllm_gpus": "0,1", "vllm_args": "-x y",
        "lora_target_modules": ["q_proj", "up_proj"], "atropos_url": "http://x:1",
        "atropos_api_key": "s", "max_staleness": 3, "lr_schedule": "cosine", "num_threads": 2, "clip_eps": 0.1,
        "clip_eps_high": 0.3, "reference_model": "r", "loss_normalisation": "constant",
        "ranks": 2, "save_path": "p", "resume": "auto", "log_dir": "l",
        "wandb_project": "w", "wandb_group": "g", "metrics_host": "h", "profile": "3-5", "share_prefixes": True,
        "tokens_per_microbatch": 512, "logprob_chunk": 64, "loss": "dapo", "advantages": "leave_one_out",
        "advantage_std": False, "dual_clip": 3.5, "kl_in": "reward", "correction": "token_mask",
        "correction_low": 0.4, "correction_ratio": "now",
        "replay": "uniform",
        "sequence_kl_limit": 0.5, "truncated_answers": "penalise", "too_long": "drop", "forward_zero_advantages": True,
        "distill_in": "loss", "optimizer": "adamw-8bit", "optimizer_offload": True, "gradient_checkpointing": False,
    }  # fmt: skip
    for name, field in TrainerConfig.model_fields.items():
        if name not in values:
            default = field.get_default()
            values[name] = (
                (not default)
                if isinstance(default, bool)
                else default + (0 if name.startswith("beta") else 1)
            )
    values |= {
        "lora_dropout": 0.5,
        "beta1": 0.5,
        "beta2": 0.6,
        "single_copy": False,
        "colocate": False,
        "use_shared_memory": False,
        "deterministic": False,
    }
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(values))
    from_file = parse_config(["--config", str(tmp_path / "all.yaml")])
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else "--no-" + flag_of(name)[2:])
        elif value != []:
            words += [flag_of(name), *map(str, value if isinstance(value, list) else [value])]
    assert parse_config(words) == from_file
    secrets = {name: revealed(getattr(from_file, name)) for name in SECRETS}
    assert from_file.model_dump(mode="json") | secrets == values


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("", "auto"), ("--optimizer-offload", True), ("--optimizer-offload --lr 1", True), ("--no-optimizer-offload", False),
        ("--optimizer-offload off", False), ("--optimizer-offload=auto", "auto"), ("--optimizer-offload On", True),
    ],
)  # fmt: skip
def test_a_switch_is_a_bare_flag_too(words: str, setting: bool | str) -> None:
    assert parse_config(["--model-name", "m", *words.split()]).optimizer_offload == setting


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("on", True),
        ("off", False),
        ("true", True),
        ("'no'", False),
        ("no", False),
        ("'off'", False),
        ("auto", "auto"),
    ],
)
def test_a_switch_of_a_file_is_a_boolean_or_auto(
    text: str, setting: bool | str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(f"model_name: m\noptimizer_offload: {text}\n")
    assert parse_config(["--config", str(tmp_path / "c.yaml")]).optimizer_offload == setting


def test_help_has_each_option_in_one_section() -> None:
    names = [name for section in SECTIONS for name in section.model_fields]
    assert sorted(names) == sorted(TrainerConfig.model_fields)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("profile", "steps"), [(None, []), ("3", [3]), ("3-5", [3, 4, 5])])
def test_steps_to_profile(profile: str | None, steps: list[int]) -> None:
    words = ["--profile", profile] if profile else []
    assert list(parse_config(["--model-name", "m", *words]).profiled_steps) == steps


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model-name: m\nlr: 1.0e-3\ntraining_steps: 7\nuse_wandb: true\n"
    )
    config = parse_config(["--config", str(tmp_path / "c.yaml"), "--lr", "0.5", "--no-use-wandb"])
    assert (config.model_name, config.lr, config.training_steps, config.use_wandb) == (
        "m",
        0.5,
        7,
        False,
    )
    assert config.batch_size == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "model_name: m\ntraining_step: 3",
            "unknown key 'training_step' in {file}; did you mean training_steps?",
        ),
        ("model_name: m\nlr: fast", "lr in {file} 'fast': input should be a valid number"),
        ("- a\n- b", "--config {file} must hold options as 'name: value' lines, not list"),
        ("a: [", "--config {file} is not YAML: "),
        ("", "--model-name is required"),
        ("model_name: m\nlr: true", "lr in {file} True: a boolean is not a number"),
        ("model_name: m\nseed: yes", "seed in {file} True: a boolean is not a number"),
        ("model_name: m\nranks: on", "ranks in {file} True: give auto or a number from 1"),
        (
            "model_name: m\nnum_threads: off",
            "num_threads in {file} False: a boolean is not a number",
        ),
        (
            "model_name: m\nlr: 1\nlr: 2",
            "--config {file} is not YAML: key 'lr' stands twice, in lines 2 and 3",
        ),
        (
            "model-name: m\nmodel_name: n",
            "--config {file}: keys 'model-name' and 'model_name' are the same option",
        ),
    ],
)
def test_wrong_files_are_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(file)])
    assert str(caught.value).startswith(message.format(file=file))
    assert "\n" not in str(caught.value)


def given_by_flag(folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    return ["--vllm-api-key", "hush", "--atropos-api-key", "hush"]


def given_by_file(folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    (folder / "c.yaml").write_text("vllm_api_key: hush\natropos-api-key: hush\n")
    return ["--config", str(folder / "c.yaml")]


def given_by_variable(folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    environment.setenv("VLLM_API_KEY", "hush")
    environment.setenv("ROLLOUT_API_KEY", "hush")
    return []


@pytest.mark.parametrize("give", [given_by_flag, given_by_file, given_by_variable])
def test_secrets_stand_in_no_dump(
    give: Callable[[Path, pytest.MonkeyPatch], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config(["--model-name", "m", *give(tmp_path, monkeypatch)])
    assert (revealed(config.vllm_api_key), revealed(config.atropos_api_key)) == ("hush", "hush")
    shown = [
        config,
        repr(config),
        config.shareable,
        config.model_dump(),
        config.model_dump_json(),
        vars(config),
    ]
    assert [text for text in map(str, shown) if "hush" in text] == []
    assert config.shareable["model_name"] == "m"
    assert not {"vllm_api_key", "atropos_api_key"} & config.shareable.keys()


def test_flags_win_over_variables_and_an_empty_variable_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    monkeypatch.setenv("ROLLOUT_API_KEY", "")
    config = parse_config(["--model-name", "m", "--vllm-api-key", "mine"])
    assert revealed(config.vllm_api_key) == "mine"
    assert revealed(config.atropos_api_key) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("vllm_api_key: 4711", "vllm_api_key in {file}: input should be a valid string"),
        (
            "vllm_restart_interval: 5\nvllm_args: --api-key 4711",
            "vllm_args in {file}: all users can read --api-key in `ps`",
        ),
        (
            "vllm_restart_interval: 5\nvllm_command: serve --api-key=4711",
            "vllm_command in {file}: all users can read",
        ),
    ],
)
def test_messages_about_secrets_do_not_tell_them(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(f"model_name: m\n{content}\n")
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(tmp_path / "c.yaml")])
    assert str(caught.value).startswith(message.format(file=tmp_path / "c.yaml"))
    assert "4711" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--vllm-api-key", "hush", "--lr", "1"], ["--vllm-api-key", "…", "--lr", "1"]),
        (["--lr=1", "--atropos-api-key=hush=x"], ["--lr=1", "--atropos-api-key=…"]),
        (["--vllm-api-key"], ["--vllm-api-key"]),
    ],
)
def test_a_command_line_is_shown_without_secrets(words: list[str], shown: list[str]) -> None:
    assert without_secrets(words) == shown


def test_help_names_the_variables_and_not_what_they_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given_by_variable(Path(), monkeypatch)
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    said = capsys.readouterr().out
    assert "(default: $VLLM_API_KEY)" in " ".join(said.split())
    assert "hush" not in said


CONFIGS = sorted((ROOT / "example_trainer" / "configs").glob("*.yaml"))
SHIPPED = [file for file in CONFIGS if "orchestration:" not in file.read_text()]
"""The pages of whole runs have sections: tests/example_trainer/async_grpo."""


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_the_shipped_configs_are_valid(file: Path) -> None:
    assert parse_config(["--config", str(file)]).model_name


def test_the_script_ends_with_status_2_and_one_line() -> None:
    command = [sys.executable, str(ROOT / "example_trainer" / "grpo.py"), "--modle-name", "m"]
    done = run_command(command)
    assert done.returncode == 2
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ERROR ")
    assert lines[0].endswith("unknown flag --modle-name; did you mean --model-name?")


def test_help_lists_every_option() -> None:
    command = [sys.executable, str(ROOT / "example_trainer" / "grpo.py"), "--help"]
    done = run_command(command)
    assert done.returncode == 0, done.stdout
    assert [name for name in TrainerConfig.model_fields if flag_of(name) not in done.stdout] == []
