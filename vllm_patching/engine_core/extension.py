"""Additions to vLLM's engine core, the process that schedules. It sends tokens in few messages
(gathered_outputs.py), notes its steps (progress.py), and checks new weights and goes on in one
call.

As two messages, the workers' answer goes to the front end and its consent comes back while the
engine stands still. The front end may be busy with hundreds of requests. An engine core that is
paused with requests sleeps for a millisecond between two looks at its messages. So the trainer's
checksums go along with the question, and the engine core compares them itself.

vLLM calls `install` in each of its processes: it is the plugin that the folder `plugin` beside this
file names.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from vllm_patching.compat.rank_messages import keep_payloads_whole, wait_without_spinning
from vllm_patching.engine_core import gathered_outputs, loopback_stores, named_memory, progress
from vllm_patching.protocol.messages import (
    CAN_VERIFY_AND_RESUME,
    VERIFY_AND_RESUME,
    BridgeRefusal,
    compare,
)

PLUGIN_NAME = "lockstep"
PLUGIN_FOLDER = Path(__file__).resolve().parent / "plugin"
"""On sys.path of vLLM's processes, it is where vLLM finds the plugin; the checkout need not be
installed."""
_MODULE = "vllm.v1.engine.core"
_SEAMS = ("collective_rpc", "resume_scheduler")
_GATHERING_SEAMS = ("step", "step_with_batch_queue", "is_scheduler_paused")


def install() -> None:
    """Give vLLM's engine core the methods that RankCalls needs, and have it gather outputs, in the
    process that has one. On a CPU, have every process wait for the others without taking a core.
    Stores of one machine's workers listen on loopback. Shared memory is named after its process.
    """
    loopback_stores.install()
    named_memory.install()
    module = sys.modules.get(_MODULE)
    core = getattr(module, "EngineCore", None)
    if core is not None and all(hasattr(core, seam) for seam in _SEAMS):
        setattr(core, VERIFY_AND_RESUME, verify_and_resume)
        setattr(core, CAN_VERIFY_AND_RESUME, lambda _: True)
    process = getattr(module, "EngineCoreProc", None)
    if hasattr(process, "pause_scheduler") and all(
        hasattr(core, seam) for seam in _GATHERING_SEAMS
    ):
        kinds = importlib.import_module("vllm.v1.engine")
        gathered_outputs.install(core, process, kinds.EngineCoreOutput, kinds.EngineCoreOutputs)
        progress.install(core)
        keep_payloads_whole(importlib.import_module("vllm.v1.serial_utils").MsgpackEncoder, process)
    if (
        "vllm" in sys.modules
        and importlib.import_module("vllm.platforms").current_platform.is_cpu()
    ):
        wait_without_spinning()


def install_before_fork() -> None:
    """As `install`, in the process that starts the engine core. A forked one inherits it, and does
    not load plugins again if they were loaded before.
    """
    importlib.import_module(_MODULE)
    install()


def prepare_environment(variables: MutableMapping[str, str]) -> None:
    """Have vLLM find and load the plugin, in this process and in its children.

    Args:
        variables: os.environ.
    """
    folder = str(PLUGIN_FOLDER)
    if folder not in sys.path:
        sys.path.append(folder)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in paths:
        variables["PYTHONPATH"] = os.pathsep.join([*paths, folder])
    wanted = variables.get("VLLM_PLUGINS")  # where it is set, vLLM loads no others than those
    if wanted is not None and PLUGIN_NAME not in wanted.split(","):
        variables["VLLM_PLUGINS"] = ",".join(filter(None, [wanted, PLUGIN_NAME]))


def verify_and_resume(
    core: Any, method: str, expected: list[str], version: int, deadline: float
) -> dict[str, Any]:
    """Ask all ranks for the checksum of their weights; if every one is as expected, the paused
    engine goes on.

    Args:
        core: vLLM's EngineCore.
        method: of the worker extension; each rank answers with `tp_rank`, `checksum` and
            `not_finite`.
        expected: the trainer's checksums, by rank.
        version: of the weights, for messages.
        deadline: time.monotonic() in seconds, after which no caller waits for the answer, so that
            the engine must not go on.

    Returns:
        answers: the ranks'. resumed_at: time.monotonic() in seconds just before the engine went on,
        which is comparable within one host; None if it stays paused.
    """
    answers = core.collective_rpc(method)
    try:
        compare(answers, expected, version, "holds")
    except BridgeRefusal:
        return {
            "answers": answers,
            "resumed_at": None,
        }  # the caller compares again, and reports the difference
    moment = time.monotonic()
    if moment > deadline:
        return {"answers": answers, "resumed_at": None}
    core.resume_scheduler()
    return {"answers": answers, "resumed_at": moment}
