"""See runs: `view-run FOLDER_OR_FILE …` serves the page of what lies there on this machine, of runs
that are over or go on.

Without a path it prints where a rollout service serves the page itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvicorn
from pydantic import BaseModel, Field

from atroposlib.cli.run_api import listen
from atroposlib.command_line import Port, parse_options
from atroposlib.dashboard.app import RunPage, make_offline_app
from atroposlib.dashboard.auth import PageAuth
from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.run_folders.runs import find_runs
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.web.addresses import HttpAddress
from atroposlib.web.bounded_protocol import StoppingServer, bounded_protocol
from atroposlib.web.connections import connections_allowed

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
NO_EFFECT = "of the public view-run; without effect: the page shows all of a group"
ASK_SECONDS = 10.0
REQUEST_SECONDS = 60.0
"""For the head of a request, for its body, and for which a browser may leave an answer untaken."""


class ViewOptions(BaseModel):
    """The options of this command."""

    paths: list[Path] = Field(
        default=[], description="folders of runs, or files of groups (JSON lines)"
    )
    port: Port = Field(default=9001, description="port of the page; 0 for any free one")
    tokenizer: str | None = Field(
        default=None,
        description="of the sampled model, for files of groups: a folder or a name; files with "
        "messages can do without",
    )
    api_url: HttpAddress = Field(
        default="http://localhost:8000", description="without a path: the rollout service"
    )
    group_size: int | None = Field(default=None, description=NO_EFFECT)
    max_token_len: int | None = Field(default=None, description=NO_EFFECT)


def parse_arguments(arguments: Sequence[str] | None = None) -> ViewOptions:
    """Read the command line."""
    description = "See runs, from their folders or as a rollout service has them."
    return parse_options(ViewOptions, arguments, "view-run", description, positional=("paths",))


def check_paths(paths: list[Path]) -> None:
    """Refuse what holds nothing to see.

    Raises:
        UsageError: a path is not there, or it holds neither a run nor groups.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} is not there")
        if not find_runs(path):
            raise UsageError(
                f"{path} holds no run and no groups: a run has a metrics.jsonl. A line of a file "
                "of groups is an object with scores, and tokens or messages"
            )


def serve(paths: list[Path], port: int, tokenizer: str | None = None) -> None:
    """Serve the page of these folders and files until the process is stopped."""
    hub = Hub()
    page = RunPage([path.absolute() for path in paths], PageAuth(), hub, tokenizer=tokenizer)
    sock = listen(HOST, port)
    print(f"see the run at http://{HOST}:{sock.getsockname()[1]}/ui (Ctrl-C ends this)", flush=True)
    app = make_offline_app(page)
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=2,
        proxy_headers=False,
        http=bounded_protocol(REQUEST_SECONDS, connections_allowed(logger.info)),
        ws="none",
    )
    server = StoppingServer(config)
    server.when_stopping = [hub.close]
    server.run(sockets=[sock])


def find_service(url: str) -> str:
    """The address of the page that a rollout service serves.

    Raises:
        UsageError: nothing answers there, or it serves no page.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/ui/sign-in", timeout=ASK_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UsageError(
            f"no rollout service answers at --api-url {url}: {error or type(error).__name__}; name the run's folder to see "
            "what lies there"
        ) from None
    if answer.status_code not in (200, 303):
        raise UsageError(
            f"{url} serves no page (it answers {answer.status_code}): was it started with --no-ui?"
        )
    return f"{url.rstrip('/')}/ui"


def main(argv: list[str] | None = None) -> None:
    """Serve the page, or print its address at the service."""
    arguments = parse_arguments(argv)
    try:
        check_paths(arguments.paths)
        if arguments.paths:
            serve(arguments.paths, arguments.port, arguments.tokenizer)
        else:
            print(f"see the run at {find_service(arguments.api_url)}", flush=True)
    except EnvironmentFailure as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
