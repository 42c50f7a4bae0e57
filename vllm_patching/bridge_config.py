"""vllm_bridge_config.json: what a server publishes for trainers on its machine, and what it leaves behind when it is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_patching.manifest import Manifest


def write(
    path: Path, facts: Mapping[str, Any], manifests: Sequence[Manifest], handles: Sequence[Mapping[str, Any] | None]
) -> None:
    """Write the file atomically, readable by this user alone: it holds the handles to the weights' memory.

    Args:
        path: where to.
        facts: the server's model, versions, epoch, trainer and process.
        manifests, handles: per rank, the layout and the storage handles (None where storage is not shared).
    """
    data = {
        **facts,
        "rendezvous": {
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
            "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        },
        "param_mappings": manifests[0].to_json()["param_mappings"],
        "ranks": [{**m.to_json(), "handles": h} for m, h in zip(manifests, handles, strict=True)],
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(data, file)
    temporary.replace(path)


def awaited_trainer(path: Path) -> str:
    """Why a server that starts now must not serve its checkpoint's weights; empty if it may.

    A server that was killed in the middle of a run leaves its file. If the trainer named there still lives (or cannot be
    looked up, being on another machine), it holds newer weights, and will send them as soon as it finds this server.
    """
    try:
        left = json.loads(path.read_text())
        trainer, epoch = str(left["trainer"]), int(left["epoch"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # of another version, or torn: it says nothing about a trainer
    if epoch == 0 or runs_here(trainer) is False:
        return ""
    return (
        f"the server before this one was serving {trainer}, which may still be training: waiting for its weights. "
        f"If it is not coming back, delete {path} and start this server again to serve the checkpoint's"
    )


def runs_here(trainer: str) -> bool | None:
    """Whether the process of "trainer HOST:PID" runs on this machine; None if it is on another one, and cannot be looked up."""
    host, _, pid = trainer.removeprefix("trainer ").rpartition(":")
    if host != os.uname().nodename or not pid.isdigit():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"  # ended, and its parent has not asked how
