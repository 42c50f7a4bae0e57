"""An OpenAI-compatible HTTP proxy: managed servers for programs in other languages and processes,
one session for each.

    python -m atroposlib.inference.proxy --base-url http://localhost:9001/v1 --port 9100

POST /sessions/create makes a session. The program then uses `<proxy>/<session>/v1` as its OpenAI
address, and the environment reads the tokens at GET /<session>/nodes.
"""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from atroposlib.command_line import AtLeastOne, ByteCount, Port, Seconds, parse_options
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.chat_template import load_tokenizer
from atroposlib.inference.client import describe
from atroposlib.inference.managed_server import ManagedServer
from atroposlib.inference.server_manager import APIServerConfig, ServerManager
from atroposlib.utils.log_lines import log_to_stderr
from atroposlib.web.addresses import HttpAddresses, ListeningHost
from atroposlib.web.bounded_protocol import bounded_protocol
from atroposlib.web.connections import connections_allowed
from atroposlib.web.keys import PROXY_KEY, VLLM_KEY, given_or_variable
from atroposlib.web.middleware import (
    READ_ONLY_PATHS,
    Access,
    HTTPRefusal,
    RequestLimits,
    RequestLimitsMiddleware,
    openai_answer,
)

logger = logging.getLogger("atroposlib.inference.proxy")

PROXY_READ_ONLY_PATHS = READ_ONLY_PATHS | {"/health", "/v1/models", "/servers", "/sessions"}
"""Paths whose GET changes nothing."""
MAX_BODIES = 256 << 20
"""Bytes of all bodies of more than 1 MiB that a proxy works on at a time."""


@dataclass
class SessionState:
    """One session.

    Attributes:
        created_at: Unix time, for people.
        last_accessed: Unix time of the end of the last request, for people.
        used: time of the end of the last request by the clock of `Sessions`.
        busy: requests under way.
    """

    uuid: str
    managed_server: ManagedServer
    model_name: str
    base_url: str | None = None
    created_at: float = field(default_factory=time.time)
    last_accessed: float = field(default_factory=time.time)
    used: float = 0.0
    busy: int = 0


class Sessions:
    """The open sessions.

    Args:
        most: sessions at once.
        seconds: time for which a session without a request is kept.
        clock: seconds of a clock that does not jump.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.most, self.seconds, self.clock = most, seconds, clock
        self._open: dict[str, SessionState] = {}

    def all(self) -> list[SessionState]:
        """Return the open sessions."""
        self._forget()
        return list(self._open.values())

    def create(
        self, managed_server: ManagedServer, model_name: str, base_url: str | None
    ) -> SessionState:
        """Open a session.

        Raises:
            HTTPRefusal: as many sessions as allowed are open.
        """
        self._forget()
        if len(self._open) >= self.most:
            raise HTTPRefusal(
                429,
                f"{len(self._open)} sessions are open, as many as may be: end some with DELETE /<session>, wait (they expire "
                f"{self.seconds:g} s after their last request), or raise --max-sessions",
            )
        session = SessionState(
            str(uuid.uuid4()), managed_server, model_name, base_url, used=self.clock()
        )
        self._open[session.uuid] = session
        return session

    @contextmanager
    def used(self, session_uuid: str) -> Iterator[SessionState]:
        """Return a session, which cannot expire in the block.

        Raises:
            HTTPRefusal: the session does not exist.
        """
        session = self._find(session_uuid)
        session.busy += 1
        try:
            yield session
        finally:
            session.busy -= 1
            session.last_accessed, session.used = time.time(), self.clock()

    def delete(self, session_uuid: str) -> None:
        """End a session.

        Raises:
            HTTPRefusal: the session does not exist.
        """
        session = self._find(session_uuid)
        del self._open[session.uuid]

    def _find(self, session_uuid: str) -> SessionState:
        self._forget()
        if session_uuid not in self._open:
            raise HTTPRefusal(
                404,
                f"Session {session_uuid[:64]} not found: it was never made, was ended, or expired "
                f"{self.seconds:g} s after its last request (--session-timeout)",
            )
        return self._open[session_uuid]

    def _forget(self) -> None:
        oldest = self.clock() - self.seconds
        self._open = {
            session_uuid: session
            for session_uuid, session in self._open.items()
            if session.busy or session.used >= oldest
        }


class ChatCompletionProxyRequest(BaseModel):
    """The fields of OpenAI's chat request that the proxy passes on."""

    messages: list[dict[str, Any]]
    max_tokens: int = Field(1024, ge=1)
    temperature: float = 1.0
    n: int = Field(1, ge=1, le=1024)
    stop: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages without empty fields. `atroposlib.inference.chat_template` checks them."""
        return [
            {name: value for name, value in message.items() if value is not None}
            for message in self.messages
        ]


class SessionCreateRequest(BaseModel):
    """`base_url` pins the session to one of the servers."""

    tool_parser: str = "hermes"
    track_tree: bool = False
    base_url: str | None = None


class SetupRequest(BaseModel):
    """The servers to use from now on, each with the fields of `APIServerConfig`, and the name of
    their model.
    """

    servers: list[APIServerConfig]
    model_name: str | None = None


@dataclass(frozen=True)
class ProxyLimits:
    """Limits of a proxy.

    Attributes:
        access: rules for callers.
        max_sessions: sessions at once.
        session_seconds: time for which a session without a request is kept.
        max_body: bytes of a request.
        body_seconds: time in which the body of a request must arrive.
    """

    access: Access = field(default_factory=Access)
    max_sessions: int = 1024
    session_seconds: float = 3600.0
    max_body: int = 16 << 20
    body_seconds: float = 60.0

    def of_requests(self) -> RequestLimits:
        """Return the limits of one request.

        A completion may take as long as the inference server needs.
        """
        return RequestLimits(
            self.max_body,
            self.body_seconds,
            self.access,
            large_bodies=None,
            bodies_budget=MAX_BODIES,
            has_answer_deadline=False,
            remedy="shorten the messages, or raise --max-body-bytes",
        )


@dataclass(slots=True)
class Proxy:
    """State of a proxy: its servers and its sessions."""

    server_manager: ServerManager
    tokenizer: Any
    model_name: str
    sessions: Sessions


def proxy_of(request: Request) -> Proxy:
    """Return the state of the application that answers a request."""
    proxy: Proxy = request.app.state.proxy
    return proxy


TheProxy = Annotated[Proxy, Depends(proxy_of)]


async def session_of(session_uuid: str, proxy: TheProxy) -> AsyncIterator[SessionState]:
    """Keep the session in the path open while its request is answered."""
    with proxy.sessions.used(session_uuid) as session:
        yield session


TheSession = Annotated[SessionState, Depends(session_of)]


@contextmanager
def failures_as_refusals() -> Iterator[None]:
    """Refuse a request whose completion fails, with the status by which clients of OpenAI decide on
    another try.
    """
    try:
        yield
    except (UsageError, RolloutFailure) as error:
        raise HTTPRefusal(400, str(error)) from error
    except EnvironmentFailure as error:
        raise HTTPRefusal(503, str(error)) from error
    except Exception as error:
        raise HTTPRefusal(502, describe(error)) from error


def url_of(server: Any) -> str | None:
    """Return the address of an inference server; None if it has none."""
    return getattr(getattr(server, "config", None), "base_url", None)


router = APIRouter()


@router.get("/")
async def root() -> dict[str, str]:
    """Report that the proxy is there. Needs no key."""
    return {"message": "managed servers"}


@router.get("/health")
async def health(proxy: TheProxy) -> dict[str, Any]:
    """Return the numbers of sessions and of servers."""
    servers = proxy.server_manager.servers
    return {
        "status": "ok",
        "model": proxy.model_name,
        "sessions": len(proxy.sessions.all()),
        "servers": len(servers),
        "healthy_servers": sum(getattr(server, "server_healthy", True) for server in servers),
    }


@router.get("/v1/models")
async def models(proxy: TheProxy) -> dict[str, Any]:
    """Return the served model, in OpenAI's form."""
    return {
        "object": "list",
        "data": [{"id": proxy.model_name, "object": "model", "owned_by": "local"}],
    }


@router.post("/setup")
async def setup(request: SetupRequest, proxy: TheProxy) -> dict[str, Any]:
    """Replace the servers. Open sessions keep their server."""
    if not request.servers:
        raise HTTPRefusal(400, "servers must not be empty")
    proxy.server_manager.servers = ServerManager(request.servers).servers
    proxy.model_name = request.model_name or proxy.model_name
    return {
        "status": "ok",
        "servers": len(proxy.server_manager.servers),
        "model_name": proxy.model_name,
    }


@router.get("/servers")
async def servers(proxy: TheProxy) -> dict[str, Any]:
    """Return the addresses of the servers."""
    rows = [
        {"index": i, "base_url": url_of(server)}
        for i, server in enumerate(proxy.server_manager.servers)
    ]
    return {"servers": rows}


@router.post("/sessions/create")
async def create_session(request: SessionCreateRequest, proxy: TheProxy) -> dict[str, Any]:
    """Open a session."""
    server = proxy.server_manager.pick()
    if request.base_url is not None:
        pinned = [
            entry for entry in proxy.server_manager.servers if url_of(entry) == request.base_url
        ]
        if not pinned:
            raise HTTPRefusal(404, f"no server at {request.base_url}; GET /servers lists them")
        server = pinned[0]
    try:
        managed = ManagedServer(server, proxy.tokenizer, request.track_tree, request.tool_parser)
    except ValueError as error:
        raise HTTPRefusal(400, str(error)) from error
    session = proxy.sessions.create(managed, proxy.model_name, url_of(server))
    return {
        "uuid": session.uuid,
        "model_name": proxy.model_name,
        "tool_parser": request.tool_parser,
        "base_url": session.base_url,
        "created_at": session.created_at,
    }


@router.get("/sessions")
async def list_sessions(proxy: TheProxy) -> dict[str, Any]:
    """Return the open sessions."""
    fields = ("uuid", "model_name", "base_url", "created_at", "last_accessed")
    return {
        "sessions": [
            {name: getattr(session, name) for name in fields} for session in proxy.sessions.all()
        ]
    }


@router.post("/{session_uuid}/v1/chat/completions")
async def chat_completions(
    request: ChatCompletionProxyRequest, session: TheSession
) -> JSONResponse:
    """Complete a chat, and keep its tokens in the session."""
    if not request.messages:
        raise HTTPRefusal(400, "messages must not be empty")
    fields = request.model_dump(exclude_none=True, exclude={"messages"})
    with failures_as_refusals():
        answer = await session.managed_server.chat_completion(
            messages=request.plain_messages(), **fields
        )
    return JSONResponse(answer.model_dump(mode="json", warnings=False))


@router.post("/{session_uuid}/v1/chat/completions/render")
async def render(request: ChatCompletionProxyRequest, session: TheSession) -> dict[str, Any]:
    """Return the prompt of a chat, as text and as tokens."""
    managed = session.managed_server
    chat = (request.plain_messages(), request.tools, request.chat_template_kwargs)
    with failures_as_refusals():
        text, ids = managed.render(*chat), managed.prompt_tokens(*chat)
    return {"prompt_text": text, "token_ids": ids, "num_tokens": len(ids)}


@router.get("/{session_uuid}/nodes")
async def nodes(session: TheSession) -> dict[str, Any]:
    """Return the sequences of a session."""
    return {"nodes": [node.model_dump() for node in session.managed_server.tracker.nodes]}


@router.delete("/{session_uuid}")
async def delete_session(session_uuid: str, proxy: TheProxy) -> dict[str, Any]:
    """End a session."""
    proxy.sessions.delete(session_uuid)
    return {"status": "deleted", "uuid": session_uuid}


def create_app(
    server_manager: ServerManager,
    tokenizer: Any,
    model_name: str = "unknown",
    limits: ProxyLimits | None = None,
) -> FastAPI:
    """Make the proxy over the given servers.

    Without `limits`, it answers programs on this machine.
    """
    limits = limits or ProxyLimits(Access(bound_to="127.0.0.1"))
    app = FastAPI(title="Managed servers")
    app.state.proxy = Proxy(
        server_manager, tokenizer, model_name, Sessions(limits.max_sessions, limits.session_seconds)
    )
    app.add_middleware(RequestLimitsMiddleware, limits=limits.of_requests(), refuse=openai_answer)
    app.include_router(router)
    return app


class ProxyOptions(BaseModel):
    """The command line of a proxy."""

    base_url: HttpAddresses = Field(
        default="http://localhost:9001/v1",
        description="the inference server, or several with commas between",
    )
    server_type: Literal["vllm", "sglang"] = Field(
        default="vllm", description="kind of the servers: vllm or sglang"
    )
    tokenizer: str = Field(
        default="", description="name or folder of the served model's tokenizer; required"
    )
    model_name: str = Field(default="default", description="name to report")
    host: ListeningHost | None = Field(
        default=None,
        description=f"address to listen on (default: 127.0.0.1; 0.0.0.0 if {PROXY_KEY} is set)",
    )
    port: Port = Field(default=9100, description="port to listen on")
    allow_host: list[str] = Field(
        default=[], description="without a key: another name by which clients call the proxy"
    )
    max_sessions: AtLeastOne = Field(
        default=ProxyLimits.max_sessions, description="most sessions at once"
    )
    session_timeout: Seconds = Field(
        default=ProxyLimits.session_seconds,
        description="seconds without a request after which a session is forgotten",
    )
    max_body_bytes: Annotated[ByteCount, Field(ge=1)] = Field(
        default=ProxyLimits.max_body, description="most bytes of one request"
    )

    @model_validator(mode="after")
    def _has_a_tokenizer(self) -> Self:
        if not self.tokenizer:
            raise ValueError("--tokenizer is missing: name the served model's tokenizer")
        return self


def main(argv: list[str] | None = None) -> None:
    """Run the proxy in front of one server."""
    options = parse_options(
        ProxyOptions,
        argv,
        "python -m atroposlib.inference.proxy",
        "An OpenAI-compatible proxy that keeps tokens, masks and logprobs. Keys come from the "
        f"environment: callers of this proxy send {PROXY_KEY} as their OpenAI key, and the proxy "
        f"sends {VLLM_KEY} to the vLLM server.",
    )
    log_to_stderr()
    # httpx logs a line for every request to an inference server.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    manager = ServerManager(
        APIServerConfig(base_url=options.base_url, server_type=options.server_type)
    )
    try:
        tokenizer = load_tokenizer(options.tokenizer)
    except EnvironmentFailure as failure:
        raise SystemExit(f"error: --tokenizer: {failure}") from failure
    api_key = given_or_variable(None, PROXY_KEY)
    host = options.host or ("0.0.0.0" if api_key else "127.0.0.1")
    limits = ProxyLimits(
        access=Access(
            api_key,
            host,
            frozenset(name.lower() for name in options.allow_host),
            PROXY_READ_ONLY_PATHS,
        ),
        max_sessions=options.max_sessions,
        session_seconds=options.session_timeout,
        max_body=options.max_body_bytes,
    )
    uvicorn.run(
        create_app(manager, tokenizer, options.model_name, limits),
        host=host,
        port=options.port,
        http=bounded_protocol(limits.body_seconds, connections_allowed(logger.info)),
        ws="none",
        log_config=None,
    )


if __name__ == "__main__":
    main()
