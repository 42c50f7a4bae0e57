"""The servers that an environment asks: waiting for them, the tokenizer of what they serve, and
letting go of them.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import httpx

from atroposlib.errors import InferenceUnavailable
from atroposlib.inference.chat_template import require_chat_template
from atroposlib.inference.client import MODEL_NOT_NAMED
from atroposlib.inference.openai_client import OpenAIRoutes, OpenAIServer
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.utils.waiting import Patience
from atroposlib.web.keys import bearer

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)


def tokenizer_name(env: "BaseEnv") -> str | None:
    """The tokenizer that a flag or the configuration names, or None for the served model's."""
    of_server = getattr(getattr(env.server.servers[0], "config", None), "tokenizer_name", None)
    return env.config.tokenizer_name or (None if of_server in MODEL_NOT_NAMED else of_server)


def served_model_blocking(env: "BaseEnv") -> str:
    """Ask the inference server for its model; waits for the server as long as `service_timeout`
    allows.
    """
    server = env.server.servers[0]
    if server.config.model_name not in MODEL_NOT_NAMED:
        return server.config.model_name
    patience = Patience(
        f"inference server at {server.root_url}",
        env.config.service_timeout,
        InferenceUnavailable,
        logger,
        "start it, or pass --openai.base_url or --env.tokenizer_name",
    )
    while True:
        server = env.server.pick()
        try:
            response = httpx.get(
                f"{server.openai_url}/models",
                headers=bearer(server.api_key),
                timeout=10.0,
                trust_env=server.honours_proxies,
            )
            response.raise_for_status()
            return response.json()["data"][0]["id"]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            patience.wait_blocking(
                f"{server.openai_url}/models names no model ({type(error).__name__})"
            )


async def wait_for_inference(env: "BaseEnv") -> None:
    """Wait until an inference server answers, and load the tokenizer."""
    await env.server.wait_until_well()
    name, server = tokenizer_name(env), env.server.pick()
    # An endpoint that gives text only may serve a model whose tokenizer nobody can have: load it
    # when it is used.
    if name is None and isinstance(server, OpenAIRoutes) and not isinstance(server, OpenAIServer):
        try:
            name = await server.model()
        except httpx.HTTPError as error:
            raise InferenceUnavailable(
                f"inference server at {server.root_url}: /v1/models failed ({error}); pass --env.tokenizer_name"
            ) from error
    if name is not None and env._tokenizer is None:
        # Loading takes seconds: not in the event loop, where a signal to stop would have to wait
        # for it.
        env.tokenizer = await asyncio.to_thread(load_tokenizer, name)
    if env._tokenizer is not None and env.sends_chats:
        require_chat_template(env._tokenizer)


async def wait_for_servers(env: "BaseEnv") -> None:
    """Wait until inference servers and teacher answer; see Teaching.wait_for_teacher."""
    await wait_for_inference(env)
    await env._delivery.teaching.wait_for_teacher()


async def close_servers(env: "BaseEnv") -> None:
    """Close the connections to inference servers and teacher."""
    for manager in (env.server, getattr(env, "teacher_server", None)):
        if manager is not None:
            await manager.close()
    await env._delivery.teaching.close()
