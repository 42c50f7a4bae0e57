"""Managed servers for programs in other languages and processes: an OpenAI-compatible HTTP service with one session each.

    python -m atroposlib.envs.server_handling.managed_server_proxy --base-url http://localhost:9001/v1 --port 9100

A session is made with POST /sessions/create; the program then uses `<proxy>/<session>/v1` as its OpenAI address, and the
environment reads the tokens at GET /<session>/nodes.
"""

import argparse
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from atroposlib.envs.core import load_tokenizer
from atroposlib.envs.errors import EnvironmentFailure, RolloutFailure
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import describe
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager


class ChatMessage(BaseModel):
    """A message; `content` may be missing where there are calls of tools."""

    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatCompletionProxyRequest(BaseModel):
    """The part of OpenAI's chat request that is passed on."""

    messages: list[ChatMessage]
    max_tokens: int = 1024
    temperature: float = 1.0
    n: int = 1
    stop: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any | None = None


class SessionCreateRequest(BaseModel):
    """`base_url` pins the session to one of the servers."""

    tool_parser: str = "hermes"
    track_tree: bool = False
    base_url: str | None = None


class SetupRequest(BaseModel):
    """The servers to use from now on, each with the fields of `APIServerConfig`, and the name of their model."""

    servers: list[APIServerConfig]
    model_name: str | None = None


class SessionCreateResponse(BaseModel):
    """What a client needs to use a session."""

    uuid: str
    model_name: str
    tool_parser: str
    base_url: str | None = None
    created_at: float


class RenderResponse(BaseModel):
    """A prompt as the model would get it."""

    prompt_text: str
    token_ids: list[int]
    num_tokens: int


@dataclass
class SessionState:
    """One session."""

    uuid: str
    managed_server: ManagedServer
    model_name: str
    base_url: str | None = None
    created_at: float = field(default_factory=time.time)
    last_accessed: float = field(default_factory=time.time)


def openai_error(status_code: int, message: str, error_type: str = "invalid_request_error") -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse({"error": {"message": message, "type": error_type, "code": status_code}}, status_code)


def create_app(server_manager: ServerManager, tokenizer: Any, model_name: str = "unknown") -> FastAPI:
    """The proxy over the given servers."""
    app = FastAPI(title="Managed servers")
    sessions: dict[str, SessionState] = {}

    def session_of(session_uuid: str) -> SessionState:
        if session_uuid not in sessions:
            raise HTTPException(404, f"Session {session_uuid} not found")
        sessions[session_uuid].last_accessed = time.time()
        return sessions[session_uuid]

    def url_of(server: Any) -> str | None:
        return getattr(getattr(server, "config", None), "base_url", None)

    def messages_of(request: ChatCompletionProxyRequest) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in request.messages]

    @app.get("/health")
    async def health() -> dict[str, Any]:
        well = sum(getattr(server, "server_healthy", True) for server in server_manager.servers)
        servers = len(server_manager.servers)
        return {"status": "ok", "model": model_name, "sessions": len(sessions), "servers": servers, "healthy_servers": well}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model_name, "object": "model", "owned_by": "local"}]}

    @app.post("/setup")
    async def setup(request: SetupRequest) -> Any:
        """Replace the servers. Sessions that exist keep the one that they have."""
        nonlocal model_name
        if not request.servers:
            return openai_error(400, "servers must not be empty")
        server_manager.servers = ServerManager(request.servers).servers
        model_name = request.model_name or model_name
        return {"status": "ok", "servers": len(server_manager.servers), "model_name": model_name}

    @app.get("/servers")
    async def servers() -> dict[str, Any]:
        rows = [{"index": i, "base_url": url_of(server)} for i, server in enumerate(server_manager.servers)]
        return {"servers": rows}

    @app.post("/sessions/create", response_model=SessionCreateResponse)
    async def create_session(request: SessionCreateRequest) -> Any:
        server = server_manager.pick()
        if request.base_url is not None:
            pinned = [entry for entry in server_manager.servers if url_of(entry) == request.base_url]
            if not pinned:
                raise HTTPException(404, f"no server at {request.base_url}")
            server = pinned[0]
        try:
            managed = ManagedServer(server, tokenizer, request.track_tree, request.tool_parser)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        made = SessionState(str(uuid.uuid4()), managed, model_name, url_of(server))
        sessions[made.uuid] = made
        return SessionCreateResponse(
            uuid=made.uuid,
            model_name=model_name,
            tool_parser=request.tool_parser,
            base_url=made.base_url,
            created_at=made.created_at,
        )

    @app.get("/sessions")
    async def list_sessions() -> dict[str, Any]:
        fields = ("uuid", "model_name", "base_url", "created_at", "last_accessed")
        return {"sessions": [{name: getattr(session, name) for name in fields} for session in sessions.values()]}

    @app.post("/{session_uuid}/v1/chat/completions")
    async def chat_completions(session_uuid: str, request: ChatCompletionProxyRequest) -> Any:
        session = session_of(session_uuid)
        if not request.messages:
            return openai_error(400, "messages must not be empty")
        fields = request.model_dump(exclude_none=True, exclude={"messages"})
        try:
            answer = await session.managed_server.chat_completion(messages=messages_of(request), **fields)
        except RolloutFailure as failure:
            return openai_error(400, str(failure))
        except EnvironmentFailure as failure:
            return openai_error(503, str(failure), "server_error")
        except Exception as error:  # noqa: BLE001 (the client gets it, in OpenAI's shape)
            return openai_error(502, describe(error), "server_error")
        return JSONResponse(answer.model_dump(mode="json", warnings=False))

    @app.post("/{session_uuid}/v1/chat/completions/render", response_model=RenderResponse)
    async def render(session_uuid: str, request: ChatCompletionProxyRequest) -> Any:
        managed = session_of(session_uuid).managed_server
        text = managed.render(messages_of(request), request.tools)
        ids = managed.tracker.encode(text)
        return RenderResponse(prompt_text=text, token_ids=ids, num_tokens=len(ids))

    @app.get("/{session_uuid}/nodes")
    async def nodes(session_uuid: str) -> dict[str, Any]:
        return {"nodes": [node.model_dump() for node in session_of(session_uuid).managed_server.tracker.nodes]}

    @app.delete("/{session_uuid}")
    async def delete_session(session_uuid: str) -> dict[str, Any]:
        session_of(session_uuid)
        del sessions[session_uuid]
        return {"status": "deleted", "uuid": session_uuid}

    return app


def main() -> None:
    """Run the proxy in front of one server."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible proxy that keeps tokens, masks and logprobs.")
    parser.add_argument("--base-url", default="http://localhost:9001/v1", help="the inference server")
    parser.add_argument("--server-type", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--tokenizer", required=True, help="name or folder of the served model's tokenizer")
    parser.add_argument("--model-name", default="default", help="name to report")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9100)
    arguments = parser.parse_args()
    manager = ServerManager([APIServerConfig(base_url=arguments.base_url, server_type=arguments.server_type)])
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
    except EnvironmentFailure as failure:
        raise SystemExit(f"error: --tokenizer: {failure}") from failure
    uvicorn.run(create_app(manager, tokenizer, arguments.model_name), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
