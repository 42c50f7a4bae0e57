"""The environment's side of a managed server that runs behind a proxy; see `managed_server_proxy`."""

from types import TracebackType
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.inference.generation import current_versions
from atroposlib.inference.messages import checked_messages
from atroposlib.inference.sequence_tracker import SequenceNode, node_of
from atroposlib.web.connections import LIMITS
from atroposlib.web.keys import PROXY_KEY, bearer, given_or_variable

PASSED_ON = ("messages", "max_tokens", "temperature", "n", "stop", "tools", "tool_choice", "chat_template_kwargs")


class ProxyManagedServer:
    """One session. `get_url` is the OpenAI address to give to another program; `fetch_state` reads what it made.

    A proxy that has a key wants it from the other program too, as its OpenAI key: `$ATROPOS_PROXY_API_KEY`.
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
        self._http = httpx.AsyncClient(
            base_url=f"{self.proxy_url}/{session_uuid}",
            headers=bearer(api_key),
            timeout=httpx.Timeout(1200.0, connect=5.0),
            trust_env=False,
            limits=LIMITS,
        )

    def get_url(self) -> str:
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """As `ManagedServer.chat_completion`.

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
        """The sequences as of the last completion made here, or the last `fetch_state`."""
        return {"nodes": list(self.nodes)}

    def node_of(self, answer: ChatCompletion, index: int = 0) -> SequenceNode:
        """The sequence that ends with an answer's choice; as `get_state` for what another program made."""
        return node_of(self.nodes, answer.id, index)

    async def fetch_state(self) -> dict[str, Any]:
        """Ask the proxy for the sequences, those that another program made included."""
        response = await self._http.get("/nodes")
        response.raise_for_status()
        self.nodes = [SequenceNode(**node) for node in response.json()["nodes"]]
        if record := current_versions.get():
            known = [node.weights for node in self.nodes if node.weights is not None]
            record.note([weights.version for weights in known], [weights.epoch for weights in known])
            if record.sampled is not None:
                for node in self.nodes:
                    record.sampled.note([], [node.tokens], [node.sampling], [(node.metadata or {}).get("finish_reason")])
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        httpx.HTTPError: the proxy is not there, or refuses.
    """
    api_key = given_or_variable(None, PROXY_KEY)
    async with httpx.AsyncClient(timeout=30.0, headers=bearer(api_key), trust_env=False) as http:
        body = {"tool_parser": tool_parser, "track_tree": track_tree, "base_url": base_url}
        response = await http.post(f"{proxy_url.rstrip('/')}/sessions/create", json=body)
        response.raise_for_status()
    session = response.json()
    return ProxyManagedServer(
        proxy_url, session["uuid"], session.get("model_name", model_name), session.get("base_url"), api_key
    )
