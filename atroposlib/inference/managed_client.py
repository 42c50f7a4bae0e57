"""An OpenAI client whose requests a managed server answers, in this process: for code that wants a
client and nothing else.

client = managed_client(managed)
answer = await client.chat.completions.create(model="policy", messages=messages)
nodes = managed.get_state()["nodes"]
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from openai import AsyncOpenAI

from atroposlib.errors import NoRoom, UsageError
from atroposlib.inference.client import describe
from atroposlib.inference.managed_server import ManagedServer
from atroposlib.web.middleware import openai_error

# Fields of a request that concern the form of the answer or its billing, and leave the sampling as
# it is.
FORM_ONLY = {
    "model",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "user",
    "metadata",
    "store",
}


class ManagedTransport(httpx.AsyncBaseTransport):
    """Answers `POST …/chat/completions` and `POST …/completions` in OpenAI's form.

    Attributes:
        failure: what went wrong with the last request that failed, before it was put into OpenAI's
            form.
    """

    def __init__(
        self, managed: ManagedServer, fields: Callable[[int], Mapping[str, Any]] | None = None
    ) -> None:
        """
        Args:
            managed: keeps the tokens.
            fields: more fields for the n-th request, from 0, such as a seed; they go over the
                client's.
        """
        self.managed = managed
        self.fields = fields or (lambda number: {})
        self.requests = 0
        self.failure: BaseException | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        chat = request.url.path.endswith("/chat/completions")
        if request.method != "POST" or not (chat or request.url.path.endswith("/completions")):
            return refusal(
                404,
                f"{request.method} {request.url.path}: a managed server answers chat and text completions alone",
            )
        body = json.loads(await request.aread())
        if body.get("stream"):
            return refusal(400, "a managed server does not stream: ask without stream=True")
        sampling = {
            key: value for key, value in body.items() if value is not None and key not in FORM_ONLY
        }
        if "max_completion_tokens" in sampling:
            sampling["max_tokens"] = sampling.pop("max_completion_tokens")
        if isinstance(sampling.get("stop"), str):
            sampling["stop"] = [sampling["stop"]]
        sampling.update(self.fields(self.requests))
        self.requests += 1
        try:
            answer = await (self.managed.chat_completion if chat else self.managed.completion)(
                **sampling
            )
        except NoRoom as error:
            self.failure = error
            # In the words by which clients know such an answer of other servers.
            return refusal(400, f"the prompt exceeds the model's context length: {error}")
        except UsageError as error:
            self.failure = error
            return refusal(400, str(error))
        except Exception as error:  # noqa: BLE001 (kept for the environment, and returned to the client)
            self.failure = error
            return refusal(502, describe(error))
        return httpx.Response(200, json=answer.model_dump(mode="json", warnings=False))


def refusal(status: int, message: str) -> httpx.Response:
    """Return an error in OpenAI's form."""
    return httpx.Response(status, json=openai_error(status, message))


def managed_client(
    managed: ManagedServer, transport: ManagedTransport | None = None
) -> AsyncOpenAI:
    """A client of this managed server.

    It tries nothing again: the managed server's own requests are tried again already.
    """
    # Releases of openai differ in the HTTP library that they name here; all take this one's client.
    http: Any = httpx.AsyncClient(transport=transport or ManagedTransport(managed))
    return AsyncOpenAI(
        base_url="http://managed/v1", api_key="none", max_retries=0, http_client=http
    )
