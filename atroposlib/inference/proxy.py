"""Managed servers for programs in other languages and processes: an OpenAI-compatible HTTP service with one session each.

    python -m atroposlib.inference.proxy --base-url http://localhost:9001/v1 --port 9100

A session is made with POST /sessions/create; the program then uses `<proxy>/<session>/v1` as its OpenAI address, and the
environment reads the tokens at GET /<session>/nodes.
"""

import argparse
import logging
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.client import describe
from atroposlib.inference.managed_server import ManagedServer
from atroposlib.inference.proxy_limits import Door, ProxyLimits, error_body
from atroposlib.inference.proxy_sessions import Sessions, TooManySessions, UnknownSession
from atroposlib.inference.proxy_sessions import SessionState as SessionState
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.utils.log_bound import log_to_stderr
from atroposlib.web.access import READING, Access
from atroposlib.web.addresses import argument, http_addresses, listening_host
from atroposlib.web.bounded_protocol import bounded_protocol
from atroposlib.web.keys import PROXY_KEY, VLLM_KEY, given_or_variable
from atroposlib.web.open_files import connections_allowed

logger = logging.getLogger("atroposlib.inference.proxy")

READING_PATHS = READING | {"/health", "/v1/models", "/servers", "/sessions"}
"""Paths whose GET changes nothing."""


class ChatMessage(BaseModel):
    """A message. `atroposlib.inference.messages` checks its fields."""

    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    name: Any = None


class ChatCompletionProxyRequest(BaseModel):
    """The part of OpenAI's chat request that is passed on."""

    messages: list[ChatMessage]
    max_tokens: int = Field(1024, ge=1)
    temperature: float = 1.0
    n: int = Field(1, ge=1, le=1024)
    stop: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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


def openai_error(status_code: int, message: str, error_type: str = "invalid_request_error") -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(error_body(status_code, message, error_type), status_code)


def failed(error: Exception) -> JSONResponse:
    """Return the answer to a request that failed.

    Raises:
        UnknownSession: the error is one; it has a handler of its own.
    """
    if isinstance(error, UnknownSession):
        raise error
    if isinstance(error, UsageError | RolloutFailure):
        return openai_error(400, str(error))
    if isinstance(error, EnvironmentFailure):
        return openai_error(503, str(error), "server_error")
    return openai_error(502, describe(error), "server_error")


def create_app(
    server_manager: ServerManager, tokenizer: Any, model_name: str = "unknown", limits: ProxyLimits | None = None
) -> FastAPI:
    """The proxy over the given servers. Without `limits`, it answers programs that call it by an address of this machine."""
    limits = limits or ProxyLimits(Access(bound_to="127.0.0.1"))
    app = FastAPI(title="Managed servers")
    app.add_middleware(Door, limits=limits)
    sessions = Sessions(limits.max_sessions, limits.session_seconds)

    @app.exception_handler(UnknownSession)
    async def unknown_session(_: Request, error: UnknownSession) -> JSONResponse:
        return openai_error(404, str(error))

    @app.exception_handler(TooManySessions)
    async def too_many_sessions(_: Request, error: TooManySessions) -> JSONResponse:
        return openai_error(429, str(error), "rate_limit_error")

    def url_of(server: Any) -> str | None:
        return getattr(getattr(server, "config", None), "base_url", None)

    def messages_of(request: ChatCompletionProxyRequest) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in request.messages]

    @app.get("/")
    async def root() -> dict[str, str]:
        """Says that the proxy is there; needs no key."""
        return {"message": "managed servers"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        well = sum(getattr(server, "server_healthy", True) for server in server_manager.servers)
        servers = len(server_manager.servers)
        return {
            "status": "ok",
            "model": model_name,
            "sessions": len(sessions.all()),
            "servers": servers,
            "healthy_servers": well,
        }

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
        made = sessions.create(managed, model_name, url_of(server))
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
        return {"sessions": [{name: getattr(session, name) for name in fields} for session in sessions.all()]}

    @app.post("/{session_uuid}/v1/chat/completions")
    async def chat_completions(session_uuid: str, request: ChatCompletionProxyRequest) -> Any:
        if not request.messages:
            return openai_error(400, "messages must not be empty")
        fields = request.model_dump(exclude_none=True, exclude={"messages"})
        try:
            with sessions.used(session_uuid) as session:
                answer = await session.managed_server.chat_completion(messages=messages_of(request), **fields)
        except Exception as error:  # noqa: BLE001 (the client gets it, in OpenAI's shape)
            return failed(error)
        return JSONResponse(answer.model_dump(mode="json", warnings=False))

    @app.post("/{session_uuid}/v1/chat/completions/render", response_model=RenderResponse)
    async def render(session_uuid: str, request: ChatCompletionProxyRequest) -> Any:
        try:
            with sessions.used(session_uuid) as session:
                managed = session.managed_server
                options = request.chat_template_kwargs
                text = managed.render(messages_of(request), request.tools, options)
                ids = managed.prompt_tokens(messages_of(request), request.tools, options)
        except Exception as error:  # noqa: BLE001 (the client gets it, in OpenAI's shape)
            return failed(error)
        return RenderResponse(prompt_text=text, token_ids=ids, num_tokens=len(ids))

    @app.get("/{session_uuid}/nodes")
    async def nodes(session_uuid: str) -> dict[str, Any]:
        with sessions.used(session_uuid) as session:
            return {"nodes": [node.model_dump() for node in session.managed_server.tracker.nodes]}

    @app.delete("/{session_uuid}")
    async def delete_session(session_uuid: str) -> dict[str, Any]:
        sessions.delete(session_uuid)
        return {"status": "deleted", "uuid": session_uuid}

    return app


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    limits = ProxyLimits()
    parser = argparse.ArgumentParser(
        description="An OpenAI-compatible proxy that keeps tokens, masks and logprobs.",
        epilog=f"Keys come from the environment: {PROXY_KEY} is what callers of this proxy must send as their OpenAI key, "
        f"{VLLM_KEY} what the vLLM server wants from this proxy.",
    )
    parser.add_argument(
        "--base-url",
        type=argument(http_addresses),
        default="http://localhost:9001/v1",
        help="the inference server, or several with commas between",
    )
    parser.add_argument("--server-type", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--tokenizer", required=True, help="name or folder of the served model's tokenizer")
    parser.add_argument("--model-name", default="default", help="name to report")
    parser.add_argument(
        "--host",
        type=argument(listening_host),
        help=f"address to listen on (default: 127.0.0.1; 0.0.0.0 if {PROXY_KEY} is set)",
    )
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without a key: another name by which it may be called",
    )
    parser.add_argument("--max-sessions", type=at_least_one(int), default=limits.max_sessions, help="most sessions at once")
    parser.add_argument(
        "--session-timeout",
        type=at_least_one(float),
        default=limits.session_seconds,
        help="seconds without a request after which a session is forgotten",
    )
    parser.add_argument("--max-body-bytes", type=at_least_one(int), default=limits.max_body, help="most bytes of one request")
    return parser.parse_args(argv)


def at_least_one(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A type of argument: a finite number of 1 or more."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 1 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
        return value

    return read


def main(argv: list[str] | None = None) -> None:
    """Run the proxy in front of one server."""
    arguments = parse_arguments(argv)
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request to an inference server
    manager = ServerManager([APIServerConfig(base_url=arguments.base_url, server_type=arguments.server_type)])
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
    except EnvironmentFailure as failure:
        raise SystemExit(f"error: --tokenizer: {failure}") from failure
    api_key = given_or_variable(None, PROXY_KEY)
    host = arguments.host or ("0.0.0.0" if api_key else "127.0.0.1")
    limits = ProxyLimits(
        access=Access(api_key, host, frozenset(name.lower() for name in arguments.allow_host), READING_PATHS),
        max_sessions=arguments.max_sessions,
        session_seconds=arguments.session_timeout,
        max_body=arguments.max_body_bytes,
    )
    uvicorn.run(
        create_app(manager, tokenizer, arguments.model_name, limits),
        host=host,
        port=arguments.port,
        http=bounded_protocol(limits.body_seconds, connections_allowed(logger.info)),
        ws="none",
        log_config=None,
    )


if __name__ == "__main__":
    main()
