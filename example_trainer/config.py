"""Every option of the trainer, section by section: one pydantic model. See command_line for how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from example_trainer.api_keys import SECRETS, from_variable, refuse_key_in_command
from example_trainer.models.lora.settings import LoraSettings, parse_targets


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)


class ModelOptions(_Section):
    """Model"""

    model_name: str = Field(min_length=1, description="Hugging Face model id, or a folder that holds a checkpoint")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of the weights, not float16; auto: the server's, else the checkpoint's (float32 on a CPU)",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    num_threads: int | None = Field(None, ge=1, description="torch's CPU threads; not given: torch decides")
    seed: int = Field(0, ge=0, description="seed of torch's random numbers")
    deterministic: bool = Field(
        False, description="run vLLM's own kernels, and stop at the first token whose logprob differs from vLLM's in a bit"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    skip_memory_check: bool = Field(False, description="load the model even if the estimate says that memory will not do")


class LoraOptions(_Section):
    """Adapters"""

    lora_r: int = Field(16, ge=1, description="lora_only: rank of the adapters")
    lora_alpha: float = Field(32.0, gt=0, description="lora_only: scale of the adapters, divided by the rank")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="lora_only: share of the adapters' inputs that are dropped")
    lora_target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="lora_only: projections that get an adapter; all-linear: every one",
    )

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _split_targets(cls, value: Any) -> Any:
        return _split_commas(value)

    @field_validator("lora_target_modules")
    @classmethod
    def _known_projections(cls, value: list[str]) -> list[str]:
        return list(parse_targets(value))


class ParallelOptions(_Section):
    """Several ranks"""

    rank_timeout: float = Field(600.0, gt=0, description="under torchrun: seconds that the ranks wait for each other")


class RolloutOptions(_Section):
    """Rollouts"""

    atropos_url: str = Field("http://localhost:8000", pattern=r"^https?://\S+$", description="rollout service")
    atropos_api_key: SecretStr | None = Field(
        default_factory=from_variable("atropos_api_key"),
        description="bearer token of the rollout service; better as a variable, which other users cannot see",
    )
    service_timeout: float = Field(
        300.0, gt=0, description="seconds to wait for the rollout service to be there, or to come back"
    )
    batch_timeout: float = Field(1800.0, gt=0, description="seconds to wait for one batch of rollouts")
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="oldest rollouts to train on, in weight versions; not given: any, with --deterministic 0",
    )
    max_skipped_batches: int = Field(
        3, ge=0, description="batches in a row that may hold nothing to train on or run out of memory; one more ends the run"
    )
    skip_nonfinite: int = Field(
        0, ge=0, description="batches in a row whose gradient may be NaN or infinite and is left out; one more ends the run"
    )


class BatchOptions(_Section):
    """Batches"""

    training_steps: int = Field(10, ge=1, description="optimizer steps in all, those before a resume included")
    batch_size: int = Field(2, ge=1, description="sequences of an optimizer step, divided by --gradient-accumulation-steps")
    gradient_accumulation_steps: int = Field(
        32,
        ge=1,
        description="sequences of an optimizer step, divided by --batch-size",
    )
    seq_len: int = Field(2048, ge=2, description="longest sequence in tokens, prompt included; told to the environments")
    tokens_per_microbatch: int | None = Field(
        None,
        ge=1,
        description="tokens of one forward and backward pass, a longer sequence alone excepted; not given: what memory allows",
    )
    share_prefixes: bool | None = Field(
        None,
        description="forward what rollouts of a group begin with once for all of them; not given: unless --deterministic",
    )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch that one optimizer step trains on."""
        return self.batch_size * self.gradient_accumulation_steps


class AlgorithmOptions(_Section):
    """Algorithm"""

    clip_eps: float = Field(0.2, gt=0, lt=1, description="how far the ratio to the rollout policy may fall (and rise)")
    clip_eps_high: float | None = Field(None, gt=0, description="how far it may rise, if not as far as it may fall")
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the divergence from the reference model; 0: no reference is loaded"
    )
    reference_model: str | None = Field(
        None, description="model of that divergence; not given: --model-name as it was at first"
    )
    advantage_std: bool = Field(True, description="divide advantages by the group's standard deviation; off: Dr. GRPO")
    loss_normalisation: Literal["token", "sequence", "constant"] = Field(
        "token", description="average over all tokens, over sequences, or by the constant seq-len (Dr. GRPO)"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="divides the logits; what environments sample at if vLLM has --logprobs-mode processed_logprobs, else 1",
    )
    logprob_chunk: int | None = Field(
        None, ge=1, description="tokens whose logits exist at the same time; not given: 4096 on a GPU, 1024 on a CPU"
    )

    @property
    def clip_high(self) -> float:
        """How far the ratio may rise."""
        return self.clip_eps if self.clip_eps_high is None else self.clip_eps_high


class OptimizerOptions(_Section):
    """Optimizer"""

    lr: float = Field(1e-5, ge=0, allow_inf_nan=False, description="learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="course of the learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW: added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="AdamW: decay of matrices")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this global norm; 0: never")
    optimizer_offload: bool = Field(
        False, description="keep masters and moments in the host's memory; a step brings them to the GPU part by part"
    )


class BridgeOptions(_Section):
    """Weight bridge"""

    weight_bridge_mode: Literal["none", "shared_vllm", "lora_only"] = Field(
        "none", description="how vLLM gets the new weights: from checkpoints, directly, or as LoRA adapters"
    )
    use_shared_memory: bool = Field(False, description="shared_vllm: broadcast the weights (trainer on other GPUs than vLLM)")
    single_copy: bool = Field(False, description="shared_vllm: train in vLLM's own memory (trainer on vLLM's GPUs)")
    vllm_host: str = Field("localhost", description="vLLM server's host")
    vllm_port: int = Field(9001, ge=1, le=65535, description="vLLM server's port")
    vllm_servers: list[str] = Field(
        [], description="host:port of every vLLM server, if there are several; instead of vllm-host and vllm-port"
    )
    weight_transfer: Literal["auto", "direct", "overlapped"] = Field(
        "auto",
        description="broadcast: into a paused vLLM's live weights, or beside them while it generates; auto: if there is room",
    )
    vllm_api_key: SecretStr | None = Field(
        default_factory=from_variable("vllm_api_key"),
        description="bearer token of the vLLM server; better as a variable, which other users cannot see",
    )
    vllm_restart_interval: int | None = Field(
        None, ge=1, description="mode none: start vLLM, and restart it on a new checkpoint every N steps"
    )
    vllm_command: str | None = Field(
        None,
        min_length=1,
        description="what starts that server, with {model}, {name} and {port}, and {version} and {epoch} if wanted; "
        "not given: this project's own server",
    )
    vllm_args: str = Field("", description='further flags for that server, in quotes: --vllm-args "--max-model-len 4096"')
    vllm_gpus: str | None = Field(
        None, pattern=r"^\d+(,\d+)*$", description="GPUs of that server, such as 0,1; not given: those that the trainer sees"
    )
    vllm_start_timeout: float = Field(600.0, gt=0, description="seconds that server may take to load and answer")
    bridge_timeout: float = Field(120.0, gt=0, description="seconds that each phase of a weight update may take")

    @field_validator("vllm_servers", mode="before")
    @classmethod
    def _split_servers(cls, value: Any) -> Any:
        return _split_commas(value)

    @field_validator("vllm_servers")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for server in value:
            host, _, port = server.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{server!r} is no address; give host:port, as in localhost:9001")
        if len(set(value)) != len(value):
            raise ValueError(f"{', '.join(value)} names a server twice")
        return value

    @field_validator("vllm_command", "vllm_args")
    @classmethod
    def _no_key_in_a_command(cls, value: str | None) -> str | None:
        refuse_key_in_command(value or "")
        return value

    @property
    def vllm_addresses(self) -> list[tuple[str, int]]:
        """Host and port of each vLLM server."""
        pairs = [server.rpartition(":") for server in self.vllm_servers]
        return [(host, int(port)) for host, _, port in pairs] or [(self.vllm_host, self.vllm_port)]


class CheckpointOptions(_Section):
    """Checkpoints"""

    save_path: Path = Field(Path("trained_model_checkpoints"), description="folder of the checkpoints")
    checkpoint_interval: int = Field(10, ge=0, description="steps between checkpoints; 0: only after the last one")
    keep_checkpoints: int = Field(0, ge=0, description="newest checkpoints of the run that are kept at all; 0: all")
    keep_optimizer_states: int = Field(1, ge=0, description="newest checkpoints that keep their optimizer state; 0: all do")
    resume: str | None = Field(
        None, description="auto (the newest run in save-path, from its newest checkpoint; else anew) or a step_N folder"
    )


class OutputOptions(_Section):
    """Output"""

    log_dir: Path = Field(Path("runs/grpo"), description="folder of metrics.jsonl and the TensorBoard logs")
    metrics_port: int = Field(0, ge=0, le=65535, description="serve the figures of the last step to Prometheus; 0: do not")
    metrics_host: str = Field("0.0.0.0", min_length=1, description="address on which they are served, without a key")
    profile: str | None = Field(
        None, pattern=r"^\d+(-\d+)?$", description="steps (3, or 3-5) whose trace torch's profiler writes into log-dir/profile"
    )
    memory_snapshot: bool = Field(
        False, description="write the history of GPU memory into log-dir/profile at the end, and when memory runs out"
    )
    use_wandb: bool = Field(False, description="log to Weights & Biases as well")
    wandb_project: str = Field("lockstep", description="W&B project, also told to the environments")
    wandb_group: str | None = Field(None, description="W&B group, also told to the environments; not given: grpo-<model>")

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


class TrainerConfig(
    ModelOptions, LoraOptions, ParallelOptions, RolloutOptions, BatchOptions, AlgorithmOptions, OptimizerOptions,
    BridgeOptions, CheckpointOptions, OutputOptions,
):  # fmt: skip
    """Options of `grpo.py`. Each field is a flag (`--batch-size`) and a YAML key (`batch_size`); flags win over the file."""

    @model_validator(mode="after")
    def _options_agree(self) -> TrainerConfig:
        if self.use_shared_memory and self.single_copy:
            raise ValueError(
                "--use-shared-memory and --single-copy exclude each other; give one, or neither to let GPUs decide"
            )
        if (self.use_shared_memory or self.single_copy) and self.weight_bridge_mode != "shared_vllm":
            flag = "--single-copy" if self.single_copy else "--use-shared-memory"
            raise ValueError(f"{flag} needs --weight-bridge-mode shared_vllm, which is {self.weight_bridge_mode!r}")
        if len(self.vllm_servers) > 1 and (self.single_copy or self.weight_bridge_mode == "none"):
            raise ValueError(
                f"{len(self.vllm_servers)} --vllm-servers can be reached by broadcast (--use-shared-memory) or lora_only alone"
            )
        if self.vllm_restart_interval is None:
            idle = [name for name in ("vllm_command", "vllm_args", "vllm_gpus") if getattr(self, name)]
            if idle:
                raise ValueError(f"{flag_of(idle[0])} needs --vllm-restart-interval, without which no vLLM server is started")
            return self
        if self.weight_bridge_mode != "none":
            raise ValueError(
                f"--vllm-restart-interval needs --weight-bridge-mode none, which is {self.weight_bridge_mode!r}: "
                "the other modes give vLLM its weights without restarting it"
            )
        if self.max_staleness is not None and self.max_staleness < self.vllm_restart_interval:
            raise ValueError(
                f"--max-staleness {self.max_staleness} would drop every rollout before vLLM gets new weights: give at least "
                f"--vllm-restart-interval, which is {self.vllm_restart_interval}"
            )
        return self

    @model_validator(mode="after")
    def _determinism_agrees(self) -> TrainerConfig:
        if self.deterministic and self.weight_bridge_mode != "shared_vllm":
            raise ValueError(
                f"--deterministic needs --weight-bridge-mode shared_vllm, which is {self.weight_bridge_mode!r}: in the other "
                "modes vLLM does not hold the trainer's weights, bit for bit, at every step"
            )
        if self.deterministic and self.temperature != 1.0:
            raise ValueError(f"--deterministic needs --temperature 1, which is {self.temperature:g}")
        if self.deterministic and self.share_prefixes:
            raise ValueError(
                "--deterministic and --share-prefixes exclude each other: in which order the gradients of what is shared are "
                "summed would depend on which rollouts share a pass; leave one of them out"
            )
        return self

    @property
    def oldest_rollouts(self) -> int | None:
        """Most weight versions that rollouts may be behind; None for any. Exact runs take fresh ones alone unless told."""
        return 0 if self.deterministic and self.max_staleness is None else self.max_staleness

    def restarts_vllm_at(self, step: int) -> bool:
        """Whether vLLM is restarted on the weights of optimizer step `step`; not after the last one, when it is stopped."""
        interval = self.vllm_restart_interval
        return interval is not None and 0 < step < self.training_steps and step % interval == 0

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of optimizer step `step` is due: at each interval, and at the end."""
        interval = self.checkpoint_interval
        return step == self.training_steps or bool(interval and step % interval == 0)

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rollouts of a group begin with is forwarded once."""
        return not self.deterministic if self.share_prefixes is None else self.share_prefixes

    @property
    def fetches_ahead(self) -> bool:
        """Whether a batch is fetched while another is trained on: it is then one version older than it need be."""
        return self.oldest_rollouts != 0

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters to train; None if the whole model is trained."""
        if self.weight_bridge_mode != "lora_only":
            return None
        return LoraSettings(self.lora_r, self.lora_alpha, self.lora_dropout, tuple(self.lora_target_modules))

    @property
    def shareable(self) -> dict[str, Any]:
        """The options as JSON values, without the secrets: for checkpoints and experiment logs."""
        return self.model_dump(mode="json", exclude=set(SECRETS))

    @property
    def wandb_names(self) -> tuple[str, str]:
        """W&B project and group."""
        return self.wandb_project, self.wandb_group or f"grpo-{Path(self.model_name).name}"


SECTIONS: tuple[type[BaseModel], ...] = TrainerConfig.__bases__
"""In the order of --help."""


def flag_of(field: str) -> str:
    """`batch_size` → `--batch-size`."""
    return "--" + field.replace("_", "-")


def _split_commas(value: Any) -> Any:
    """`"a,b"` and `["a,b", "c"]` as lists of names; anything else as it is."""
    parts = value.split(",") if isinstance(value, str) else value
    return [name for part in parts for name in str(part).split(",") if name] if isinstance(parts, list) else parts


def _step_range(value: str | None) -> range:
    if value is None:
        return range(0)
    first, _, last = value.partition("-")
    begin = int(first)
    return range(begin, int(last or first) + 1) if begin else range(0)
