"""The configuration of an asynchronous run: four sections of a YAML file; `training` takes
every key of grpo.py.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from example_trainer.api_keys import SECRETS
from example_trainer.command_line import checked_config, read_config, with_underscores
from example_trainer.config import Section, TrainerConfig
from example_trainer.errors import ConfigError

DRIVER_SETS = {
    "vllm_host": "orchestration.generators",
    "vllm_port": "orchestration.generators",
    "vllm_servers": "orchestration.generators",
    "vllm_restart_interval": "orchestration.generators",
    "vllm_command": "orchestration.generators",
    "vllm_args": "inference.server_args",
    "vllm_gpus": "inference.tensor_parallel_size",
    "parameter_servers": "orchestration.parameter_servers",
    "ranks": "orchestration.trainer_ranks",
    "ref_logprobs_from_workers": "orchestration.reference_workers",
    "atropos_url": "the place that the service gets",
    "resume": "the newest checkpoint in save_path, always",
    "log_dir": "logging.folder",
}
"""Options of the trainer that follow from the rest -> what decides them."""


def words(value: Any) -> Any:
    """Flags as a shell would split them; a list as it is."""
    return shlex.split(value) if isinstance(value, str) else value


class Orchestration(Section):
    """Number of each role, its resources, and the rules for its restarts."""

    generators: int = Field(1, ge=1, description="vLLM servers, each with environments of its own")
    environments_per_generator: int = Field(
        1, ge=1, description="environment processes that use one server"
    )
    reference_workers: int = Field(
        0, ge=0, description="processes that add ref_logprobs; 0: the trainer computes its own"
    )
    parameter_servers: int = Field(
        0, ge=0, description="processes between trainer and generators; 0: the trainer broadcasts"
    )
    trainer_ranks: int = Field(
        1,
        ge=1,
        description="processes of the trainer, one a GPU, on one node; on CPUs they share trainer_cpus",
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps; not given: training.training_steps"
    )
    buffer_groups: int | None = Field(
        None,
        ge=1,
        description="groups that the rollout service holds at most; not given: its own bound",
    )
    device: Literal["gpu", "cpu"] = Field(
        "gpu", description="what all but service and environments compute on"
    )
    service_cpus: float = Field(1.0, ge=0, description="CPUs that the rollout service asks of Ray")
    generator_cpus: float = Field(4.0, ge=0, description="CPUs of a vLLM server")
    environment_cpus: float = Field(1.0, ge=0, description="CPUs of an environment process")
    reference_cpus: float = Field(2.0, ge=0, description="CPUs of a reference worker")
    parameter_server_cpus: float = Field(2.0, ge=0, description="CPUs of a parameter server")
    parameter_server_gpus: int = Field(
        1,
        ge=0,
        le=1,
        description="GPUs of a parameter server, with device gpu; 0: the weights are in the host's memory",
    )
    trainer_cpus: float = Field(4.0, ge=0, description="CPUs of the trainer, all ranks together")
    start_seconds: float = Field(
        900.0, gt=0, description="seconds that a role may take to be placed, to load and to answer"
    )
    proven_seconds: float = Field(
        60.0,
        gt=0,
        description="a process that ends with an error sooner than this, the first time, ends the run: it would again",
    )
    restarts: int = Field(
        6, ge=0, description="restarts of one role in a row; one more failure ends the run"
    )
    restart_delay: float = Field(
        1.0, gt=0, description="seconds before the first restart; doubles up to a minute"
    )
    steady_seconds: float = Field(
        300.0, gt=0, description="a role that has run for so long begins a new row of restarts"
    )
    silent_seconds: float = Field(
        300.0,
        ge=0,
        description="service, parameter server, environment or reference worker that runs and is silent for so long is started "
        "again; 0: never",
    )
    exact_resume: bool = Field(
        False,
        description="a run that is killed and started again learns to the bit what it would have learned otherwise",
    )


class Inference(Section):
    """The generators: one vLLM server each, with its environments."""

    environment: str = Field(
        "gsm8k", min_length=1, description="arithmetic, gsm8k, or an environment's file"
    )
    environment_args: list[str] = Field([], description="further flags of each environment")
    dataset_path: str | None = Field(
        None, description="folder or file of the environment's problems (gsm8k)"
    )
    group_size: int = Field(8, ge=1, description="answers to one problem")
    max_response_tokens: int | None = Field(
        None, ge=1, description="longest answer; not given: the environment's own bound"
    )
    max_model_length: int | None = Field(
        None, ge=2, description="longest sequence of the server; not given: the model's"
    )
    max_sequences: int | None = Field(
        None, ge=1, description="answers that one server samples at once; not given: vLLM's bound"
    )
    max_batches_ahead: int | None = Field(
        None,
        ge=0,
        description="batches queued or in work at most; not given: the environment's bound",
    )
    temperature: float | None = Field(
        None, gt=0, le=2, description="the trainer's --temperature, which environments sample at"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one server, all of one node")
    dtype: str | None = Field(
        None, description="of the server; not given: bfloat16 on GPUs, float32 on CPUs"
    )
    seed: int | None = Field(
        None, ge=0, description="of environments and servers; each gets one of its own from it"
    )
    server_args: list[str] = Field([], description="further flags of each vLLM server")
    weight_sync_every: int | None = Field(
        None,
        ge=1,
        description="versions that a server may be behind before a parameter server updates it",
    )

    @field_validator("environment_args", "server_args", mode="before")
    @classmethod
    def _as_a_shell(cls, value: Any) -> Any:
        return words(value)

    @field_validator("environment_args", "server_args")
    @classmethod
    def _no_key(cls, value: list[str]) -> list[str]:
        if any("api-key" in word.split("=")[0].replace("_", "-") for word in value):
            raise ValueError(
                "all users can read a key in `ps`; leave it out: every run has keys of its own"
            )
        return value


class Logging(Section):
    """Output of a run, and where it goes."""

    folder: Path = Field(
        Path("runs/async"),
        description="of logs, checkpoints and the service's store; best on a common disk",
    )
    dashboard: bool = Field(False, description="start Ray's dashboard, where this run starts Ray")
    timeline: bool = Field(
        True,
        description="write when each role worked, waited and synced (timeline-*.jsonl in the folder)",
    )


class Settings(Section):
    """All settings of an asynchronous run."""

    orchestration: Orchestration = Field(default_factory=lambda: Orchestration.model_validate({}))
    inference: Inference = Field(default_factory=lambda: Inference.model_validate({}))
    training: dict[str, Any]
    logging: Logging = Field(default_factory=lambda: Logging.model_validate({}))

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        asked = self.orchestration
        if self.inference.tensor_parallel_size > 1 and asked.device == "cpu":
            raise ValueError(
                f"inference.tensor_parallel_size {self.inference.tensor_parallel_size} needs orchestration.device gpu"
            )
        if self.training.get("deterministic") and asked.device == "cpu":
            raise ValueError(
                "training.deterministic needs orchestration.device gpu: vLLM has no kernels on a CPU that the trainer "
                "could share; leave it out"
            )
        if self.inference.weight_sync_every and not asked.parameter_servers:
            raise ValueError(
                "inference.weight_sync_every needs orchestration.parameter_servers: without, every update is sent"
            )
        if self.shares_gpus and (asked.generators > 1 or asked.parameter_servers):
            raise ValueError(
                "training.colocate and single_copy are for one generator, without parameter servers"
            )
        if self.shares_gpus and asked.trainer_ranks != self.inference.tensor_parallel_size:
            raise ValueError(
                f"with one copy of the weights orchestration.trainer_ranks {asked.trainer_ranks} and "
                f"inference.tensor_parallel_size {self.inference.tensor_parallel_size} must be equal"
            )
        return self

    @model_validator(mode="after")
    def _resumed_exactly(self) -> Settings:
        if self.orchestration.exact_resume and (why := inexact(self)):
            raise ValueError(f"orchestration.exact_resume {why}")
        return self

    @property
    def shares_gpus(self) -> bool:
        """Return whether trainer and generator hold one copy of the weights, on the same GPUs."""
        return bool(self.training.get("colocate") or self.training.get("single_copy"))

    @property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return self.logging.folder.expanduser().absolute()

    @property
    def model(self) -> str:
        """The model that is trained."""
        return str(self.training["model_name"])

    @property
    def trainer_values(self) -> dict[str, Any]:
        """Values of the trainer's options, but for addresses."""
        values = dict(self.training)
        asked = self.orchestration
        if asked.steps is not None:
            values["training_steps"] = asked.steps
        if self.inference.temperature is not None:
            values["temperature"] = self.inference.temperature
        if not self.shares_gpus and "weight_bridge_mode" not in values:
            if asked.parameter_servers:
                values["weight_bridge_mode"] = "parameter_server"
            else:
                values |= {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True}
        if asked.reference_workers:
            values["ref_logprobs_from_workers"] = True
        if asked.exact_resume:
            values["max_staleness"] = 0
            if asked.device == "cpu":
                values["num_threads"] = 1
        values.setdefault("save_path", str(self.folder / "checkpoints"))
        values["log_dir"] = str(self.folder / "trainer")
        return values


def inexact(settings: Settings) -> str | None:
    """Return the setting that keeps a run from being resumed to the bit, with the remedy; None if
    there is none.
    """
    asked, training, sequences = (
        settings.orchestration,
        settings.training,
        settings.inference.max_sequences,
    )
    several = ("generators", "environments_per_generator", "trainer_ranks")
    others = ("reference_workers", "parameter_servers")
    for name, most in {**dict.fromkeys(several, 1), **dict.fromkeys(others, 0)}.items():
        if getattr(asked, name) > most:
            return (
                "is for one generator with one environment, and one trainer process that sends "
                f"it the weights itself. With orchestration.{name} {getattr(asked, name)} time "
                f"decides what is computed with what; give {most}"
            )
    for name, value in (("max_staleness", 0), ("replay", "fifo"), ("max_reuse", 1)):
        if training.get(name, value) not in (value, None):
            return f"needs training.{name} {value}, which is {training[name]}: leave it out"
    if asked.device == "gpu":
        if training.get("deterministic"):
            return None
        return "needs training.deterministic on GPUs: without it the same seed gives other tokens"
    for name, given in (
        ("inference.max_sequences", sequences),
        ("training.num_threads", training.get("num_threads")),
    ):
        if given not in (1, None):
            return f"needs {name} 1 on CPUs, where a sum depends on what is computed beside it, and it is {given}: leave it out"
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or what to look at."""
    for match in difflib.get_close_matches(name, list(known), n=1, cutoff=0.5):
        return f"; did you mean {match}?"
    return f"; there are {', '.join(sorted(known))}"


def check_keys(values: Mapping[str, Any], file: Path) -> None:
    """Refuse a key that does not exist, with the nearest one that does.

    Raises:
        ConfigError: there is such a key, or a section is none.
    """
    sections: dict[str, type[BaseModel]] = {
        "orchestration": Orchestration,
        "inference": Inference,
        "training": TrainerConfig,
        "logging": Logging,
    }
    for name, section in values.items():
        if name not in sections:
            raise ConfigError(f"unknown section {name!r} in {file}{nearest(name, sections)}")
        if not isinstance(section, dict):
            raise ConfigError(
                f"{name} in {file} must hold 'name: value' lines, not {type(section).__name__}"
            )
        for key in section:
            if key not in sections[name].model_fields:
                near = difflib.get_close_matches(
                    str(key), sections[name].model_fields, n=1, cutoff=0.5
                )
                elsewhere = [other for other, kind in sections.items() if key in kind.model_fields]
                hint = f"see docs/async.md for the keys of {name}"
                if elsewhere:
                    hint = f"it belongs to {elsewhere[0]}"
                elif near:
                    hint = f"did you mean {near[0]}?"
                raise ConfigError(f"unknown key {key!r} under {name} in {file}; {hint}")


def read_settings(file: Path) -> Settings:
    """Read and check a configuration.

    Raises:
        ConfigError: it cannot be read, a key does not exist or belongs elsewhere, or a value does
            not fit; a single line.
    """
    content = read_config(file)
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {file} must hold sections (orchestration, inference, training, logging)"
        )
    values = {
        str(name): with_underscores(section, file) if isinstance(section, dict) else section
        for name, section in content.items()
    }
    return make_settings(values, file)


def make_settings(values: Mapping[str, Any], file: Path) -> Settings:
    """Check sections that were read; see read_settings."""
    check_keys(values, file)
    training = values.get("training") or {}
    if "model_name" not in training:
        raise ConfigError(
            f"training in {file} needs model_name: a checkpoint's folder or a Hugging Face name"
        )
    for key in training:
        if key in SECRETS:
            raise ConfigError(
                f"{key} in {file}: each reader of the file has the key; set {SECRETS[key]} for the "
                "driver instead"
            )
        if key in DRIVER_SETS:
            raise ConfigError(
                f"{key} under training in {file} follows from {DRIVER_SETS[key]}; leave it out"
            )
    for name, other in (
        ("training_steps", "orchestration.steps"),
        ("temperature", "inference.temperature"),
    ):
        section, key = other.split(".")
        given = (values.get(section) or {}).get(key)
        if given is not None and training.get(name, given) != given:
            raise ConfigError(
                f"training.{name} {training[name]} and {other} {given} in {file} are one thing; give one of them"
            )
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, file)) from error
    check_trainer(settings, file)
    return settings


def check_trainer(settings: Settings, file: Path) -> TrainerConfig:
    """The trainer's options, checked as grpo.py would, without addresses that only the cluster
    knows.
    """
    unknown = [key for key in settings.trainer_values if key not in TrainerConfig.model_fields]
    if unknown:  # one that this release's trainer does not have yet
        raise ConfigError(
            f"{unknown[0]} is not an option of this trainer: leave out what needs it in {file}"
        )
    values = settings.trainer_values
    if settings.orchestration.parameter_servers:
        values["parameter_servers"] = ["localhost:1"]
    return checked_config(values, (), file)


def _one_line(error: ValidationError, file: Path) -> str:
    problems = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if place:
            message = f"{place} in {file} {item['input']!r}: {message[0].lower()}{message[1:]}"
        problems.append(message)
    return "; ".join(problems)
