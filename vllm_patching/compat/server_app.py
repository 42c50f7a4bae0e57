"""vLLM's OpenAI server: its flags, its app, and how it is run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing


def server_module() -> ModuleType:
    """The module whose run_server, build_app and init_app_state make vLLM's OpenAI server."""
    module = _first_module(
        "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"
    )
    if all(hasattr(module, seam) for seam in ("run_server", "build_app", "init_app_state")):
        return module
    raise UnsupportedVllm(seam_missing("run_server, build_app and init_app_state"))


def make_server_parser(
    description: str, parser_class_hook: Callable[[type], type]
) -> argparse.ArgumentParser:
    """vLLM's own server flags, on a parser class that `parser_class_hook` may extend."""
    base = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser: argparse.ArgumentParser = _flags_module().make_arg_parser(
        parser_class_hook(base)(description=description)
    )
    return parser


def validate_server_args(args: argparse.Namespace) -> None:
    """vLLM's own check of its parsed flags."""
    _flags_module().validate_parsed_serve_args(args)


def _flags_module() -> ModuleType:
    """The module of the server's flags: of 0.33, of 0.27 to 0.32, and of 0.26."""
    packages = ("common", "launchers", "openai")
    return _first_module(*(f"vllm.entrypoints.{package}.cli_args" for package in packages))


def _first_module(*names: str) -> ModuleType:
    """Import the first module that this vLLM has.

    Raises:
        ModuleNotFoundError: a package that the module imports is not installed.
        UnsupportedVllm: vLLM has none of them.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise UnsupportedVllm(seam_missing(" or ".join(names)))


def wrap_server(
    module: ModuleType,
    on_app: Callable[[Any], None],
    on_state: Callable[[Any, Any], Awaitable[None]],
) -> None:
    """Call `on_app(app)` when vLLM has built its app and `on_state(engine_client, app.state)` when
    its engine is ready.
    """
    build_app, init_app_state = module.build_app, module.init_app_state

    def build_app_and_extend(*args: Any, **kwargs: Any) -> Any:
        app = build_app(*args, **kwargs)
        on_app(app)
        return app

    async def init_app_state_and_extend(
        engine_client: Any, state: Any, *args: Any, **kwargs: Any
    ) -> None:
        await init_app_state(engine_client, state, *args, **kwargs)
        await on_state(engine_client, state)

    module.build_app = build_app_and_extend  # type: ignore[attr-defined]
    module.init_app_state = init_app_state_and_extend  # type: ignore[attr-defined]
