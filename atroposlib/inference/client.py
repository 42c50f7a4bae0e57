"""The common part of all clients of inference servers: settings, concurrency and timings."""

import math
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal
from urllib.parse import urlparse

import numpy as np
from anyio import CapacityLimiter
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import Field

from atroposlib.inference.generation import Generation
from atroposlib.inference.pool import HealthReport, InferenceCalls, ServerPool, Split
from atroposlib.inference.sampling_record import sampling_of
from atroposlib.utils.unknown_keys import WarnsOfUnknownKeys
from atroposlib.web.addresses import HttpAddresses
from atroposlib.web.keys import given_or_variable
from atroposlib.wire import StrictNumbers

__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "ReasoningConfig",
    "ServerBaseline",
]


VALID_REASONING_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh"}

OPENAI_EFFORT = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}
"""OpenAI's own endpoint knows three levels."""
MODEL_NOT_NAMED = ("", "default", "none")


@dataclass
class ReasoningConfig:
    """Amount of reasoning before an answer.

    Attributes:
        enabled: ask for reasoning; set by itself when one of the others is.
        effort: one of `VALID_REASONING_EFFORTS`.
        max_tokens: most tokens of reasoning, 1024 to 32000.

    Raises:
        ValueError: a value out of range.
    """

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ValueError(
                f"reasoning effort {self.effort!r}: choose one of {', '.join(sorted(VALID_REASONING_EFFORTS))}"
            )
        if self.max_tokens is not None and not 1024 <= self.max_tokens <= 32000:
            raise ValueError(f"{self.max_tokens} reasoning tokens: give 1024 to 32000")
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """The request's extra body for the endpoint at `base_url`, or None when no reasoning is
        asked for.

        `use_max_tokens` is for endpoints that take a number of tokens only: an effort becomes one.
        """
        if not self.enabled:
            return None
        if base_url and (urlparse(base_url).hostname or "").endswith("api.openai.com"):
            return {"reasoning_effort": OPENAI_EFFORT[self.effort or "medium"]}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.max_tokens is not None and (use_max_tokens or self.effort is None):
            reasoning["max_tokens"] = self.max_tokens
        elif self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        return {"reasoning": reasoning}

    @classmethod
    def from_env_config(cls, env_config: Any) -> "ReasoningConfig":
        return cls(
            env_config.thinking_mode, env_config.reasoning_effort, env_config.max_reasoning_tokens
        )


class AsyncSemWithAdaptiveWeight:
    """Slots: at weight `w`, at most `max(1, floor(max_val * w))` holders at once.

    Holders keep their slots when the weight falls. Waiters are served first come, first served.
    """

    def __init__(self, value: int):
        self.max_val = value
        self.weight = 1.0
        self._limiter = CapacityLimiter(self.limit)
        # The limiter counts borrowers. A fresh object borrows each slot, so that one task can hold
        # several.
        self._slots: list[object] = []

    @property
    def limit(self) -> int:
        return max(1, math.floor(self.max_val * self.weight))

    @property
    def in_use(self) -> int:
        return self._limiter.borrowed_tokens

    @property
    def free(self) -> int:
        """Slots that could be taken now."""
        return max(0, self.limit - self.in_use)

    def min_val(self) -> float:
        """Return the slots that the weight leaves unused."""
        return self.max_val * (1.0 - self.weight)

    def update_weight(self, weight: float) -> None:
        self.weight = min(1.0, max(0.0, weight))
        self._limiter.total_tokens = self.limit

    def locked(self) -> bool:
        return self.in_use >= self.limit or self._limiter.statistics().tasks_waiting > 0

    async def acquire(self) -> bool:
        slot = object()
        await self._limiter.acquire_on_behalf_of(slot)
        self._slots.append(slot)
        return True

    def release(self) -> None:
        self._limiter.release_on_behalf_of(self._slots.pop())

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ServerBaseline(WarnsOfUnknownKeys, StrictNumbers):
    """Settings of a server, without its address."""

    timeout: int = Field(default=1200, description="Longest time for one request, in seconds")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Most concurrent requests for training"
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Most concurrent requests for evaluation"
    )
    model_name: str = Field(
        default="default", description="Model to ask for; by default the one that the server serves"
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="Requests over which timings are averaged"
    )
    server_type: Literal["openai", "trl", "sglang", "vllm"] = Field(
        default="openai",
        description="vllm: token in, token out through /generate; openai: any OpenAI-compatible endpoint",
    )
    tokenizer_name: str = Field(
        default="none", description="Tokenizer to use; by default the environment's"
    )


class APIServerConfig(ServerBaseline):
    """Settings of a server at one address."""

    api_key: str | None = Field(
        default="",
        exclude=True,
        repr=False,
        description="Bearer token; by default $VLLM_API_KEY for a vLLM server and $OPENAI_API_KEY for OpenAI's own endpoint",
    )
    base_url: HttpAddresses | None = Field(
        default="",
        description="Address, with or without /v1; of an openai server, an address with any other path is taken as it is",
    )
    n_kwarg_is_ignored: bool = Field(
        default=False, description="The server ignores n: ask n times instead"
    )
    health_check: bool = Field(
        default=True, description="Wait for the server to be well after it could not be reached"
    )


class APIServer(InferenceCalls):
    """A client of one inference server.

    `chat_completion`, `completion`, `tokens_and_logprobs_completion` and `generate` take the
    request's fields as keyword arguments, and `split="eval"` to run within the evaluation's share
    of the concurrency. If the server is away, another one of its pool answers. If all are away, the
    request waits. After other failures it is sent up to three times.
    """

    role = "inference server"
    address_flag = "--openai.base_url"
    highest_temperature: float | None = None
    """The limit of the server, if it has one. Requests above it are refused here."""
    polled_always = False
    """The pool polls it all the time if it has other servers; otherwise only while it is away."""
    pool: ServerPool
    """Servers that answer for each other; one of its own until a manager has several."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.pool = ServerPool([self], self.role, self.address_flag)
        self.max_sequence_length: int | None = None
        """Most tokens of prompt and completion together that a trainer takes; set by the
        environment."""
        length = config.rolling_buffer_length
        self.timings: dict[Split, deque[tuple[float, int]]] = {
            "train": deque(maxlen=length),
            "eval": deque(maxlen=length),
        }
        """(seconds, attempts) of each answered request."""

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return (self.config.base_url or "").rstrip("/").removesuffix("/v1")

    @property
    def openai_url(self) -> str:
        """The address below which OpenAI's routes are, such as /models."""
        return f"{self.root_url}/v1"

    @property
    def key_variable(self) -> str | None:
        """The environment variable that holds the key when the configuration gives none."""
        return None

    @property
    def api_key(self) -> str | None:
        """Bearer token, or None."""
        return given_or_variable(self.config.api_key, self.key_variable)

    @property
    def honours_proxies(self) -> bool:
        """Return whether HTTP_PROXY and similar variables apply.

        A proxy does not reach the user's own servers.
        """
        return False

    def slots(self, split: Split) -> AsyncSemWithAdaptiveWeight:
        """Return the share of the concurrency that a request takes a slot of."""
        return self.eval_sem if split == "eval" else self.sem

    @property
    def server_healthy(self) -> bool:
        return self.pool.healthy(self)

    async def probe(self) -> str | None:
        """None when the server is well, else what is wrong."""
        return None

    def like(self, other: "APIServer") -> None:
        """Take over what an environment has set on another server."""
        self.max_sequence_length = other.max_sequence_length
        self.sem.update_weight(other.sem.weight)
        self.eval_sem.update_weight(other.eval_sem.weight)
        if hasattr(self, "tokenizer"):
            self.tokenizer = getattr(other, "tokenizer", None)

    async def health(self) -> HealthReport:
        """Return the server's health."""
        return HealthReport(wrong=(await self.probe() if self.config.health_check else None) or "")

    async def model(self) -> str:
        """The name of the model to ask for."""
        return self.config.model_name

    async def close(self) -> None:
        """Close the connections, if there are any."""

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Wait until the server is well."""
        await self.pool.wait_until_well("being checked")

    async def update_weight(self, weight: float) -> None:
        """Use this share of the concurrency: several environments divide one server between them."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion: ...

    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list, list, list, list]:
        """(prompt tokens, [completion][position] tokens, the same of logprobs, finish reasons)."""
        raise NotImplementedError(
            f"{type(self).__name__} at {self.root_url} gives no token ids with logprobs to train on: "
            "use a vLLM server with /generate and --openai.server_type vllm"
        )

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        answer = await self._tokens_and_logprobs_completion_wrapper(**kwargs)
        return Generation(*answer, sampling=sampling_of(kwargs, len(answer[1])))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} cannot give the logprobs of a prompt")

    async def _request(self, method: str, fields: dict[str, Any]) -> Any:
        return await self.pool.request(method, fields, preferred=self)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Request times in seconds and mean attempts, added to those in `metrics_dict` under
        `server/<server_name>_…`.
        """
        metrics = metrics_dict or {}
        for prefix, timings in (("", self.timings["train"]), ("eval_", self.timings["eval"])):
            if timings:
                seconds, attempts = zip(*timings, strict=True)
                name = f"server/{server_name}_{prefix}"
                metrics[f"{name}request_time_avg"] = float(np.mean(seconds))
                metrics[f"{name}request_time_std"] = float(np.std(seconds))
                metrics[f"{name}request_time_99p"] = float(np.percentile(seconds, 99))
                metrics[f"{name}average_num_attempts"] = float(np.mean(attempts))
        return metrics
