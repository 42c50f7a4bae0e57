"""The environment's client of a managed server behind a proxy (`atroposlib/inference/proxy.py`)."""

from types import TracebackType
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.inference.chat_template import checked_messages
from atroposlib.inference.generation import current_versions
from atroposlib.inference.managed_server import SequenceNode, node_of
from atroposlib.web.connections import direct_async_client
from atroposlib.web.keys import PROXY_KEY, given_or_variable

PASSED_ON = (
    "messages",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
)


class ProxyManagedServer:
    """One session. `get_url` returns the OpenAI address for another program, and `fetch_state`
    reads that program's sequences.

    If the proxy has a key, the other program sends it as its OpenAI key: `$ATROPOS_PROXY_API_KEY`.
    """

    def __init__(
        self,
        proxy_url: str,
        session_uuid: str,
        model_name: str = "unknown",
        base_url: str | None = None,
        api_key: str | None = None,
    ):
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        self.nodes: list[SequenceNode] = []
        timeout = httpx.Timeout(1200.0, connect=5.0)
        self._http = direct_async_client(f"{self.proxy_url}/{session_uuid}", timeout, api_key)

    def get_url(self) -> str:
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Complete a chat, as `ManagedServer.chat_completion` does.

        Raises:
            UsageError: a message has a form that no prompt can hold, such as an image.
        """
        body = {name: kwargs[name] for name in PASSED_ON if kwargs.get(name) is not None}
        body["messages"] = checked_messages(kwargs["messages"])
        response = await self._http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        await self.fetch_state()
        return ChatCompletion.model_validate(response.json())

    async def completion(self, **kwargs: Any) -> Completion:
        raise NotImplementedError("the proxy speaks chat only: use chat_completion")

    def get_state(self) -> dict[str, Any]:
        """Return the sequences at the last completion of this client, or at the last `fetch_state`."""
        return {"nodes": list(self.nodes)}

    def node_of(self, answer: ChatCompletion, index: int = 0) -> SequenceNode:
        """Return the sequence that ends with a choice of an answer.

        Call `fetch_state` first for another program's answers.
        """
        return node_of(self.nodes, answer.id, index)

    async def fetch_state(self) -> dict[str, Any]:
        """Fetch all sequences of the session from the proxy, another program's too."""
        response = await self._http.get("/nodes")
        response.raise_for_status()
        self.nodes = [SequenceNode(**node) for node in response.json()["nodes"]]
        if record := current_versions.get():
            met = [node.weights for node in self.nodes if node.weights is not None]
            record.note([weights.version for weights in met], [weights.epoch for weights in met])
            if record.sampled is not None:
                for node in self.nodes:
                    record.sampled.note(
                        [],
                        [node.tokens],
                        [node.sampling],
                        [(node.metadata or {}).get("finish_reason")],
                    )
        return self.get_state()

    def reset(self) -> None:
        """Forget the sequences here; the proxy keeps its own until `cleanup`."""
        self.nodes = []

    async def cleanup(self) -> None:
        """End the session."""
        try:
            response = await self._http.delete(f"{self.proxy_url}/{self.session_uuid}")
        finally:
            await self._http.aclose()
        if response.status_code != 404:
            response.raise_for_status()

    async def __aenter__(self) -> "ProxyManagedServer":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cleanup()


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
) -> ProxyManagedServer:
    """Open a session at a proxy.

    Raises:
        httpx.HTTPError: the proxy does not answer, or refuses.
    """
    api_key = given_or_variable(None, PROXY_KEY)
    async with direct_async_client(proxy_url.rstrip("/"), 30.0, api_key) as http:
        body = {"tool_parser": tool_parser, "track_tree": track_tree, "base_url": base_url}
        response = await http.post("/sessions/create", json=body)
        response.raise_for_status()
    session = response.json()
    return ProxyManagedServer(
        proxy_url,
        session["uuid"],
        session.get("model_name", model_name),
        session.get("base_url"),
        api_key,
    )
