"""The configuration of asynchronous runs: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from example_trainer.async_grpo.settings import Settings, make_settings, read_settings
from example_trainer.errors import ConfigError
from tests.conftest import ROOT

CONFIGS = [
    path
    for path in sorted((ROOT / "example_trainer" / "configs").glob("*.yaml"))
    if "orchestration:" in path.read_text()
]


def settings(**sections: dict[str, Any]) -> Settings:
    values = {"training": {"model_name": "assets/starter_model"}} | sections
    return make_settings(values, Path("x.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.name)
def test_the_configurations_that_we_ship_are_good(file: Path) -> None:
    assert read_settings(file).trainer_values["training_steps"] >= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("orchestratoin: {}", "unknown section 'orchestratoin' in .*; did you mean orchestration?"),
        (
            "orchestration: {generatrs: 2}",
            "unknown key 'generatrs' under orchestration in .*; did you mean generators?",
        ),
        (
            "training: {model_name: m, bach-size: 2}",
            "unknown key 'bach_size' under training .*; did you mean batch_size?",
        ),
        ("inference: {lr: 1.0}", "unknown key 'lr' under inference in .*; it belongs to training"),
        ("orchestration: 3", "orchestration in .* must hold 'name: value' lines, not int"),
        ("[1]", "must hold sections"),
        ("a: [", "is not YAML"),
        ("orchestration: {}", "training in .* needs model_name"),
        (
            "training: {model_name: m, vllm_servers: a:1}",
            "vllm_servers under .* follows from orchestration.generators",
        ),
        (
            "training: {model_name: m, vllm_api_key: k}",
            "each reader of the file has the key; set VLLM_API_KEY",
        ),
        ("training: {model_name: m, lr: -1}", "lr in .* -1: input should be greater"),
        (
            "training: {model_name: m}\norchestration: {generators: 0}",
            "orchestration.generators in .* 0: input should be",
        ),
        (
            "training: {model_name: m, training_steps: 3}\norchestration: {steps: 4}",
            "training.training_steps 3 and .* are one",
        ),
        ("training: {model_name: m, lr: true}", "lr in .* True: a boolean is not a number"),
        (
            "training: {model_name: m}\norchestration: {generators: yes}",
            "orchestration.generators in .* True: a boolean",
        ),
        (
            "training: {model_name: m}\ntraining: {model_name: n}",
            "key 'training' stands twice, in lines 1 and 2",
        ),
        (
            "training: {model_name: m, batch-size: 2, batch_size: 4}",
            "'batch-size' and 'batch_size' are the same option",
        ),
        (
            "training: {model_name: m, colocate: true}\norchestration: {generators: 2}",
            "are for one generator",
        ),
        (
            "training: {model_name: m}\ninference: {weight_sync_every: 2}",
            "needs orchestration.parameter_servers",
        ),
        (
            "training: {model_name: m}\ninference: {server_args: --api-key x}",
            "all users can read a key in `ps`",
        ),
        (
            "training: {model_name: m}\norchestration: {device: cpu}\ninference: {tensor_parallel_size: 2}",
            "tensor_parallel_size 2 needs orchestration.device gpu",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_settings(file)
    assert "\n" not in str(caught.value)


EXACT = {"device": "cpu", "exact_resume": True}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"orchestration": EXACT | {"generators": 2}},
            "With orchestration.generators 2 time decides .*; give 1",
        ),
        (
            {"orchestration": EXACT | {"environments_per_generator": 3}},
            "environments_per_generator 3 .*; give 1",
        ),
        ({"orchestration": EXACT | {"trainer_ranks": 2}}, "trainer_ranks 2 .*; give 1"),
        ({"orchestration": EXACT | {"reference_workers": 1}}, "reference_workers 1 .*; give 0"),
        ({"orchestration": EXACT | {"parameter_servers": 1}}, "parameter_servers 1 .*; give 0"),
        (
            {"training": {"max_staleness": 2}},
            "needs training.max_staleness 0, which is 2: leave it out",
        ),
        (
            {"training": {"replay": "recent"}},
            "needs training.replay fifo, which is recent: leave it out",
        ),
        ({"training": {"max_reuse": 2}}, "needs training.max_reuse 1, which is 2: leave it out"),
        (
            {"training": {"num_threads": 2}},
            "needs training.num_threads 1 on CPUs, .* it is 2: leave it out",
        ),
        (
            {"inference": {"max_sequences": 8}},
            "needs inference.max_sequences 1 on CPUs, .* it is 8: leave it out",
        ),
        ({"orchestration": {"exact_resume": True}}, "needs training.deterministic on GPUs"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_refused(
    sections: dict[str, dict[str, Any]], says: str
) -> None:
    values = {"orchestration": EXACT} | sections
    values["training"] = {"model_name": "m"} | sections.get("training", {})
    with pytest.raises(ConfigError, match=f"^orchestration.exact_resume .*{says}"):
        make_settings(values, Path("x.yaml"))


def test_deterministic_mode_on_cpus_is_refused_before_anything_starts() -> None:
    training = {"model_name": "m", "deterministic": True}
    with pytest.raises(ConfigError, match=r"training.deterministic needs .* gpu.*; leave it out"):
        settings(orchestration={"device": "cpu"}, training=training)
    servers = {"device": "gpu", "generators": 2, "parameter_servers": 1}
    values = settings(orchestration=servers, training=training).trainer_values
    assert (values["weight_bridge_mode"], values["deterministic"]) == ("parameter_server", True)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read --config .*none.yaml: No such file"):
        read_settings(tmp_path / "none.yaml")


def test_the_trainer_gets_what_follows_from_the_rest() -> None:
    made = settings(
        orchestration={"steps": 7}, inference={"temperature": 0.5}, logging={"folder": "/tmp/run"}
    ).trainer_values
    assert (made["training_steps"], made["temperature"]) == (7, 0.5)
    assert (made["weight_bridge_mode"], made["use_shared_memory"]) == ("shared_vllm", True)
    assert (made["save_path"], made["log_dir"]) == ("/tmp/run/checkpoints", "/tmp/run/trainer")
    shared = settings(training={"model_name": "m", "colocate": True}).trainer_values
    assert "use_shared_memory" not in shared


def test_every_option_of_the_trainer_may_be_given() -> None:
    given = {
        "model_name": "m",
        "kl_coef": 0.1,
        "loss": "dapo",
        "ppo_epochs": 2,
        "minibatches": 2,
        "save_path": "/tmp/x",
    }
    try:
        made = settings(training=given)
    except ConfigError as error:  # names of losses may change
        pytest.fail(str(error))
    assert made.trainer_values["save_path"] == "/tmp/x"
    assert yaml.safe_load(yaml.safe_dump(dict(made.training))) == given
