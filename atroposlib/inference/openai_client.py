"""Any OpenAI-compatible endpoint: text in, text out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.inference.client import (
    MODEL_NOT_NAMED,
    APIServer,
    APIServerConfig,
    ReasoningConfig,
)
from atroposlib.inference.pool import ServerIsAway
from atroposlib.web.addresses import proxy_for
from atroposlib.web.connections import LIMITS, end_slow_answer_async
from atroposlib.web.keys import LOOPBACK, OPENAI_KEY, VLLM_KEY, bearer, host_of

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", ChatCompletion, Completion)
PROBE_TIMEOUT = 10.0
MAX_TEMPERATURE = 2.0
"""The limit of OpenAI's interface, and of vLLM in all of its routes."""
OPENAI_ADDRESS = "https://api.openai.com/v1"
"""Used by the client if a configuration names no address."""


class OpenAIRoutes(APIServer):
    """The part that all servers with OpenAI's routes share."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        super().__init__(config, reasoning_config)
        self._client: AsyncOpenAI | None = None
        self._http: httpx.AsyncClient | None = None
        self._served: dict[str, Any] | None = None

    @property
    def openai(self) -> AsyncOpenAI:
        """Made on first use, in the event loop that uses it."""
        if self._client is None:
            self._client = AsyncOpenAI(
                api_key=self.api_key or "x",
                base_url=self.openai_url if self.config.base_url else None,
                timeout=self.config.timeout,
                max_retries=0,
                http_client=DefaultAsyncHttpxClient(**self._proxy_options()),
            )
        return self._client

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(
                base_url=self.root_url,
                headers=bearer(self.api_key),
                **self._proxy_options(),
                timeout=httpx.Timeout(self.config.timeout, connect=5.0),
                limits=LIMITS,
                event_hooks={"response": [end_slow_answer_async]},
            )
        return self._http

    def _proxy_options(self) -> dict[str, Any]:
        """Return the part of a client's arguments that decides about proxies.

        The proxy is chosen here, because httpx makes no client at all if it cannot read NO_PROXY.
        """
        if not self.honours_proxies:
            return {"trust_env": False}
        if proxy := proxy_for(self.root_url or OPENAI_ADDRESS):
            return {"trust_env": True, "proxy": proxy}
        return {
            "trust_env": True,
            "transport": httpx.AsyncHTTPTransport(trust_env=True, limits=LIMITS),
        }

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._http is not None:
            await self._http.aclose()

    async def probe(self) -> str | None:
        if not self.config.base_url:
            return None
        return await self._fault_of(f"{self.openai_url}/models")

    async def _fault_of(self, path: str, good: range = range(500)) -> str | None:
        """GET a path, and return what is wrong with the server.

        Args:
            path: of the route.
            good: statuses of a server that is well. By default it may lack the route, or require
                another key: it is there all the same.
        """
        try:
            response = await self.http.get(path, timeout=PROBE_TIMEOUT)
        except httpx.HTTPError as error:
            return f"no answer ({type(error).__name__})"
        if response.status_code in good:
            return None
        return f"{response.url.path} answered {response.status_code}"

    async def served_model(self) -> dict[str, Any]:
        """The first entry of /v1/models: `id`, and with vLLM `max_model_len`."""
        if self._served is None:
            response = await self.http.get(f"{self.openai_url}/models", timeout=PROBE_TIMEOUT)
            response.raise_for_status()
            models = response.json().get("data") or []
            if not models:
                raise ServerIsAway(f"{self.openai_url}/models lists no model")
            self._served = models[0]
        return self._served

    async def model(self) -> str:
        if self.config.model_name in MODEL_NOT_NAMED and self.config.base_url:
            return (await self.served_model())["id"]
        return self.config.model_name

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        reasoning = self.reasoning_config or ReasoningConfig()
        if extra := reasoning.build_extra_body(self.config.base_url):
            kwargs["extra_body"] = extra | (kwargs.get("extra_body") or {})
        return await self._ask(self.openai.chat.completions.create, kwargs)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        return await self._ask(self.openai.completions.create, kwargs)

    async def _ask(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any]
    ) -> Answer:
        """One request, or `n` of them when the server ignores `n`."""
        n = kwargs.get("n") or 1
        if n > 1 and self.config.n_kwarg_is_ignored:
            return await self._ask_separately(create, kwargs, n)
        answer = await self._ask_once(create, kwargs)
        if len(answer.choices) == n:
            return answer
        if len(answer.choices) != 1:
            raise ValueError(
                f"{self.root_url} answered {len(answer.choices)} choices where {n} were asked for"
            )
        logger.warning("%s ignores n: asking %d times instead from now on", self.root_url, n)
        self.config.n_kwarg_is_ignored = True
        rest = await self._ask_separately(create, kwargs, n - 1)
        answer.choices.extend(rest.choices)
        return answer

    async def _ask_once(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any]
    ) -> Answer:
        answer = await create(**kwargs)
        if not isinstance(
            getattr(answer, "choices", None), list
        ):  # the client checks nothing; a page of HTML is a text
            raise ValueError(f"{self.openai_url} answered no completion, but {str(answer)!r:.200}")
        return answer

    async def _ask_separately(
        self, create: Callable[..., Awaitable[Answer]], kwargs: dict[str, Any], n: int
    ) -> Answer:
        single = {key: value for key, value in kwargs.items() if key != "n"}
        answers = await asyncio.gather(*(self._ask_once(create, single) for _ in range(n)))
        for answer in answers[1:]:
            answers[0].choices.extend(answer.choices)
        return answers[0]


class OpenAIServer(OpenAIRoutes):
    """An OpenAI-compatible endpoint, for evaluation and for data that is not trained token by
    token.

    It may be anywhere: proxies apply unless it is on this machine, and a key goes only to where it
    belongs.
    """

    highest_temperature = MAX_TEMPERATURE

    @property
    def openai_url(self) -> str:
        """Other providers have these routes below other paths: only an address without any lacks
        /v1.
        """
        path = urlsplit(self.config.base_url or "").path.rstrip("/")
        return self.root_url if path and not path.endswith("/v1") else super().openai_url

    @property
    def key_variable(self) -> str | None:
        host = host_of(self.config.base_url)
        if not host or host == "api.openai.com" or host.endswith(".api.openai.com"):
            return OPENAI_KEY
        return VLLM_KEY if host in LOOPBACK else None

    @property
    def honours_proxies(self) -> bool:
        return host_of(self.config.base_url) not in LOOPBACK
