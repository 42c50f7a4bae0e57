"""Settings that every environment has.

A subclass adds its own; each becomes a flag `--env.<name>` and a YAML key.
"""

from enum import Enum

from pydantic import Field, SecretStr, model_validator

from atroposlib.inference.client import WarnsOfUnknownKeys
from atroposlib.web.addresses import HttpAddress
from atroposlib.wire import StrictNumbers

ENV_NAMESPACE = "env"
OPENAI_NAMESPACE = "openai"
SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."
"""Prefixes of flags, such as `--env.group_size` and `--openai.base_url`, and of the same keys in a
YAML file."""


class EvalHandlingEnum(Enum):
    """Treatment of training rollouts while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(WarnsOfUnknownKeys, StrictNumbers):
    """Settings of an environment. Times are in seconds, lengths in tokens."""

    # Requests to the model
    group_size: int = Field(
        default=4, ge=1, description="Responses per item, scored and advantaged together"
    )
    max_token_length: int = Field(
        default=2048, ge=1, description="Most tokens that one response may have"
    )
    tokenizer_name: str | None = Field(
        default=None,
        description="Tokenizer (name or path); by default that of the model which the inference server serves",
    )
    seed: int = Field(default=42, description="Seed of everything random in the environment")
    seed_rollouts: bool = Field(
        default=False,
        description="Sample each item with a seed of its own, made of `seed` and the item's "
        "number. A deterministic server then gives the same rollouts in every run",
    )
    exact_resume: bool = Field(
        default=False,
        description="After a kill of any process, serve the items, with the seeds, that the run "
        "would have had without it (docs/runs.md). Needs a trainer with "
        "--max-staleness 0 and no second environment; implies seed_rollouts",
    )

    # Which items come next
    curriculum: bool = Field(
        default=False,
        description="Pass over items that the model gets always right or always wrong, as measured while it trains",
    )
    curriculum_floor: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="With it: the share of such items that is sampled nevertheless",
    )
    curriculum_path: str | None = Field(
        default=None,
        description="The file that keeps what was measured; by default beside the environment's checkpoints",
    )

    # The rollout service and the trainer behind it
    rollout_server_url: HttpAddress = Field(
        default="http://localhost:8000", description="URL of the rollout service"
    )
    rollout_server_api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        description="Bearer token of the rollout service, if it wants one; by default $ROLLOUT_API_KEY",
    )
    service_timeout: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait for the rollout service, the trainer or the inference server",
    )
    total_steps: int = Field(
        default=-1,
        description="Stop at this trainer step at the latest; -1: when the trainer is done",
    )
    batch_size: int = Field(
        default=-1,
        description="Sequences per batch; the trainer's own is used once it has registered",
    )
    inference_weight: float = Field(
        default=1.0,
        description="This environment's share of the batch, relative to the others'; -1: 1",
    )
    min_batch_allocation: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least share of each batch that is reserved for this environment",
    )

    # A teacher, for on-policy distillation
    teacher_url: HttpAddress | None = Field(
        default=None,
        description="vLLM server of a teacher that scores every sampled token (docs/distillation.md); groups with equal scores "
        "are then sent, too",
    )
    teacher_model_name: str | None = Field(
        default=None, description="Model to ask for there; by default the first one served"
    )
    teacher_api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        description="Bearer token of the teacher; by default $TEACHER_API_KEY",
    )
    teacher_timeout: float = Field(
        default=1800.0,
        gt=0,
        description="Longest wait for the teacher while it is away; groups are kept until then",
    )
    teacher_max_requests: int = Field(
        default=64, ge=1, description="Most sequences that the teacher scores at once"
    )

    # Number of rollouts that run at once
    max_num_workers: int = Field(
        default=-1,
        description="Most items in work at once; -1: max_num_workers_per_node per server",
    )
    max_num_workers_per_node: int = Field(
        default=8, ge=1, description="Most items in work at once per inference server"
    )
    max_batches_offpolicy: int = Field(
        default=3,
        description="Most batches queued or in work, which bounds how old data can get; below 0: no bound",
    )
    worker_timeout: float = Field(
        default=600.0, description="Longest time for one item; -1: no limit"
    )
    rollout_retries: int = Field(
        default=2, ge=0, description="Further attempts at a rollout that fails"
    )
    max_consecutive_failures: int = Field(
        default=64, ge=0, description="Give up when this many items in a row failed; 0: never"
    )

    # Evaluation
    steps_per_eval: int = Field(
        default=100, description="Trainer steps between evaluations; 0 or less: none while serving"
    )
    max_eval_workers: int = Field(
        default=16, ge=1, description="Evaluation problems in work at once"
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN,
        description="Treatment of training rollouts during an evaluation",
    )
    eval_limit_ratio: float = Field(
        default=0.5, description="Share of the workers that train during a LIMIT_TRAIN evaluation"
    )
    eval_size: int = Field(default=200, description="Problems per evaluation; -1: all")
    eval_output: str | None = Field(
        default=None,
        description="Write the evaluation's result to this JSON file and its samples next to it",
    )
    data_dir_to_save_evals: str | None = Field(
        default=None, description="Write metrics.json and samples.jsonl to this folder"
    )

    # Logs and files
    use_wandb: bool = Field(default=False, description="Log to Weights & Biases as well")
    wandb_name: str | None = Field(
        default=None, description="Name of the environment at the service and in W&B"
    )
    num_rollouts_to_keep: int = Field(
        default=32, ge=0, description="Groups kept for the table of rollouts in W&B"
    )
    num_rollouts_per_group_for_logging: int = Field(
        default=1, description="Rollouts kept per group for it; -1: all"
    )
    min_items_sent_before_logging: int = Field(
        default=2, description="Groups to send before metrics are logged again"
    )
    metrics_path: str | None = Field(
        default=None, description="Append every logged set of metrics to this JSON lines file"
    )
    data_path_to_save_groups: str | None = Field(
        default=None, description="Write every scored group to this JSON lines file"
    )
    ensure_scores_are_not_same: bool = Field(
        default=True,
        description="Drop groups whose scores are all equal: without a teacher they teach nothing (advantages of zero)",
    )
    resample_equal_scores: int = Field(
        default=0,
        ge=0,
        description="Further attempts at an item with all scores equal, before it is dropped",
    )
    include_messages: bool = Field(
        default=False, description="Send the messages to the trainer too"
    )

    # Reasoning models behind OpenAI-compatible endpoints
    thinking_mode: bool = Field(default=False, description="Ask the endpoint for reasoning")
    reasoning_effort: str | None = Field(
        default=None, description="none, minimal, low, medium, high or xhigh"
    )
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="Most tokens of reasoning"
    )
    custom_thinking_prompt: str | None = Field(
        default=None, description="System prompt of environments that ask for reasoning themselves"
    )

    @model_validator(mode="after")
    def _items_have_one_order(self) -> "BaseEnvConfig":
        if self.curriculum and self.exact_resume:
            raise ValueError(
                "curriculum chooses items by what was measured up to now: exact_resume could not give them again, leave out one"
            )
        return self
