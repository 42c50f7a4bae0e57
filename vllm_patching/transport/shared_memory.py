"""Single copy: one allocation of the weights that vLLM reads and the trainer writes.

On a CPU the weights move into a file in shared memory that both processes map. On a GPU they stay
where vLLM put them and the trainer opens them through CUDA IPC. Either way a handle is plain JSON,
so nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vllm_patching.protocol.manifest import ALIGNMENT, dtype_name, parse_dtype

logger = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
_OWNED = re.compile(r"(?:sem\.)?lockstep-(\d+)-(\d+)-.*\.(weights|memory|semaphore|group.*)")
"""Names that begin as `owned_prefix` has it: namespace and process. The C library puts `sem.` in front
of a semaphore's name, and vLLM appends ranks to the name of a group."""
_EVENT_POLL_SECONDS = 50e-6


class SharedMemoryError(RuntimeError):
    """The weights could not be put into, or opened from, memory that two processes share."""


def export_to_shared_memory(parameters: Mapping[str, torch.Tensor], tag: str) -> dict[str, Any]:
    """Move CPU parameters into one file in shared memory, readable and writable by this user alone.

    Each parameter keeps its identity, name, shape, dtype and values; only its storage moves.

    Args:
        parameters: contiguous CPU parameters by name.
        tag: part of the file's name, for people who list the directory.

    Returns:
        {"kind": "shm", "path", "num_bytes", "params": {name: {"offset", "shape", "dtype"}}}

    Raises:
        SharedMemoryError: no room in shared memory.
    """
    table: dict[str, dict[str, Any]] = {}
    total = 0
    for name, parameter in parameters.items():
        table[name] = {
            "offset": total,
            "shape": list(parameter.shape),
            "dtype": dtype_name(parameter.dtype),
        }
        total += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
    directory = SHM_DIR if SHM_DIR.is_dir() else Path(tempfile.gettempdir())
    remove_leftovers(directory)
    descriptor, path = tempfile.mkstemp(
        prefix=f"{owned_prefix()}{tag}-", suffix=".weights", dir=directory
    )
    try:
        # Reserves the pages now: a full /dev/shm is an error here, not a SIGBUS in the middle of
        # training.
        os.posix_fallocate(descriptor, 0, max(total, 1))
    except OSError as error:
        os.unlink(path)
        raise SharedMemoryError(
            f"{directory} has no room for {total / 1e6:.1f} MB of weights ({error.strerror}); enlarge it or free some"
        ) from None  # start.sh shows the first error of a log, and this one has the remedy
    finally:
        os.close(descriptor)
    buffer = _map(path, total)
    for name, parameter in parameters.items():
        view = _view(buffer, table[name])
        view.copy_(parameter.data)
        parameter.data = view
    return {"kind": "shm", "path": path, "num_bytes": total, "params": table}


def owned_prefix() -> str:
    """Begin the name of a file in shared memory, so that the name has its owner.

    Containers may share /dev/shm and yet count their processes apart. So the name has the number of
    the namespace that counts them; 0 where the system does not have one.
    """
    return f"lockstep-{_process_namespace()}-{os.getpid()}-"


def _process_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def remove_leftovers(directory: Path = SHM_DIR) -> None:
    """Delete the files of servers that were killed before they could do it themselves.

    A file stays if its owner runs, was counted in another namespace, or its name does not name it.
    """
    namespace = _process_namespace()
    for path in (*directory.glob("lockstep-*"), *directory.glob("sem.lockstep-*")):
        name = _OWNED.fullmatch(path.name)
        if not name or not namespace or int(name[1]) != namespace or not _has_ended(int(name[2])):
            continue
        with suppress(FileNotFoundError):  # another rank that starts now was faster
            found = (
                path.lstat()
            )  # another user may have put a link there, which only that user can remove
            if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode):
                logger.warning("removing %s: process %s, which made it, is gone", path, name[2])
                path.unlink()


def export_cuda_ipc(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """CUDA IPC handles of tensors that stay where they are.

    Returns:
        {"kind": "cuda_ipc", "gpu_uuid", "params": {name: the arguments that rebuild the tensor,
        bytes in base64}}
    """
    from torch.multiprocessing.reductions import reduce_tensor

    params = {}
    uuid = ""
    for name, tensor in tensors.items():
        uuid = uuid or gpu_uuid(tensor.device)
        _, arguments = reduce_tensor(tensor.data)
        (
            _,
            size,
            stride,
            offset,
            _,
            dtype,
            _,
            handle,
            storage_bytes,
            storage_offset,
            _,
            ref_handle,
            ref_offset,
            event,
            sync,
        ) = arguments
        params[name] = {
            "size": list(size),
            "stride": list(stride),
            "tensor_offset": offset,
            "dtype": dtype_name(dtype),
            "handle": _encode(handle),
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "ref_counter_handle": _encode(ref_handle),
            "ref_counter_offset": ref_offset,
            "event_handle": _encode(event),
            "event_sync_required": sync,
        }
    return {"kind": "cuda_ipc", "gpu_uuid": uuid, "params": params}


def open_handles(handles: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors behind what one of the export functions returned, in another process.

    Raises:
        SharedMemoryError: the memory is not there: the server has gone, is on another machine or
            belongs to another user.
    """
    if handles["kind"] == "shm":
        buffer = _open_own(handles["path"], int(handles["num_bytes"]))
        return {name: _view(buffer, row) for name, row in handles["params"].items()}
    if handles["kind"] == "cuda_ipc":
        return _open_cuda_ipc(handles)
    raise SharedMemoryError(f"unknown kind of handle: {handles['kind']!r}")


def _open_own(path: str, num_bytes: int) -> torch.Tensor:
    """Map a file that a server of this user made.

    Raises:
        SharedMemoryError: it is not there, is not whole, or another user could have made or changed
            it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SharedMemoryError(
            f"{path} is not on this machine: the server that made it has stopped, or runs elsewhere. "
            "Single copy needs the trainer on the server's machine; use --use-shared-memory (broadcast) otherwise."
        ) from None
    except OSError as error:
        raise SharedMemoryError(
            f"{path} cannot be opened ({error.strerror}); start the vLLM server again"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise SharedMemoryError(
                f"{path} is not a file of this user alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}): "
                "start the trainer as the vLLM server's user"
            )
        if found.st_size < num_bytes:
            raise SharedMemoryError(
                f"{path} has {found.st_size} of {num_bytes} bytes: start the vLLM server again"
            )
        return _map(f"/proc/self/fd/{descriptor}", num_bytes)
    finally:
        os.close(descriptor)


def share_event(device: torch.device) -> tuple[torch.cuda.Event, str]:
    """A CUDA event of this GPU that another process's work can wait for, and its handle for
    `open_event`.
    """
    with torch.cuda.device(device):  # which need not be the process's present one
        event = torch.cuda.Event(interprocess=True)
        event.record()  # it exists from its first record on
        return event, _encode(event.ipc_handle())


def open_event(handle: str, device: torch.device) -> torch.cuda.Event:
    """The event of another process: waiting for it means for what that process had enqueued at its
    last record.

    Raises:
        SharedMemoryError: the handle is none, this machine's driver does not share events, or the
            weights are on no GPU.
    """
    if device.type != "cuda":
        raise SharedMemoryError(
            f"the weights are on {device}, where there are no CUDA events to wait for"
        )
    try:
        return torch.cuda.Event.from_ipc_handle(device, _decode(handle))
    except (RuntimeError, ValueError) as error:
        raise SharedMemoryError(
            f"cannot open the trainer's CUDA event: {str(error).splitlines()[0]}"
        ) from error


def reached_in_time(event: torch.cuda.Event, seconds: float) -> bool:
    """Return whether the GPU reaches another process's last event within that time.

    A GPU made to wait for the event itself waits for ever if that process is killed before the GPU
    comes there. A process that synchronises with it hangs too. So the host polls, and can stop.

    Raises:
        SharedMemoryError: the event can no longer be asked, as when its process has ended.
    """
    deadline = time.monotonic() + seconds
    try:
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_EVENT_POLL_SECONDS)
    except RuntimeError as error:
        raise SharedMemoryError(
            f"cannot ask the trainer's CUDA event: {str(error).splitlines()[0]}"
        ) from error
    return True


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, the same in every process for every CUDA_VISIBLE_DEVICES; empty on a
    CPU.
    """
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _open_cuda_ipc(handles: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    visible = {
        gpu_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())
    }
    if handles["gpu_uuid"] not in visible:
        raise SharedMemoryError(
            f"vLLM's weights are on GPU {handles['gpu_uuid']}, which this process does not see "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). "
            "Single copy needs the trainer on vLLM's GPU."
        )
    device = visible[handles["gpu_uuid"]]
    opened = {}
    for name, row in handles["params"].items():
        opened[name] = rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size(row["size"]),
            tuple(row["stride"]),
            row["tensor_offset"],
            torch.UntypedStorage,
            parse_dtype(row["dtype"]),
            device,
            _decode(row["handle"]),
            row["storage_bytes"],
            row["storage_offset"],
            False,
            _decode(row["ref_counter_handle"]),
            row["ref_counter_offset"],
            _decode(row["event_handle"]),
            row["event_sync_required"],
        )
    return opened


def _map(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _view(buffer: torch.Tensor, row: Mapping[str, Any]) -> torch.Tensor:
    dtype = parse_dtype(row["dtype"])
    numel = 1
    for extent in row["shape"]:
        numel *= extent
    return (
        buffer[row["offset"] : row["offset"] + numel * dtype.itemsize]
        .view(dtype)
        .view(row["shape"])
    )


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)
