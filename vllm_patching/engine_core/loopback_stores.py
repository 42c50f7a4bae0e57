"""Stores of PyTorch by which vLLM's workers meet, on loopback where all of them are on this
machine.

A TCPStore listens on every address, whatever host it is given, and it answers anyone. vLLM gives it
127.0.0.1 for the workers of one machine.
"""

from __future__ import annotations

import importlib
import socket
import sys
from types import ModuleType
from typing import Any

from torch.distributed import TCPStore

from vllm_patching.transport.addresses import is_loopback

_NAME = "TCPStore"
_ARGUMENTS = ("host_name", "port", "world_size", "is_master")
_MODULES = ("torch.distributed.rendezvous", "vllm.distributed.utils")


class LoopbackStore(TCPStore):
    """A TCPStore whose listening end, if it has a loopback host, is reached from this machine
    alone.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = dict(zip(_ARGUMENTS, arguments, strict=False)) | named
        hosts = (
            given.get("is_master")
            and named.get("master_listen_fd") is None
            and len(arguments) <= len(_ARGUMENTS)
        )
        listening = _listen(str(given["host_name"]), int(given["port"])) if hosts else None
        if listening is None:
            super().__init__(*arguments, **named)
            return
        with listening:
            given["port"] = listening.getsockname()[1]
            super().__init__(**given, master_listen_fd=listening.detach())


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket on loopback; None for another host, and where torch itself must report that
    there is none.
    """
    if not is_loopback(host):
        return None
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        return None
    return listening


def install() -> None:
    """Have every store that this process makes from now on be a LoopbackStore."""
    for name in _MODULES:
        if name.partition(".")[0] in sys.modules:
            install_in(importlib.import_module(name))


def install_in(module: ModuleType) -> None:
    """Replace one module's name for torch's class, if it has that."""
    if getattr(module, _NAME, None) is TCPStore:
        setattr(module, _NAME, LoopbackStore)
