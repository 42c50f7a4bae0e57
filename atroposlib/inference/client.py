"""The common part of all clients of inference servers: settings, concurrency, retries, health and
timings.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import Field

from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure, UsageError
from atroposlib.inference.generation import Generation, current_versions
from atroposlib.inference.health import HealthGate
from atroposlib.inference.pool import MovedElsewhere, Router
from atroposlib.inference.reasoning import VALID_REASONING_EFFORTS, ReasoningConfig
from atroposlib.inference.sampling_record import sampling_of
from atroposlib.inference.selection import Look
from atroposlib.inference.semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.utils.unknown_keys import WarnsOfUnknownKeys
from atroposlib.web.addresses import HttpAddresses
from atroposlib.web.keys import given_or_variable
from atroposlib.wire.numbers import StrictNumbers

__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "ReasoningConfig",
    "ServerBaseline",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Split = Literal["train", "eval"]

MAX_ATTEMPTS = 3
MODEL_NOT_NAMED = ("", "default", "none")
# Bad gateway, unavailable, gateway timeout: the server is restarting, or paused for an update of
# its weights.
SERVER_IS_AWAY = (502, 503, 504)
# Why a sample ended that its server broke off, as vLLM and SGLang say it with status 200, when they
# are told to end for one.
CUT_OFF = ("abort", "error")


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


class ServerIsAway(Exception):
    """The server cannot be reached or says that it is not ready: worth waiting for."""


class APIServer(ABC):
    """A client of one inference server.

    `chat_completion`, `completion`, `tokens_and_logprobs_completion` and `generate` take the
    request's fields as keyword arguments, and `split="eval"` to run within the evaluation's share
    of the concurrency. What a server that is away cannot answer is asked of the others behind the
    same router; when all are away, they are waited for. Other failures are tried three times.
    """

    role = "inference server"
    address_flag = "--openai.base_url"
    highest_temperature: float | None = None
    """The limit of the server, if it has one. Requests above it are refused here."""
    looked_at_always = False
    """It is asked how it is all the time while there are others beside it; else only when it was
    away."""
    router: Router
    """Says which server answers what this one is asked; one of its own until a manager has
    several."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.router = Router([self], self.role, self.address_flag)
        self.max_sequence_length: int | None = None
        """Most tokens of prompt and completion together that a trainer takes; set by the
        environment."""
        length = config.rolling_buffer_length
        self.request_timings: deque[float] = deque(maxlen=length)
        self.eval_request_timings: deque[float] = deque(maxlen=length)
        self.attempts_list: deque[int] = deque(maxlen=length)
        self.eval_attempts_list: deque[int] = deque(maxlen=length)

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

    @property
    def gate(self) -> HealthGate:
        """Where requests wait when no server can be asked."""
        return self.router.gate

    @property
    def server_healthy(self) -> bool:
        return self.router.healthy(self)

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

    async def look(self) -> Look:
        """Return the server's health."""
        return Look(wrong=(await self.probe() if self.config.health_check else None) or "")

    async def model(self) -> str:
        """The name of the model to ask for."""
        return self.config.model_name

    async def close(self) -> None:  # noqa: B027 (optional)
        """Close the connections, if there are any."""

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Wait until the server is well."""
        await self.gate.wait_until_well("being checked")

    async def update_weight(self, weight: float) -> None:
        """Use this share of the concurrency: several environments divide one server between them."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion: ...

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list, list, list, list]:
        """(prompt tokens, [completion][position] tokens, the same of logprobs, finish reasons)."""

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        answer = await self._tokens_and_logprobs_completion_wrapper(**kwargs)
        return Generation(*answer, sampling=sampling_of(kwargs, len(answer[1])))

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} cannot give the logprobs of a prompt")

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._request(
            self._chat_completion_wrapper, self._inject_reasoning_kwargs(kwargs)
        )

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._request(self._completion_wrapper, kwargs)

    async def generate(self, **kwargs: Any) -> Generation:
        """Token ids in (`input_ids`, or `prompt` as text), token ids, logprobs and weight versions
        out.
        """
        training = kwargs.get("split") != "eval"
        generation = await self._request(self._generate_wrapper, kwargs)
        if record := current_versions.get():
            record.note_generation(generation, training)
        return generation

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list, list, list, list]:
        result = await self.generate(**kwargs)
        return (
            result.prompt_tokens,
            result.output_tokens,
            result.output_logprobs,
            result.finish_reasons,
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Logprobs of a prompt: `prompt_tokens`, `prompt_topk_token_ids`, `prompt_topk_logprobs`."""
        return await self._request(self._get_logprobs_wrapper, kwargs)

    async def _request(self, call: Callable[..., Awaitable[T]], kwargs: dict[str, Any]) -> T:
        """Ask this server, or one that answers for it.

        `call` is a method; of another server the same one is called.
        """
        require_temperature(
            kwargs.get("temperature"), self.highest_temperature, f"{self.role} at {self.root_url}"
        )
        split: Split = kwargs.pop("split", "train")
        evaluating = split == "eval"
        failures = 0
        tried: list[APIServer] = []
        away_since: float | None = None
        while True:
            server = await self.router.server_for(self, split, tried)
            began = time.monotonic()
            try:
                async with (
                    self.router.carrying(server),
                    server.eval_sem if evaluating else server.sem,
                ):
                    began = time.monotonic()
                    ask = call if server is self else getattr(server, call.__name__)
                    answer = await ask(**{"model": await server.model(), **kwargs})
                require_whole(answer)
                (server.eval_request_timings if evaluating else server.request_timings).append(
                    time.monotonic() - began
                )
                (server.eval_attempts_list if evaluating else server.attempts_list).append(
                    failures + 1
                )
                self.router.answered(server, began)
                return answer
            except (EnvironmentFailure, RolloutFailure, NotImplementedError):
                raise
            except MovedElsewhere:
                tried.append(server)
            except Exception as error:
                tried.append(server)
                if server.config.health_check and is_away(error):
                    # A server may pass its health check and still refuse this request: that ends,
                    # too.
                    away_since = away_since or time.monotonic()
                    waited = time.monotonic() - away_since
                    if waited > self.gate.outage_timeout:
                        raise InferenceUnavailable(
                            f"{self.role} at {server.root_url}: {describe(error)} for {waited:.0f} s, giving up"
                        ) from error
                    self.router.refused(server, began, f"cannot be reached ({describe(error)})")
                    continue
                if not worth_retrying(error):
                    raise
                self.router.failed(server, began)
                failures += 1
                if failures >= MAX_ATTEMPTS:
                    raise
                logger.warning(
                    "request to %s failed, attempt %d of %d: %s",
                    server.root_url,
                    failures,
                    MAX_ATTEMPTS,
                    describe(error),
                )
                if len(set(tried)) >= len(self.router.servers):
                    await asyncio.sleep(0.5 * failures)

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.reasoning_config is not None and (
            extra := self.reasoning_config.build_extra_body(self.config.base_url)
        ):
            kwargs = kwargs | {"extra_body": extra | (kwargs.get("extra_body") or {})}
        return kwargs

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Request times in seconds and mean attempts, added to `metrics_dict` under
        `server/<server_name>_…`.
        """
        metrics = metrics_dict if metrics_dict is not None else {}
        for prefix, timings, attempts in (
            ("", self.request_timings, self.attempts_list),
            ("eval_", self.eval_request_timings, self.eval_attempts_list),
        ):
            if timings:
                metrics[f"server/{server_name}_{prefix}request_time_avg"] = float(np.mean(timings))
                metrics[f"server/{server_name}_{prefix}request_time_std"] = float(np.std(timings))
                metrics[f"server/{server_name}_{prefix}request_time_99p"] = float(
                    np.percentile(timings, 99)
                )
            if attempts:
                metrics[f"server/{server_name}_{prefix}average_num_attempts"] = float(
                    np.mean(attempts)
                )
        return metrics


def require_temperature(temperature: Any, highest: float | None, server: str) -> None:
    """
    Raises:
        UsageError: the server would refuse every request at this temperature.
    """
    if (
        highest is not None
        and isinstance(temperature, int | float)
        and not 0 <= temperature <= highest
    ):
        raise UsageError(
            f"temperature {temperature:g} is outside what the {server} takes, 0 to {highest:g}: change it"
        )


class CutOff(Exception):
    """A server broke off what it sampled."""


def require_whole(answer: object) -> None:
    """
    Raises:
        CutOff: a completion in the answer to a request was broken off, so it is no sample of the
            model.
    """
    if isinstance(answer, Generation):
        reasons = answer.finish_reasons
    elif isinstance(answer, ChatCompletion | Completion):
        reasons = [str(choice.finish_reason) for choice in answer.choices]
    else:
        return
    if cut := [reason for reason in reasons if reason in CUT_OFF]:
        raise CutOff(f"{len(cut)} of {len(reasons)} completions were broken off ({cut[0]})")


def is_away(error: Exception) -> bool:
    """Return whether the failure says that the server is not there, rather than that the request
    was wrong.
    """
    if isinstance(error, ServerIsAway | httpx.TransportError) and not isinstance(
        error, httpx.TimeoutException
    ):
        return True
    if isinstance(error, httpx.ConnectTimeout):
        return True
    if isinstance(error, openai.APIConnectionError) and not isinstance(
        error, openai.APITimeoutError
    ):
        return True
    return status_of(error) in SERVER_IS_AWAY


def worth_retrying(error: Exception) -> bool:
    """Return whether the same request may succeed a second time: not when the server refused it as
    wrong.
    """
    status = status_of(error)
    return status is None or status == 429 or status >= 500


def status_of(error: Exception) -> int | None:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code
    if isinstance(error, openai.APIStatusError):
        return error.status_code
    return None


def describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code}: {error.response.text[:300]}"
    return f"{type(error).__name__}: {error}"
