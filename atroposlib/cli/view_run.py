"""Read rollouts: `view-run FILE_OR_FOLDER …` makes pages of files, and `view-run` alone shows what a rollout service got last.

It only looks: a trainer gets every batch all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from atroposlib.api.gate.access import Access, NotAllowedError
from atroposlib.cli.run_api import listen
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.frontend.rollout_page import rollout_page, write_rollout_page
from atroposlib.utils.keys import SERVICE_KEY, bearer, given_or_variable

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
ROWS = ("tokens", "masks", "inference_logprobs")
"""What holds an entry for each token of each sequence."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="view-run", description="Read rollouts: of files, or as a rollout service gets them.")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="groups (JSON lines), or folders of such files"
    )
    parser.add_argument("--port", type=int, default=9001, help="without files: where the page is (default: 9001; 0 for any)")
    parser.add_argument(
        "--group-size", type=int, default=2, help="without files: responses of a group that are shown (default: 2)"
    )
    parser.add_argument("--max-token-len", type=int, default=2048, help="without files: tokens of each (default: 2048)")
    parser.add_argument(
        "--tokenizer", help="folder or name of the sampled model's tokenizer; files with messages can do without"
    )
    parser.add_argument("--api-url", default="http://localhost:8000", help="the rollout service; its key is $ROLLOUT_API_KEY")
    return parser.parse_args(argv)


def group_files(paths: list[Path]) -> Iterator[Path]:
    """The files of groups among these paths and in these folders.

    Raises:
        UsageError: a path is not there, a file that was named holds no groups, or a folder has none.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} is not there")
        found = [file for file in sorted(path.rglob("*.jsonl")) if first_group(file)] if path.is_dir() else [path]
        if not found or not first_group(found[0]):
            raise UsageError(f"{path} holds no groups: a line of such a file is an object with scores, and tokens or messages")
        yield from found


def first_group(file: Path) -> dict[str, Any] | None:
    """The group in the first line of a file; None if that is something else.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            group = json.loads(next(lines, ""))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        return None
    return group if isinstance(group, dict) and group.get("scores") and (group.get("tokens") or group.get("messages")) else None


def write_page(file: Path, tokenizer: Any) -> Path:
    """Write the page of a file of groups beside it.

    Raises:
        UsageError: what is in it cannot be shown, or not without a tokenizer.
    """
    group = first_group(file) or {}
    try:
        if tokenizer is not None and group.get("tokens"):
            return write_rollout_page(file, tokenizer, file.stem)
        if not group.get("messages"):
            raise UsageError(f"{file} holds tokens and no messages: name the sampled model's tokenizer (--tokenizer)")
        generate_html(file)
        return file.with_suffix(".html")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} has a line that is no group: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot write the page of {file}: {error.strerror}") from None


def beginning(group: dict[str, Any], sequences: int, tokens: int) -> dict[str, Any]:
    """The first sequences of a group, and their first tokens."""
    size = len(group["scores"])
    kept = {
        name: value[:sequences] if isinstance(value, list) and len(value) == size else value for name, value in group.items()
    }
    if any(len(row) > tokens for row in kept["tokens"]):
        kept |= {name: [row[:tokens] for row in kept[name]] for name in ROWS if kept.get(name)}
        kept["messages"] = None  # they would go on where the tokens end
    return kept


def make_app(service: httpx.AsyncClient, tokenizer: Any, group_size: int, max_token_len: int) -> Starlette:
    """A page of what the service got last. It changes when it is loaded again."""
    access = Access(bound_to=HOST)

    async def latest(request: Request) -> Response:
        try:
            access.check(request.method, request.url.path, request.headers)
            answer = await service.get("/latest_example")
            answer.raise_for_status()
        except NotAllowedError as error:
            return PlainTextResponse(error.detail, error.status)
        except httpx.HTTPError as error:
            return PlainTextResponse(
                f"the rollout service {service.base_url} does not answer: {error or type(error).__name__}", 502
            )
        group = answer.json()
        if not group["scores"]:
            return PlainTextResponse("Nothing has been posted yet: load this page again.")
        shown = json.dumps(beginning(group, group_size, max_token_len))
        return HTMLResponse(await asyncio.to_thread(rollout_page, [shown], tokenizer, "The newest group"))

    return Starlette(routes=[Route("/", latest)])


def serve(arguments: argparse.Namespace, tokenizer: Any) -> None:
    """Show what comes in, until it is stopped."""
    headers = bearer(given_or_variable(None, SERVICE_KEY))
    try:
        service = httpx.AsyncClient(base_url=arguments.api_url, headers=headers, timeout=30.0, trust_env=False)
        if service.base_url.scheme not in ("http", "https"):
            raise ValueError("it begins with neither http:// nor https://")
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"--api-url {arguments.api_url!r} is no address: {error}") from None
    sock = listen(HOST, arguments.port)
    print(f"the newest group of {arguments.api_url} is shown at http://{HOST}:{sock.getsockname()[1]}", flush=True)
    app = make_app(service, tokenizer, arguments.group_size, arguments.max_token_len)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


def main(argv: list[str] | None = None) -> None:
    """Write the pages, or show what comes in."""
    arguments = parse_arguments(argv)
    tokenizer = None
    try:
        if arguments.group_size < 1 or arguments.max_token_len < 1:
            raise UsageError("--group-size and --max-token-len are numbers above 0")
        if arguments.tokenizer is None and not arguments.paths:
            raise UsageError("the service holds tokens: name the sampled model's tokenizer (--tokenizer), or a file to show")
        files = list(group_files(arguments.paths))
        if arguments.tokenizer is not None:
            from atroposlib.inference.tokenizers import load_tokenizer  # seconds, which files of messages do not need

            tokenizer = load_tokenizer(arguments.tokenizer)
        for file in files:
            print(write_page(file, tokenizer), flush=True)
        if not files:
            serve(arguments, tokenizer)
    except EnvironmentFailure as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
