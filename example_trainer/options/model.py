"""What is trained, and how it is laid out over ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from example_trainer.models.lora.settings import parse_targets
from example_trainer.options.section import Section, split_commas

SWITCH_WORDS = {word: True for word in ("on", "yes", "true", "1")} | {
    word: False for word in ("off", "no", "false", "0")
}


def _switch(value: Any) -> Any:
    word = str(value).lower()
    if word != "auto" and word not in SWITCH_WORDS:
        raise ValueError("give auto, on or off")
    return SWITCH_WORDS.get(word, word)


Switch = Annotated[Literal["auto"] | bool, BeforeValidator(_switch)]
"""True, False or "auto". As a flag: `--name` is on, `--no-name` is off, and `--name VALUE` is auto,
on or off."""


class ModelOptions(Section):
    """Model"""

    model_name: str = Field(
        min_length=1, description="Hugging Face model id, or a folder that holds a checkpoint"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of the weights, not float16; auto: the server's, else the checkpoint's (float32 on a CPU), and "
        "bfloat16 in place of float16",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    num_threads: int | None = Field(
        None, ge=1, description="torch's CPU threads; not given: torch decides"
    )
    seed: int = Field(0, ge=0, description="seed of torch's random numbers")
    deterministic: bool = Field(
        False,
        description="run vLLM's own kernels, and stop at the first token whose logprob differs from vLLM's in a bit",
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="recompute activations in the backward pass to save memory; not given: if it does not fit otherwise",
    )
    skip_memory_check: bool = Field(
        False, description="load the model even if the memory plan says that it does not fit"
    )


class LoraOptions(Section):
    """Adapters"""

    lora_r: int = Field(16, ge=1, description="lora_only: rank of the adapters")
    lora_alpha: float = Field(
        32.0, gt=0, description="lora_only: scale of the adapters, divided by the rank"
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="lora_only: share of the adapters' inputs that are dropped"
    )
    lora_target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="lora_only: projections that get an adapter; all-linear: every one",
    )

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _split_targets(cls, value: Any) -> Any:
        return split_commas(value)

    @field_validator("lora_target_modules")
    @classmethod
    def _known_projections(cls, value: list[str]) -> list[str]:
        return list(parse_targets(value))


class ParallelOptions(Section):
    """Several ranks"""

    ranks: int | Literal["auto"] = Field(
        "auto",
        description="processes of this trainer, which it starts itself; auto: one for each GPU that it sees, for each rank of "
        "vLLM with --single-copy, and one on a CPU",
    )
    rank_timeout: float = Field(
        600.0, gt=0, description="seconds that the ranks wait for each other"
    )

    @field_validator("ranks", mode="before")
    @classmethod
    def _auto_or_a_number(cls, value: Any) -> Any:
        if value == "auto" or (str(value).isdigit() and int(value) > 0):
            return value if value == "auto" else int(value)
        raise ValueError("give auto or a number from 1")


class OptimizerOptions(Section):
    """Optimizer"""

    lr: float = Field(1e-5, ge=0, allow_inf_nan=False, description="learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="course of the learning rate"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW: added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="AdamW: decay of matrices")
    max_grad_norm: float = Field(
        1.0, ge=0, description="gradients are scaled down to this global norm; 0: never"
    )
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw",
        description="adamw: moments in float32; adamw-8bit: in 8 bits, rounded, in a quarter of the memory",
    )
    optimizer_offload: Switch = Field(
        "auto",
        description="keep masters and moments in host memory: on, off, or auto (if the GPU cannot hold them); alone: on",
    )
