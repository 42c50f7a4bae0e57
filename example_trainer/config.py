"""Every option of the trainer: one pydantic model, made of sections.

A section's docstring is its heading in --help. `command_line.py` reads the flags and the YAML file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from atroposlib.web.addresses import HostName, HttpAddress, ListeningHost, authority, host_and_port
from atroposlib.wire import StrictNumbers
from example_trainer.algorithm.advantages import (
    BOUNDS,
    DEFAULT_BETA,
    DIVIDED,
    KLPlace,
    Method,
    Normalisation,
    built_in,
    is_import,
    method_named,
)
from example_trainer.algorithm.advantages import BUILT_IN as ADVANTAGES
from example_trainer.algorithm.objective import Correction, RatioTo
from example_trainer.api_keys import SECRETS, from_variable, refuse_key_in_command
from example_trainer.models.lora.settings import LoraSettings, parse_targets

# The common base of all sections of options.


class Section(StrictNumbers):
    """Options that belong together; the docstring of a section is its heading in --help."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)


def flag_of(field: str) -> str:
    """`batch_size` → `--batch-size`."""
    return "--" + field.replace("_", "-")


def split_commas(value: Any) -> Any:
    """`"a,b"` and `["a,b", "c"]` as lists of names; anything else as it is."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    return [name for part in value for name in str(part).split(",") if name]


Names = Annotated[list[str], BeforeValidator(split_commas)]
"""Names, which commas may separate."""


def checked_addresses(value: list[str]) -> list[str]:
    """Return addresses of servers as `host:port`.

    Raises ValueError if one is not an address, or comes twice.
    """
    servers = [authority(*host_and_port(server)) for server in value]
    if len(set(servers)) != len(servers):
        raise ValueError(f"{', '.join(value)} names a server twice")
    return servers


Addresses = Annotated[Names, AfterValidator(checked_addresses)]
"""Servers as `host:port`, each once."""

# The model, and its layout over ranks.

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
        False, description="load the model even if it does not fit by the memory plan"
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
    lora_target_modules: Annotated[
        Names, Field(min_length=1), AfterValidator(lambda value: list(parse_targets(value)))
    ] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="lora_only: projections that get an adapter; all-linear: every one",
    )


class ParallelOptions(Section):
    """Several ranks"""

    ranks: int | Literal["auto"] = Field(
        "auto",
        description="processes of this trainer, which it starts itself. With auto, one for each "
        "GPU that it sees, for each rank of vLLM with --single-copy, and one on a CPU",
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


class MixtureOptions(Section):
    """Mixtures of experts"""

    router_balance_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the load balance loss of each layer's router (Switch Transformer); costs one more forward pass",
    )
    router_z_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the z-loss of each layer's router (ST-MoE)",
    )
    router_replay: bool = Field(
        False,
        description="forward each token through the experts that the sampler chose for it, from `routed_experts` of a group; "
        "vLLM needs --enable-return-routed-experts",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="ranks of this trainer that share the experts of a layer, and send tokens to them; 1: FSDP2 gathers the "
        "experts instead",
    )


class OptimizerOptions(Section):
    """Optimizer"""

    lr: float = Field(1e-5, ge=0, description="learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="course of the learning rate"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment")
    adam_eps: float = Field(
        1e-8,
        gt=0,
        description="AdamW: added to the root of the second moment",
    )
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


# Where rollouts come from, and how many make a batch.


class RolloutOptions(Section):
    """Rollouts"""

    atropos_url: HttpAddress = Field("http://localhost:8000", description="rollout service")
    atropos_api_key: SecretStr | None = Field(
        default_factory=from_variable("atropos_api_key"),
        description="bearer token of the rollout service; better as a variable, which other users cannot see",
    )
    service_timeout: float = Field(
        300.0,
        gt=0,
        description="seconds to wait for the rollout service to be there, or to come back",
    )
    batch_timeout: float = Field(
        1800.0, gt=0, description="seconds to wait for one batch of rollouts"
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="oldest rollouts to train on, in weight versions; not given: any, with --deterministic 0",
    )
    replay: Literal["fifo", "recent", "uniform"] = Field(
        "fifo",
        description="which waiting rollouts are trained on first: the oldest, the ones of the "
        "newest weights, or any (by --seed); "
        "recent and uniform need --max-staleness",
    )
    max_reuse: int = Field(
        1,
        ge=1,
        le=1024,
        description="batches in which a group of rollouts may be trained on; above 1 it needs --max-staleness 1 or more, and a "
        "--correction",
    )
    max_skipped_batches: int = Field(
        3,
        ge=0,
        description="batches in a row that may hold nothing to train on or run out of memory; one more ends the run",
    )
    skip_nonfinite: int = Field(
        0,
        ge=0,
        description="batches in a row whose gradient may be NaN or infinite and is left out; one more ends the run",
    )


class BatchOptions(Section):
    """Batches"""

    training_steps: int = Field(
        10, ge=1, description="optimizer steps in all, those before a resume included"
    )
    batch_size: int = Field(
        2,
        ge=1,
        description="sequences of an optimizer step, divided by --gradient-accumulation-steps",
    )
    gradient_accumulation_steps: int = Field(
        32,
        ge=1,
        description="sequences of an optimizer step, divided by --batch-size",
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="longest sequence in tokens, prompt included; the environments get it too",
    )
    tokens_per_microbatch: int | None = Field(
        None,
        ge=1,
        description="tokens of one forward and backward pass, a longer sequence alone excepted; not given: what "
        "memory allows, or 4096 for --deterministic with FSDP2 or --share-prefixes",
    )
    share_prefixes: bool | None = Field(
        None,
        description="forward what rollouts of a group begin with once for all of them; not given: unless --deterministic",
    )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch that one optimizer step trains on."""
        return self.batch_size * self.gradient_accumulation_steps


# Learning from a rollout: the loss, corrections for a sampler that is not the trainer, lengths, a
# teacher.


class AlgorithmOptions(Section):
    """Algorithm"""

    loss: str = Field(
        "grpo",
        min_length=1,
        description="grpo, dr_grpo, dapo, gspo, cispo, reinforce, rloo, reinforce_pp, reinforce_pp_baseline, dual_clip, or "
        "module:function; sets what follows as its paper does, where not given",
    )
    advantages: str | None = Field(
        None,
        min_length=1,
        description="group, leave_one_out, batch, group_batch, exponential, scores, zero, or module:function; not given: the "
        "loss's",
    )
    advantage_beta: float = Field(
        DEFAULT_BETA,
        gt=0,
        description="exponential: β of exp(score/β) / mean - 1, in units of the score",
    )
    advantage_std: bool | None = Field(
        None,
        description="divide advantages by the group's, or the batch's, standard deviation; not given: the loss's",
    )
    loss_normalisation: Normalisation | None = Field(
        None,
        description="average over all tokens, over sequences, or by the constant seq-len; not given: the loss's",
    )
    clip_eps: float | None = Field(
        None,
        gt=0,
        le=1,
        description="how far the ratio may fall (and rise) before its gradient stops; not given: the loss's",
    )
    clip_eps_high: float | None = Field(
        None,
        gt=0,
        description="how far it may rise, if not as far as it may fall",
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="where the loss of a negative advantage stops growing with the ratio; not given: nowhere",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the divergence from the reference model; 0: no reference is loaded",
    )
    kl_in: KLPlace | None = Field(
        None,
        description="whether that divergence is part of the loss or taken off the reward; not given: the loss's",
    )
    reference_model: str | None = Field(
        None, description="model of that divergence; not given: --model-name as it was at first"
    )
    ref_logprobs_from_workers: bool = Field(
        False,
        description="reference workers compute the logprobs of that divergence, and no reference is loaded here",
    )
    entropy_coef: float = Field(
        0.0,
        description="weight of the policy's entropy, which the loss then rewards",
    )
    ppo_epochs: int = Field(1, ge=1, description="passes over a batch, for one weight version")
    minibatches: int = Field(
        1, ge=1, description="optimizer updates in each time, with a part of the batch each"
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        description="divides the logits of sequences that do not record at which temperature they "
        "were sampled",
    )
    allow_truncated_sampling: bool = Field(
        False,
        description="train on what was sampled with top-p, top-k, min-p or penalties too, with a bias that the log names",
    )
    logprob_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens whose logits exist at the same time; not given: 4096 on a GPU, 1024 on a CPU",
    )

    @property
    def method(self) -> Method:
        """The loss's method, with the options' own choices in place of its defaults."""
        own = method_named(self.loss)
        names = (
            "advantages",
            "advantage_std",
            "loss_normalisation",
            "clip_eps",
            "dual_clip",
            "kl_in",
        )
        choices = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.clip_eps_high is not None or self.clip_eps is not None:
            choices["clip_eps_high"] = self.clip_eps_high
        return replace(own, **choices)

    @property
    def clip_high(self) -> float:
        """The highest rise of the ratio."""
        method = self.method
        if method.clip_eps_high is None:
            return method.clip_eps
        return method.clip_eps_high


class CorrectionOptions(Section):
    """Corrections for a sampler that is not the trainer"""

    correction: Correction = Field(
        "token_truncate",
        description="correction of the difference between trainer and sampler: weights (truncate) "
        "or left out (mask), by the ratio of a token or of its sequence",
    )
    correction_high: float = Field(
        2.0,
        ge=1,
        description="highest weight, or highest ratio that is not left out",
    )
    correction_low: float = Field(0.5, gt=0, lt=1, description="lowest ratio that is not left out")
    correction_ratio: RatioTo = Field(
        "proximal",
        description="the ratio to the sampler is that of the batch's first weights, or of the present ones",
    )
    sequence_kl_limit: float | None = Field(
        None,
        gt=0,
        description="leave out sequences whose KL to the sampler is larger, in nats per token; not given: none",
    )


class LengthOptions(Section):
    """Lengths"""

    truncated_answers: Literal["train", "mask", "penalise"] = Field(
        "train",
        description="answers that ran into their limit: trained on, left out of the loss, or penalised softly (DAPO)",
    )
    overlong_buffer: int = Field(
        128,
        ge=1,
        description="penalise: over how many tokens before the limit the penalty grows from 0 to its full size",
    )
    overlong_penalty: float = Field(
        1.0, gt=0, description="penalise: taken off the score at the limit"
    )
    too_long: Literal["mask", "drop"] = Field(
        "mask",
        description="sequences longer than --seq-len: not trained on, or as if they had never been there",
    )
    forward_zero_advantages: bool | None = Field(
        None,
        description="forward sequences whose advantage is 0 too; not given: only if something needs them",
    )


class DistillationOptions(Section):
    """On-policy distillation"""

    distill_coef: float = Field(
        0.0,
        ge=0,
        description="weight of the reverse KL to the teacher whose logprobs came along; 0: none",
    )
    distill_in: Literal["advantage", "loss"] = Field(
        "advantage",
        description="whether it is taken off each token's advantage, or is part of the loss",
    )


# The way of the weights to vLLM.


class BridgeOptions(Section):
    """Weight bridge"""

    weight_bridge_mode: Literal["none", "shared_vllm", "lora_only", "parameter_server"] = Field(
        "none",
        description="how vLLM gets the new weights: from checkpoints, directly, as LoRA adapters, or by a parameter server",
    )
    parameter_servers: Addresses = Field(
        [], description="parameter_server: host:port of each of them"
    )
    push_every: int = Field(
        1, ge=1, description="parameter_server: push every so many steps, and after the last one"
    )
    use_shared_memory: bool = Field(
        False, description="shared_vllm: broadcast the weights (trainer on other GPUs than vLLM)"
    )
    single_copy: bool = Field(
        False, description="shared_vllm: train in vLLM's own memory (trainer on vLLM's GPUs)"
    )
    colocate: bool = Field(
        False,
        description="take turns with vLLM (--colocate too) on one GPU: one copy of the weights, fresh rollouts alone",
    )
    vllm_host: HostName = Field("localhost", description="vLLM server's host")
    vllm_port: int = Field(9001, ge=1, le=65535, description="vLLM server's port")
    vllm_servers: Addresses = Field(
        [],
        description="host:port of every vLLM server, if there are several; instead of vllm-host and vllm-port",
    )
    weight_transfer: Literal["auto", "direct", "overlapped"] = Field(
        "auto",
        description="broadcast: into a paused vLLM's live weights, or beside them while it generates; auto: if there is room",
    )
    min_servers: int = Field(
        1,
        ge=1,
        description="broadcast: train on while so many vLLM servers are good; with fewer, wait for --service-timeout",
    )
    server_patience: float = Field(
        10.0,
        gt=0,
        description="broadcast: seconds that one server may keep the others waiting before it is left out",
    )
    vllm_api_key: SecretStr | None = Field(
        default_factory=from_variable("vllm_api_key"),
        description="bearer token of the vLLM server; better as a variable, which other users cannot see",
    )
    vllm_restart_interval: int = Field(
        3,
        ge=0,
        description="mode none: restart vLLM on a new checkpoint every N steps, no more than max-staleness; "
        "0: neither start nor restart it",
    )
    vllm_command: str | None = Field(
        None,
        min_length=1,
        description="what starts that server, with {model}, {name} and {port}, and {version} and {epoch} if wanted; "
        "not given: this project's own server",
    )
    vllm_args: str = Field(
        "",
        description='further flags for that server, in quotes: --vllm-args "--max-model-len 4096"',
    )
    vllm_gpus: str | None = Field(
        None,
        pattern=r"^\d+(,\d+)*$",
        description="GPUs of that server, such as 0,1, as in CUDA_VISIBLE_DEVICES; not given: all "
        "that the trainer sees and "
        "does not use, else the trainer's",
    )
    vllm_start_timeout: float = Field(
        600.0, gt=0, description="seconds that server may take to load and answer"
    )
    bridge_timeout: float = Field(
        120.0, gt=0, description="seconds that each phase of a weight update may take"
    )

    @field_validator("vllm_command", "vllm_args")
    @classmethod
    def _no_key_in_a_command(cls, value: str | None) -> str | None:
        refuse_key_in_command(value or "")
        return value

    @property
    def vllm_addresses(self) -> list[tuple[str, int]]:
        """Host, as it stands in a URL, and port of each vLLM server."""
        return list(map(host_and_port, self.vllm_servers)) or [(self.vllm_host, self.vllm_port)]


# Files that a run leaves behind: checkpoints and figures.


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


# A reference worker's requests for work.


class ReferenceWorkerOptions(Section):
    """Reference worker"""

    name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="what service and timeline call it; not given: host and process",
    )
    lease_seconds: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="after so many seconds without an answer, what it holds goes to another worker",
    )

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or f"{socket.gethostname()}-{os.getpid()}"


class TrainerConfig(
    ModelOptions, LoraOptions, ParallelOptions, MixtureOptions, RolloutOptions, BatchOptions, AlgorithmOptions,
    CorrectionOptions, LengthOptions, DistillationOptions, OptimizerOptions, BridgeOptions, CheckpointOptions, OutputOptions,
):  # fmt: skip
    """Options of `grpo.py`.

    Each field is a flag (`--batch-size`) and a YAML key (`batch_size`); flags win over the file.
    """

    @model_validator(mode="before")
    @classmethod
    def _turns_imply(cls, values: Any) -> Any:
        """Rollouts that are made while the trainer computes are what turns exclude, so none is
        older than the weights.
        """
        if not isinstance(values, dict) or values.get("colocate") not in (True, "true", "True"):
            return values
        for name, implied in (
            ("weight_bridge_mode", "shared_vllm"),
            ("single_copy", True),
            ("max_staleness", 0),
        ):
            if values.get(name, implied) not in (implied, None, str(implied), str(implied).lower()):
                raise ValueError(
                    f"--colocate needs {flag_of(name)} {implied}, which is {values[name]!r}: "
                    "trainer and vLLM take turns on one GPU with one copy of the weights. Leave "
                    "one of them out"
                )
        return {
            **values,
            "weight_bridge_mode": "shared_vllm",
            "single_copy": True,
            "max_staleness": 0,
        }

    @model_validator(mode="after")
    def _options_agree(self) -> TrainerConfig:
        for is_broken, message in (
            *self._algorithm_rules(),
            *self._correction_rules(),
            *self._bridge_rules(),
            *self._restart_rules(),
            *self._parameter_server_rules(),
            *self._batch_rules(),
            *self._determinism_rules(),
        ):
            if is_broken:
                raise ValueError(message)
        return self

    def _algorithm_rules(self) -> Iterable[tuple[bool, str]]:
        """Pairs of whether options contradict each other, and the error; here and below."""
        method, given = self.method, self.model_fields_set
        if not is_import(method.advantages):
            built_in("--advantages", method.advantages, ADVANTAGES)
        every = ("clip_eps", "clip_eps_high", "dual_clip")
        bounds = BOUNDS.get(method.loss, every)
        for name in every:
            yield (
                getattr(self, name) is not None and name not in bounds,
                f"{flag_of(name)} has no part in --loss {self.loss}, which has "
                f"{' and '.join(map(flag_of, bounds)) or 'no bounds'}; leave it out",
            )
        yield (
            bool(self.advantage_std) and method.advantages not in DIVIDED,
            f"--advantage-std has no part in --advantages {method.advantages}: only "
            f"{', '.join(DIVIDED)} divide by a standard deviation; leave it out",
        )
        yield (
            "advantage_beta" in given and "advantages" not in given,
            f"--advantage-beta {self.advantage_beta:g} needs --advantages exponential",
        )
        yield (
            self.kl_in is not None and "kl_coef" not in given,
            f"--kl-in {self.kl_in} needs --kl-coef, without which no divergence is taken",
        )
        yield (
            self.ref_logprobs_from_workers and "kl_coef" not in given,
            "--ref-logprobs-from-workers needs --kl-coef, without which no divergence is taken",
        )
        yield (
            "distill_in" in given and "distill_coef" not in given,
            f"--distill-in {self.distill_in} needs --distill-coef, without which there is no teacher",
        )

    def _correction_rules(self) -> Iterable[tuple[bool, str]]:
        given = self.model_fields_set
        yield (
            "correction_low" in given and self.correction.endswith("truncate"),
            f"--correction-low has no part in --correction {self.correction}, whose weights have an upper bound alone; "
            "leave it out, or give token_mask or sequence_mask",
        )
        for name in ("overlong_buffer", "overlong_penalty"):
            yield (
                name in given and "truncated_answers" not in given,
                f"{flag_of(name)} needs --truncated-answers penalise, which is {self.truncated_answers!r}",
            )

    def _bridge_rules(self) -> Iterable[tuple[bool, str]]:
        flag, one_copy = "--use-shared-memory", "--single-copy"
        if self.colocate:
            one_copy = "--colocate"
        if self.single_copy:
            flag = one_copy
        shared = self.weight_bridge_mode == "shared_vllm"
        yield (
            self.use_shared_memory and self.single_copy,
            f"--use-shared-memory and {one_copy} exclude each other; give one, or neither to let GPUs decide",
        )
        yield (
            (self.use_shared_memory or self.single_copy) and not shared,
            f"{flag} needs --weight-bridge-mode shared_vllm, which is {self.weight_bridge_mode!r}",
        )
        yield (
            self.single_copy and self.several_updates,
            f"{one_copy} and --ppo-epochs {self.ppo_epochs} with --minibatches {self.minibatches} "
            "exclude each other. Between the updates of a batch the trainer's parameters change, "
            "and vLLM would sample from them. Give --use-shared-memory (broadcast), or one of "
            "each",
        )
        yield (
            self.single_copy and self.expert_parallel > 1,
            f"{one_copy} and --expert-parallel {self.expert_parallel} exclude each other: the "
            "ranks of a single copy split each expert's inner width as vLLM's ranks do. Give "
            "--use-shared-memory (broadcast), or leave --expert-parallel out",
        )
        yield (
            self.lora is not None and bool(self.lora_dropout) and self.several_updates,
            f"--lora-dropout {self.lora_dropout:g} and --ppo-epochs {self.ppo_epochs} with "
            f"--minibatches {self.minibatches} exclude each other. The ratio to the batch's first "
            "weights would be that of two random masks, and bounds would act on noise. Give "
            "--lora-dropout 0, or one of each",
        )
        yield (
            len(self.vllm_servers) > 1 and (self.single_copy or self.weight_bridge_mode == "none"),
            f"{len(self.vllm_servers)} --vllm-servers can be reached by broadcast (--use-shared-memory) or lora_only alone",
        )

    def _restart_rules(self) -> Iterable[tuple[bool, str]]:
        interval, staleness = self.vllm_restart_interval, self.max_staleness
        is_set = "vllm_restart_interval" in self.model_fields_set
        yield (
            is_set and interval > 0 and self.weight_bridge_mode != "none",
            f"--vllm-restart-interval needs --weight-bridge-mode none, which is {self.weight_bridge_mode!r}: "
            "the other modes give vLLM its weights without restarting it",
        )
        for name in ("vllm_command", "vllm_args", "vllm_gpus"):
            yield (
                not self.starts_vllm and bool(getattr(self, name)),
                f"{flag_of(name)} needs --weight-bridge-mode none and a --vllm-restart-interval above 0: "
                "otherwise this trainer starts no vLLM server",
            )
        yield (
            self.starts_vllm and is_set and staleness is not None and staleness < interval,
            f"--max-staleness {staleness} would drop every rollout before vLLM gets new weights: give at least "
            f"--vllm-restart-interval, which is {interval}, or a lower interval",
        )

    @property
    def starts_vllm(self) -> bool:
        """Return whether the trainer starts vLLM itself, unless another server answers at its
        port.
        """
        return self.weight_bridge_mode == "none" and self.vllm_restart_interval > 0

    def _parameter_server_rules(self) -> Iterable[tuple[bool, str]]:
        pushes = self.weight_bridge_mode == "parameter_server"
        for name, default in (("parameter_servers", []), ("push_every", 1)):
            yield (
                not pushes and getattr(self, name) != default,
                f"{flag_of(name)} needs --weight-bridge-mode parameter_server, which is {self.weight_bridge_mode!r}",
            )
        yield (
            pushes and not self.parameter_servers,
            "--weight-bridge-mode parameter_server needs --parameter-servers host:port; start one with "
            "`python -m example_trainer.parameter_server`",
        )
        yield (
            pushes and bool(self.vllm_servers),
            "--vllm-servers are given to the parameter servers, which send them the weights; this trainer speaks to "
            "--parameter-servers alone",
        )
        yield (
            pushes and self.weight_transfer == "direct",
            "--weight-transfer direct and --weight-bridge-mode parameter_server exclude each "
            "other: a parameter server receives beside what it holds. Leave it out here, and give "
            "it to the parameter server if vLLM is to receive so",
        )
        behind = self.push_every - 1
        yield (
            pushes and self.max_staleness is not None and self.max_staleness < behind,
            f"--max-staleness {self.max_staleness} would wait for newer rollouts for ever: with --push-every "
            f"{self.push_every} they are up to {behind} versions behind; give at least that",
        )

    def _batch_rules(self) -> Iterable[tuple[bool, str]]:
        yield (
            self.replay != "fifo" and self.oldest_rollouts is None,
            f"--replay {self.replay} needs --max-staleness, without which nothing drops the rollouts that it passes over",
        )
        yield (
            self.max_reuse > 1 and not self.oldest_rollouts,
            f"--max-reuse {self.max_reuse} needs --max-staleness, at least 1: what was trained on once is of older weights "
            "afterwards" + ", which --colocate excludes" * self.colocate,
        )
        yield (
            self.max_reuse > 1 and self.correction == "none",
            f"--max-reuse {self.max_reuse} needs a --correction, which is 'none'. Groups that are "
            "trained on again were sampled with other weights, and would be learned from as if "
            "they were not",
        )
        yield (
            self.minibatches > self.sequences_per_step,
            f"--minibatches {self.minibatches} are more than the {self.sequences_per_step} sequences of a batch "
            "(--batch-size × --gradient-accumulation-steps)",
        )
        yield (
            self.forward_zero_advantages is False and self.needs_zero_advantages is not None,
            "--no-forward-zero-advantages would leave out sequences that are learned from with "
            f"{self.needs_zero_advantages}; leave it out",
        )

    def _determinism_rules(self) -> Iterable[tuple[bool, str]]:
        mode = self.weight_bridge_mode
        yield (
            self.deterministic and mode == "none",
            "--deterministic needs --weight-bridge-mode shared_vllm or parameter_server, and it is 'none': vLLM "
            "would load rounded checkpoints in place of the trainer's weights; give one of them",
        )
        yield (
            self.deterministic and mode == "lora_only",
            "--deterministic excludes --weight-bridge-mode lora_only: vLLM's kernels for adapters have no "
            "counterpart in the trainer; train the whole model with --weight-bridge-mode shared_vllm",
        )
        yield (
            self.deterministic and self.temperature != 1.0,
            f"--deterministic needs --temperature 1, which is {self.temperature:g}",
        )

    @property
    def replays(self) -> bool:
        """Return whether rollouts are used in another way than each once, oldest first."""
        return self.replay != "fifo" or self.max_reuse > 1

    @property
    def several_updates(self) -> bool:
        """Return whether a batch may be for more than one optimizer update."""
        return self.ppo_epochs * self.minibatches > 1

    @property
    def oldest_rollouts(self) -> int | None:
        """Most weight versions that rollouts may be behind; None for any.

        Exact runs take fresh ones alone unless --max-staleness is given.
        """
        return 0 if self.deterministic and self.max_staleness is None else self.max_staleness

    @property
    def restart_interval(self) -> int:
        """Steps between restarts of vLLM.

        Where it is not given, no more than --max-staleness, so that rollouts are used.
        """
        if "vllm_restart_interval" in self.model_fields_set or self.max_staleness is None:
            return self.vllm_restart_interval
        return max(1, min(self.vllm_restart_interval, self.max_staleness))

    def restarts_vllm_at(self, step: int) -> bool:
        """Return whether a restart of vLLM is due after optimizer step `step`.

        None is due after the last step.
        """
        return (
            self.starts_vllm
            and 0 < step < self.training_steps
            and step % self.restart_interval == 0
        )

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint of optimizer step `step` is due: at each interval, and at the
        end.
        """
        interval = self.checkpoint_interval
        return step == self.training_steps or bool(interval and step % interval == 0)

    @property
    def shares_prefixes(self) -> bool:
        """Return whether what rollouts of a group begin with is forwarded once."""
        return not self.deterministic if self.share_prefixes is None else self.share_prefixes

    @property
    def needs_zero_advantages(self) -> str | None:
        """The options that learn from sequences whose advantages are all 0; None if there are none."""
        flags = [
            flag_of(name)
            for name in ("kl_coef", "entropy_coef", "distill_coef")
            if getattr(self, name)
        ]
        return " and ".join(flags) or (
            f"--loss {self.loss}" if is_import(self.method.loss) else None
        )

    @property
    def forwards_zero_advantages(self) -> bool:
        """Return whether sequences whose advantages are all 0 are forwarded.

        Exact runs compare every token with vLLM's.
        """
        if self.forward_zero_advantages is None:
            return self.deterministic or self.needs_zero_advantages is not None
        return self.forward_zero_advantages

    @property
    def fetches_ahead(self) -> bool:
        """Return whether a batch is fetched while another is trained on: it is then one version
        older than it need be.
        """
        return self.oldest_rollouts != 0

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters to train; None if the whole model is trained."""
        if self.weight_bridge_mode != "lora_only":
            return None
        return LoraSettings(
            self.lora_r, self.lora_alpha, self.lora_dropout, tuple(self.lora_target_modules)
        )

    @property
    def loads_reference(self) -> bool:
        """Return whether a second model is held, for the divergence from it; under adapters the
        base model is there already.
        """
        return bool(self.kl_coef) and not self.has_base_model and not self.ref_logprobs_from_workers

    @property
    def asks_reference_workers(self) -> bool:
        """Return whether reference workers compute what groups come without."""
        return bool(self.kl_coef) and self.ref_logprobs_from_workers

    @property
    def has_base_model(self) -> bool:
        """Return whether the model that is trained can compute its reference's logprobs too."""
        return self.lora is not None and self.reference_model is None

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
