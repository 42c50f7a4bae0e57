"""vLLM's OpenAI server: its flags, its app, and how it is run."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing


def server_module() -> ModuleType:
    """The module whose run_server, build_app and init_app_state make vLLM's OpenAI server."""
    module = _first_module(
        "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"
    )
    seams = ("run_server", "setup_server", "build_app", "init_app_state")
    if all(hasattr(module, seam) for seam in seams):
        return module
    raise UnsupportedVllm(seam_missing(", ".join(seams)))


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


def end_at_once_while_loading(module: ModuleType) -> Callable[[], None]:
    """End the server and its engine at once on SIGTERM or SIGINT while the engine loads a model.

    Returns a function that leaves both signals to vLLM again. vLLM forwards them to its engine,
    which looks at them only after the load, and waits for it. The engine is killed here: alone it
    would hold the GPU's memory until the load ends.
    """
    setup_server, before = module.setup_server, dict[signal.Signals, Any]()

    def end(number: int, _: object) -> None:
        name = signal.Signals(number).name
        print(f"[vLLM Patch] {name} while the model loads: the server ends", flush=True)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + number)

    def setup_server_and_signals(*args: Any, **kwargs: Any) -> Any:
        made = setup_server(*args, **kwargs)
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, end)
        return made

    def leave_to_vllm() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    module.setup_server = setup_server_and_signals  # type: ignore[attr-defined]
    return leave_to_vllm


def note_stop_signals(loop: asyncio.AbstractEventLoop) -> list[signal.Signals]:
    """Return a list that gets each signal which a handler of the loop receives from now on.

    vLLM's server returns in the same way after a signal and after the death of its engine.
    """
    received, add_signal_handler = list[signal.Signals](), loop.add_signal_handler

    def add_and_note(number: int, callback: Callable[..., object], *args: Any) -> None:
        def handle() -> None:
            received.append(signal.Signals(number))
            callback(*args)

        add_signal_handler(number, handle)

    loop.add_signal_handler = add_and_note  # type: ignore[assignment, method-assign]
    return received


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
