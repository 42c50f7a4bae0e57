"""What a run leaves behind: checkpoints and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from atroposlib.web.addresses import ListeningHost
from example_trainer.options.section import Section


class CheckpointOptions(Section):
    """Checkpoints"""

    save_path: Path = Field(
        Path("trained_model_checkpoints"), description="folder of the checkpoints"
    )
    checkpoint_interval: int = Field(
        10, ge=0, description="steps between checkpoints; 0: only after the last one"
    )
    keep_checkpoints: int = Field(
        0, ge=0, description="newest checkpoints of the run that are kept at all; 0: all"
    )
    keep_optimizer_states: int | Literal["all"] = Field(
        1,
        description="newest checkpoints that keep their optimizer state; 0: none does; all: every one does",
    )
    resume: str | None = Field(
        None,
        description="auto (the newest run in save-path, from its newest checkpoint; else a new run) or a step_N folder",
    )

    @field_validator("keep_optimizer_states", mode="before")
    @classmethod
    def _all_or_a_number(cls, value: Any) -> Any:
        if value == "all" or (not isinstance(value, bool) and str(value).isdigit()):
            return value if value == "all" else int(value)
        raise ValueError("give 0 or more, or all")


class OutputOptions(Section):
    """Output"""

    log_dir: Path = Field(
        Path("runs/grpo"), description="folder of metrics.jsonl and the TensorBoard logs"
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="serve the figures of the last step to Prometheus; 0: do not"
    )
    report_sequences: int = Field(
        8,
        ge=0,
        le=1024,
        description="sequences of each step whose tokens' logprobs, entropies and advantages are sent to the rollout service "
        "for its page; 0: none",
    )
    metrics_host: ListeningHost = Field(
        "127.0.0.1", description="address on which they are served, without a key; 0.0.0.0 for all"
    )
    profile: str | None = Field(
        None,
        pattern=r"^\d+(-\d+)?$",
        description="steps (3, or 3-5) whose trace torch's profiler writes into log-dir/profile",
    )
    memory_snapshot: bool = Field(
        False,
        description="write the history of GPU memory into log-dir/profile at the end, and when memory runs out",
    )
    use_wandb: bool = Field(False, description="log to Weights & Biases as well")
    wandb_project: str = Field("lockstep", description="W&B project, also of the environments")
    wandb_group: str | None = Field(
        None, description="W&B group, also of the environments; not given: grpo-<model>"
    )

    @field_validator("profile")
    @classmethod
    def _ascending_steps(cls, value: str | None) -> str | None:
        steps = _step_range(value)
        if value is not None and not steps:
            raise ValueError("no step lies in it; steps are counted from 1, as in 3 or 3-5")
        return value

    @property
    def profiled_steps(self) -> range:
        """The steps to profile, counted from 1 as in the log; empty for none."""
        return _step_range(self.profile)


def _step_range(value: str | None) -> range:
    if value is None:
        return range(0)
    first, _, last = value.partition("-")
    begin = int(first)
    return range(begin, int(last or first) + 1) if begin else range(0)
