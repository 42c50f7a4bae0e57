"""Every option of the trainer: one pydantic model, made of the sections in `options/`.

See command_line for how it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_validator

from example_trainer.algorithm.functions import is_import
from example_trainer.api_keys import SECRETS
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.options.algorithm import (
    AlgorithmOptions,
    CorrectionOptions,
    DistillationOptions,
    LengthOptions,
)
from example_trainer.options.bridge import BridgeOptions
from example_trainer.options.model import (
    LoraOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
)
from example_trainer.options.output import CheckpointOptions, OutputOptions
from example_trainer.options.rollouts import BatchOptions, RolloutOptions
from example_trainer.options.section import flag_of


class TrainerConfig(
    ModelOptions, LoraOptions, ParallelOptions, RolloutOptions, BatchOptions, AlgorithmOptions, CorrectionOptions,
    LengthOptions, DistillationOptions, OptimizerOptions, BridgeOptions, CheckpointOptions, OutputOptions,
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
                    f"--colocate needs {flag_of(name)} {implied}, which is {values[name]!r}: trainer and vLLM take turns on "
                    "one GPU with one copy of the weights; leave one of them out"
                )
        return {
            **values,
            "weight_bridge_mode": "shared_vllm",
            "single_copy": True,
            "max_staleness": 0,
        }

    @model_validator(mode="after")
    def _options_agree(self) -> TrainerConfig:
        one_copy = "--colocate" if self.colocate else "--single-copy"
        if self.use_shared_memory and self.single_copy:
            raise ValueError(
                f"--use-shared-memory and {one_copy} exclude each other; give one, or neither to let GPUs decide"
            )
        if (
            self.use_shared_memory or self.single_copy
        ) and self.weight_bridge_mode != "shared_vllm":
            flag = one_copy if self.single_copy else "--use-shared-memory"
            raise ValueError(
                f"{flag} needs --weight-bridge-mode shared_vllm, which is {self.weight_bridge_mode!r}"
            )
        if self.single_copy and self.several_updates:
            raise ValueError(
                f"{one_copy} and --ppo-epochs {self.ppo_epochs} with --minibatches {self.minibatches} exclude each other: "
                "between the updates of a batch the trainer's parameters change, and vLLM would sample from them; give "
                "--use-shared-memory (broadcast), or one of each"
            )
        if self.lora is not None and self.lora.dropout and self.several_updates:
            raise ValueError(
                f"--lora-dropout {self.lora.dropout:g} and --ppo-epochs {self.ppo_epochs} with --minibatches "
                f"{self.minibatches} exclude each other: the ratio to the batch's first weights would be that of two random "
                "masks, and bounds would act on noise; give --lora-dropout 0, or one of each"
            )
        if len(self.vllm_servers) > 1 and (self.single_copy or self.weight_bridge_mode == "none"):
            raise ValueError(
                f"{len(self.vllm_servers)} --vllm-servers can be reached by broadcast (--use-shared-memory) or lora_only alone"
            )
        return self

    @model_validator(mode="after")
    def _restarts_agree(self) -> TrainerConfig:
        interval = self.vllm_restart_interval
        given = "vllm_restart_interval" in self.model_fields_set
        if given and interval and self.weight_bridge_mode != "none":
            raise ValueError(
                f"--vllm-restart-interval needs --weight-bridge-mode none, which is {self.weight_bridge_mode!r}: "
                "the other modes give vLLM its weights without restarting it"
            )
        if not self.starts_vllm:
            idle = [
                name for name in ("vllm_command", "vllm_args", "vllm_gpus") if getattr(self, name)
            ]
            if idle:
                raise ValueError(
                    f"{flag_of(idle[0])} needs --weight-bridge-mode none and a --vllm-restart-interval above 0: "
                    "otherwise this trainer starts no vLLM server"
                )
        elif given and self.max_staleness is not None and self.max_staleness < interval:
            raise ValueError(
                f"--max-staleness {self.max_staleness} would drop every rollout before vLLM gets new weights: give at least "
                f"--vllm-restart-interval, which is {interval}, or a lower interval"
            )
        return self

    @property
    def starts_vllm(self) -> bool:
        """Whether the trainer starts vLLM itself, unless another server answers at its port."""
        return self.weight_bridge_mode == "none" and self.vllm_restart_interval > 0

    @model_validator(mode="after")
    def _parameter_servers_agree(self) -> TrainerConfig:
        if self.weight_bridge_mode != "parameter_server":
            given = [
                name
                for name in ("parameter_servers", "push_every")
                if name in self.model_fields_set
            ]
            if given and (self.parameter_servers or self.push_every != 1):
                raise ValueError(
                    f"{flag_of(given[0])} needs --weight-bridge-mode parameter_server, which is {self.weight_bridge_mode!r}"
                )
            return self
        if not self.parameter_servers:
            raise ValueError(
                "--weight-bridge-mode parameter_server needs --parameter-servers host:port; start one with "
                "`python -m example_trainer.parameter_server`"
            )
        if self.vllm_servers:
            raise ValueError(
                "--vllm-servers are given to the parameter servers, which send them the weights; this trainer speaks to "
                "--parameter-servers alone"
            )
        if self.weight_transfer == "direct":
            raise ValueError(
                "--weight-transfer direct and --weight-bridge-mode parameter_server exclude each other: a parameter server "
                "receives beside what it holds; leave it out here, and give it to the parameter server if vLLM is to receive so"
            )
        if self.max_staleness is not None and self.max_staleness < self.push_every - 1:
            raise ValueError(
                f"--max-staleness {self.max_staleness} would wait for newer rollouts for ever: with --push-every "
                f"{self.push_every} they are up to {self.push_every - 1} versions behind; give at least that"
            )
        return self

    @model_validator(mode="after")
    def _replay_agrees(self) -> TrainerConfig:
        if self.replay != "fifo" and self.oldest_rollouts is None:
            raise ValueError(
                f"--replay {self.replay} needs --max-staleness, without which nothing drops the rollouts that it passes over"
            )
        if self.max_reuse > 1 and not self.oldest_rollouts:
            raise ValueError(
                f"--max-reuse {self.max_reuse} needs --max-staleness, at least 1: what was trained on once is of older weights "
                "afterwards" + (", which --colocate excludes" if self.colocate else "")
            )
        if self.max_reuse > 1 and self.correction == "none":
            raise ValueError(
                f"--max-reuse {self.max_reuse} needs a --correction, which is 'none': what is trained on again was sampled "
                "with other weights than the present ones, and would be learned from as if it were not"
            )
        return self

    @property
    def replays(self) -> bool:
        """Whether rollouts are used in another way than each once, oldest first."""
        return self.replay != "fifo" or self.max_reuse > 1

    @model_validator(mode="after")
    def _batches_can_be_divided(self) -> TrainerConfig:
        if self.minibatches > self.sequences_per_step:
            raise ValueError(
                f"--minibatches {self.minibatches} are more than the {self.sequences_per_step} sequences of a batch "
                "(--batch-size × --gradient-accumulation-steps)"
            )
        return self

    @model_validator(mode="after")
    def _zero_advantages_are_forwarded_where_needed(self) -> TrainerConfig:
        if self.forward_zero_advantages is False and self.needs_zero_advantages is not None:
            raise ValueError(
                "--no-forward-zero-advantages would leave out sequences that are learned from with "
                f"{self.needs_zero_advantages}; leave it out"
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
            raise ValueError(
                f"--deterministic needs --temperature 1, which is {self.temperature:g}"
            )
        if self.deterministic and self.share_prefixes:
            raise ValueError(
                "--deterministic and --share-prefixes exclude each other: in which order the gradients of what is shared are "
                "summed would depend on which rollouts share a pass; leave one of them out"
            )
        return self

    @property
    def several_updates(self) -> bool:
        """Whether a batch may be for more than one optimizer update."""
        return self.ppo_epochs * self.minibatches > 1

    @property
    def oldest_rollouts(self) -> int | None:
        """Most weight versions that rollouts may be behind; None for any.

        Exact runs take fresh ones alone unless told.
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
        """Whether a restart of vLLM is due after optimizer step `step`.

        None is due after the last step.
        """
        return (
            self.starts_vllm
            and 0 < step < self.training_steps
            and step % self.restart_interval == 0
        )

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of optimizer step `step` is due: at each interval, and at the end."""
        interval = self.checkpoint_interval
        return step == self.training_steps or bool(interval and step % interval == 0)

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rollouts of a group begin with is forwarded once."""
        return not self.deterministic if self.share_prefixes is None else self.share_prefixes

    @property
    def needs_zero_advantages(self) -> str | None:
        """What is learned from sequences whose advantages are all 0; None if nothing is."""
        given = [
            flag_of(name)
            for name in ("kl_coef", "entropy_coef", "distill_coef")
            if getattr(self, name)
        ]
        return " and ".join(given) or (
            f"--loss {self.loss}" if is_import(self.method.loss) else None
        )

    @property
    def forwards_zero_advantages(self) -> bool:
        """Whether sequences whose advantages are all 0 are forwarded.

        Exact runs compare every token with vLLM's.
        """
        if self.forward_zero_advantages is None:
            return self.deterministic or self.needs_zero_advantages is not None
        return self.forward_zero_advantages

    @property
    def fetches_ahead(self) -> bool:
        """Whether a batch is fetched while another is trained on: it is then one version older than
        it need be.
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
        """Whether a second model is held, for the divergence from it; under adapters the base model
        is there already.
        """
        return bool(self.kl_coef) and not self.has_base_model and not self.ref_logprobs_from_workers

    @property
    def asks_reference_workers(self) -> bool:
        """Whether reference workers compute what groups come without."""
        return bool(self.kl_coef) and self.ref_logprobs_from_workers

    @property
    def has_base_model(self) -> bool:
        """Whether the model that is trained can compute its reference's logprobs too."""
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
