"""Start the rollout service: `run-api`, or `python -m atroposlib.cli.run_api`."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from pydantic import BaseModel, Field, field_validator

from atroposlib.command_line import (
    AtLeastOne,
    ByteCount,
    Network,
    Port,
    Seconds,
    parse_options,
)
from atroposlib.dashboard.app import PageRoute, RunPage
from atroposlib.dashboard.auth import SESSION_SECONDS, STATE_FILE, PageAuth
from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.live.monitor import LiveSource, Place, observed_folder
from atroposlib.dashboard.live.servers import ServerWatch
from atroposlib.dashboard.rollouts.archive import MAX_BYTES
from atroposlib.dashboard.rollouts.recorder import RolloutRecorder
from atroposlib.dashboard.rollouts.text import TOKENIZER
from atroposlib.dashboard.run_folders.runs import LIVE
from atroposlib.service.app import make_app
from atroposlib.service.records import Limits
from atroposlib.service.service import RolloutService
from atroposlib.service.sqlite_store import SqliteStore, set_aside
from atroposlib.service.store import MemoryStore, Store, StoreError
from atroposlib.utils.files import use_private_files
from atroposlib.utils.log_lines import log_to_stderr
from atroposlib.utils.processes import port_user
from atroposlib.web.addresses import ListeningHost, ServerAddress
from atroposlib.web.bounded_protocol import StoppingServer, bounded_protocol
from atroposlib.web.connections import (
    ACCEPT_AT_ONCE,
    LISTEN_BACKLOG,
    SERVER_KEEPS_SECONDS,
    connections_allowed,
)
from atroposlib.web.keys import VLLM_KEY
from atroposlib.web.middleware import Access, RequestLimits

logger = logging.getLogger("atroposlib.cli.run_api")

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that waits for the interpreter gets it: the writer must not wait for
every parsed group."""


QUEUE_LIMITS, REQUEST_LIMITS = Limits(), RequestLimits()
"""The defaults."""


class ApiOptions(BaseModel):
    """The options of the rollout service."""

    host: ListeningHost | None = Field(
        default=None,
        description="address to listen on (default: 127.0.0.1; 0.0.0.0 if there is an API key)",
    )
    port: Port = Field(default=8000, description="port to listen on; 0 for any free one")
    api_key_file: Path | None = Field(
        default=None,
        description="file with the bearer token that every request must carry (default: the "
        "environment variable ROLLOUT_API_KEY). Without a key, only programs that "
        "call this service by its address are answered, and no web pages",
    )
    api_key: str | None = Field(
        default=None,
        description="the token itself, which every user of this machine then sees in ps: use one "
        "of the above",
    )
    allow_host: list[str] = Field(
        default=[],
        description="without a key: another name by which clients call this service, such as that "
        "of a proxy or container; may be given several times",
    )
    trusted_proxy: list[Network] = Field(
        default=[],
        description="address, or network such as 10.0.0.0/8, of a proxy whose X-Forwarded-For and "
        "X-Forwarded-Proto are believed. Every program at that address can send them "
        "(default: none; may be given several times)",
    )
    store: str | None = Field(
        default=None,
        description="file that keeps everything, to be continued when it exists, or 'memory' "
        "(default: runs/rollouts-PORT.db, continued until its trainer has ended the run)",
    )
    new_run: bool = Field(
        default=False,
        description="begin a new run in any case; what the store held is moved to "
        "NAME.previous.db beside it",
    )
    max_queue_groups: AtLeastOne = Field(
        default=QUEUE_LIMITS.max_groups, description="groups held at most"
    )
    max_queue_bytes: ByteCount = Field(
        default=QUEUE_LIMITS.max_bytes, ge=1, description="bytes held at most, such as 4G"
    )
    max_body_bytes: ByteCount = Field(
        default=REQUEST_LIMITS.max_body, ge=1, description="bytes of one request, such as 256M"
    )
    silent_after: Seconds = Field(
        default=QUEUE_LIMITS.silent_after,
        description="seconds without a call after which no batch waits for an environment's "
        "reserved share, and the page shows it, or a trainer, as silent",
    )
    request_timeout: Seconds = Field(
        default=REQUEST_LIMITS.seconds, description="seconds for one request"
    )
    run_folder: Path | None = Field(
        default=None,
        description="folder of the run, where the page at /ui finds the trainer's files and keeps "
        "its own. Without it, the trainer names the folder, and the page's own files "
        "are kept beside the store",
    )
    keep_rollouts: ByteCount = Field(
        default=MAX_BYTES,
        ge=0,
        description="bytes of the newest rollouts that are kept for the page, such as 4G; 0 for none",
    )
    tokenizer: str | None = Field(
        default=None,
        description="folder or name of the tokenizer that makes text of rollouts (default: that "
        "of the model that the trainer names)",
    )
    vllm_server: list[ServerAddress] = Field(
        default=[],
        description="address of a vLLM server, such as http://10.0.0.5:9001, to which the page "
        "may send VLLM_API_KEY to read its bridge state. Other servers are polled "
        "without the key (may be given several times)",
    )
    no_ui: bool = Field(default=False, description="serve no page for people at /ui")
    ui_session_seconds: Seconds = Field(
        default=SESSION_SECONDS, description="seconds that a sign-in on the page lasts"
    )
    access_log: bool = Field(default=False, description="log every request")
    reload: bool = Field(
        default=False,
        description="taken as the public command takes it, and ignored: start it again",
    )

    @field_validator("run_folder")
    @classmethod
    def _can_be_a_folder(cls, value: Path | None) -> Path | None:
        for part in () if value is None else (value, *value.parents):
            if os.path.exists(part) and not os.path.isdir(part):
                raise ValueError(f"{part} is a file; give the folder of the run")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _has_a_tokenizer(cls, value: str | None) -> str | None:
        is_path = value is not None and (value[:1] in ("/", ".", "~") or value.count("/") > 1)
        if is_path and not os.path.isfile(Path(str(value)).expanduser() / TOKENIZER):
            raise ValueError(
                f"there is no {value}/{TOKENIZER}; give a folder that has one, or a model's name"
            )
        return value


def parse_arguments(arguments: Sequence[str] | None = None) -> ApiOptions:
    """Read the command line."""
    description = "The rollout service: takes scored groups, hands out batches."
    return parse_options(ApiOptions, arguments, "run-api", description)


def read_api_key(given: str | None, path: Path | None) -> str | None:
    """The key that requests must carry: from the command line, a file or the environment, in this
    order; None without one.

    Raises:
        SystemExit: it cannot be read, or cannot be sent in a header; the message has the remedy,
            but not the key.
    """
    key, source = os.environ.get("ROLLOUT_API_KEY", ""), "ROLLOUT_API_KEY"
    if path is not None:
        source = f"--api-key-file {path}"
        try:
            key = path.read_text().strip()
            readable = path.stat().st_mode & 0o077
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"error: {source} cannot be read: {error}") from None
        if not key:
            raise SystemExit(
                f"error: {source} is empty; write a key into it, such as that of: openssl rand -hex 32"
            )
        if readable:
            logger.warning("%s can be read by other users of this machine; chmod 600 it", source)
    if given is not None:
        key, source = given, "--api-key"
        logger.warning(
            "every user of this machine can see --api-key in ps; set ROLLOUT_API_KEY or --api-key-file instead"
        )
    if not all(33 <= ord(character) <= 126 for character in key):
        raise SystemExit(
            f"error: the key from {source} has characters that no header can carry; use letters and digits"
        )
    return key or None


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address.

    Raises:
        SystemExit: the address cannot be had; the message has the reason and the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SystemExit(
            f"error: --host {host} cannot be resolved ({error}); pass an address of this machine"
        ) from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno or 0)
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"error: [Errno {error.errno}] port {port} is in use by {port_user(port)}; stop it or pass --port"
            ) from None
        raise SystemExit(
            f"error: [Errno {error.errno}] cannot listen on {host}:{port}: {reason}; pass --host or --port"
        ) from None
    return sock


class Server(StoppingServer):
    """Log the addresses of the service; uvicorn itself names only the socket that it was given."""

    has_page = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        if self.started:
            for sock in sockets or []:
                sock.listen(LISTEN_BACKLOG)  # uvicorn has made it as short as ACCEPT_AT_ONCE
                host, port = sock.getsockname()[:2]
                address = f"[{host}]" if ":" in host else host
                logger.info("Uvicorn running on http://%s:%d (Press CTRL+C to quit)", address, port)
                if self.has_page:
                    here = address if address not in ("0.0.0.0", "[::]") else socket.gethostname()
                    logger.info("see the run at http://%s:%d/ui", here, port)


def store_path(name: str | None, port: int) -> Path:
    """Return the file of the store that --store names; by default one for each port."""
    return Path(name) if name is not None else Path("runs") / f"rollouts-{port}.db"


def files_of(store: str | None, port: int, run_folder: Path | None) -> list[Path]:
    """Return the files and folders that an earlier process of this service may have left."""
    path = store_path(store, port)
    files = (
        []
        if store == "memory"
        else [
            path,
            *path.parent.glob(f"{path.name}-*"),
            *path.parent.glob(f"{path.stem}.previous.*"),
        ]
    )
    observed = observed_folder(run_folder, None if store == "memory" else path)
    return [*files, observed.path] if observed.is_kept else files


def open_store(name: str | None, port: int, new_run: bool = False) -> Store:
    """The store that --store names.

    Without a name, the store of the last run is continued unless its trainer reported the end of
    the run. A stop of the service, by a person or a scheduler, does not end a run. A file that was
    named is continued either way.

    Raises:
        StoreError: it cannot be opened.
    """
    if name == "memory":
        logger.info("store: memory only; whatever ends this process loses all groups")
        return MemoryStore()
    path = store_path(name, port)
    if name is None:
        path.parent.mkdir(exist_ok=True)
    if not path.exists():
        return SqliteStore(path)
    why = "because of --new-run"
    if not new_run:
        store = SqliteStore(path)
        if name is not None:
            return store
        if not store.load().state.get("ended"):
            logger.info(
                "going on with the run in %s, which has not ended (--new-run begins a new one)",
                path,
            )
            return store
        store.close()
        why = (
            f"because the trainer of the last one reported its end (--store {path} would have "
            "gone on with it)"
        )
    groups = set_aside(path)
    logger.info("beginning a new run, %s", why)
    if groups:
        previous = path.with_suffix(".previous.db")
        logger.warning(
            "%d groups of the last run are kept in %s; to continue that run, pass --store %s",
            groups,
            previous,
            previous,
        )
    return SqliteStore(path)


def make_page(service: RolloutService, auth: PageAuth, port: int, options: ApiOptions) -> RunPage:
    """Return the page at /ui, over the run of this service and the runs beside it.

    From now on the service keeps rollouts for the page.
    """
    hub, run_folder = Hub(), options.run_folder
    store = service.store.path if isinstance(service.store, SqliteStore) else None
    observed = observed_folder(run_folder, store)
    if auth.sessions is not None and observed.is_kept:
        auth.sessions.keep_in(observed.path / STATE_FILE)
    if options.keep_rollouts:
        service.recorder = RolloutRecorder(
            observed.path,
            most_bytes=options.keep_rollouts,
            tokenizer=options.tokenizer,
            on_kept=lambda newest, groups: hub.publish_from_thread(
                LIVE, "rollouts", {"newest": newest, "count": groups}
            ),
        )
    place = Place(port=port, run_folder=run_folder)
    watch = ServerWatch(os.environ.get(VLLM_KEY) or None, frozenset(options.vllm_server))
    live = LiveSource(service, observed, hub, place, watch)
    run_or_store = run_folder or store
    folders = [run_or_store.absolute().parent] if run_or_store else []
    return RunPage(folders, auth, hub, live)


def make_service(options: ApiOptions, port: int) -> RolloutService:
    """Open the store, and return the service over it.

    Raises:
        StoreError: the store cannot be opened.
    """
    store = open_store(options.store, port, options.new_run)
    limits = Limits(options.max_queue_groups, options.max_queue_bytes, options.silent_after)
    service = RolloutService(store, limits)
    if isinstance(store, SqliteStore):
        queue = service.queue
        logger.info(
            "store %s: %d groups, step %d", store.path, queue.held_groups, queue.current_step
        )
    return service


def make_server(service: RolloutService, options: ApiOptions, access: Access, port: int) -> Server:
    """Return the web server of a service and its page."""
    server_page: PageRoute | None = None
    when_stopping = [service.trainer_activity.count]
    if not options.no_ui:
        auth = PageAuth.of_key(access.api_key, access.hosts, options.ui_session_seconds)
        page = make_page(service, auth, port, options)
        server_page = PageRoute(page)
        when_stopping.append(page.hub.close)
    limits = RequestLimits(options.max_body_bytes, options.request_timeout, access)
    config = uvicorn.Config(
        make_app(service, limits, server_page),
        access_log=options.access_log,
        log_config=None,
        http=bounded_protocol(options.request_timeout, connections_allowed(logger.info)),
        ws="none",
        backlog=ACCEPT_AT_ONCE,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=SERVER_KEEPS_SECONDS,
        # By default uvicorn believes the proxy headers of every program on this machine.
        proxy_headers=bool(options.trusted_proxy),
        forwarded_allow_ips=options.trusted_proxy,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # httpx logs each request to a vLLM server.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    server = Server(config)
    server.has_page = server_page is not None
    server.when_stopping = when_stopping
    return server


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are answered first."""
    options = parse_arguments(argv)
    log_to_stderr()
    if options.reload:
        logger.warning(
            "--reload is ignored: to run changed code, start the service again; what it holds is in its store"
        )
    api_key = read_api_key(options.api_key, options.api_key_file)
    host = options.host or ("0.0.0.0" if api_key else "127.0.0.1")
    sock = listen(host, options.port)
    port = sock.getsockname()[1]
    try:
        if api_key:
            use_private_files(files_of(options.store, port, options.run_folder))
        service = make_service(options, port)
    except (StoreError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    names = frozenset(name.lower() for name in options.allow_host)
    server = make_server(service, options, Access(api_key, host, names), port)

    def stop(*_: object) -> None:
        # uvicorn handles the signals while it serves, and raises them once more when all is
        # answered and closed.
        if not server.started:
            raise SystemExit("stopped before it served")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # what was imported stays for good, so no collection has to look at it
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[sock]))
    logger.info("stopped")


if __name__ == "__main__":
    main()
