"""Which GPUs each vLLM server and the trainer get."""

from __future__ import annotations

from collections.abc import Sequence

from example_trainer.child_processes import vllm_flags
from example_trainer.child_processes.vllm_flags import Degrees
from example_trainer.launcher.errors import LauncherError

Gpus = tuple[int, ...]


def degrees(vllm_args: Sequence[str]) -> Degrees:
    """Read the degrees among vLLM's further flags, as vLLM itself would.

    Raises:
        LauncherError: a degree is not a number above 0.
    """
    try:
        return vllm_flags.degrees(vllm_args)
    except ValueError as error:
        raise LauncherError(f"--vllm-args: {error}") from error


def choose_gpus(
    vllm: Gpus | None,
    trainer: Gpus | None,
    visible: Gpus,
    cpu: bool,
    servers: int = 1,
    size: Degrees | None = None,
    trains: bool = True,
) -> tuple[Gpus, Gpus]:
    """The GPUs of all vLLM servers together and of the trainer; both empty on a CPU.

    One server: of three or more GPUs it gets the first two and the trainer the third; of two, each
    gets one; one they share. Several servers: each gets as many as `size` says, or as many as there
    are for each beside the trainer's (a power of two, since a model's heads must be divisible by
    it); the trainer gets the next one. They share none.

    Args:
        vllm, trainer: what was asked for; None: choose.
        visible: the GPUs that there are.
        cpu: none shall be used.
        servers: how many vLLM servers.
        size: how large one server is.
        trains: the trainer is started here, and needs one.

    Raises:
        LauncherError: a GPU was asked for that is not there, or they cannot be dealt out evenly.
    """
    if cpu and (vllm or trainer):
        raise LauncherError(
            "--cpu excludes --vllm-gpus and --trainer-gpus: leave one or the other out"
        )
    missing = sorted({*(vllm or ()), *(trainer or ())} - set(visible))
    if missing:
        raise LauncherError(
            f"GPU {missing[0]} is not there: nvidia-smi and CUDA_VISIBLE_DEVICES leave {_listed(visible)}"
        )
    if not visible:
        return (), ()
    each = (size or Degrees()).gpus
    if vllm:
        _check_even(vllm, servers, each, size or Degrees())
    if servers > 1:
        return _for_several(vllm, trainer, visible, servers, each, trains)
    default = {1: (visible[:1], visible[:1]), 2: (visible[:1], visible[1:2])}.get(
        len(visible), (visible[:2], visible[2:3])
    )
    if each is not None and vllm is None:
        if each > len(visible):
            raise LauncherError(
                f"a server of {each} GPUs (--vllm-args) has only {_listed(visible)} here"
            )
        default = visible[:each], visible[each : each + 1] or visible[-1:]
    return vllm or default[0], trainer or default[1]


def _for_several(
    vllm: Gpus | None,
    trainer: Gpus | None,
    visible: Gpus,
    servers: int,
    each: int | None,
    trains: bool,
) -> tuple[Gpus, Gpus]:
    reserved = 1 if trains and not trainer else 0
    left = tuple(gpu for gpu in visible if gpu not in (trainer or ()))
    if vllm is None:
        room = (len(left) - reserved) // servers
        count = each or (1 << (room.bit_length() - 1) if room > 0 else 1)
        if count > room:
            beside = " beside the trainer's" if trains else ""
            raise LauncherError(
                f"--vllm-servers {servers} of {count} GPUs need {servers * count}{beside}, and {len(left) - reserved} of "
                f"{_listed(visible)} are left: give fewer servers, smaller ones, or --cpu"
            )
        vllm = left[: servers * count]
    if trainer is None:
        trainer = tuple(gpu for gpu in visible if gpu not in vllm)[:1]
    shared = sorted(set(vllm) & set(trainer))
    if trains and (shared or not trainer):
        what = (
            f"GPU {shared[0]} is both a server's and the trainer's"
            if shared
            else "no GPU is left for the trainer"
        )
        raise LauncherError(
            f"--vllm-servers {servers}: {what}: weights reach several servers from GPUs of the trainer's own"
        )
    return vllm, trainer


def _check_even(vllm: Gpus, servers: int, each: int | None, size: Degrees) -> None:
    if len(set(vllm)) != len(vllm):
        raise LauncherError(f"--vllm-gpus {_listed(vllm)} names a GPU twice")
    if each is not None and len(vllm) != servers * each:
        degree = f"tensor-parallel size {size.tensor}" + (
            f" and data-parallel size {size.data}" if size.data > 1 else ""
        )
        raise LauncherError(
            f"--vllm-gpus {_listed(vllm)}: {len(vllm)} GPUs, and {servers} server{'s' * (servers > 1)} of {degree} need "
            f"{servers * each}"
        )
    if len(vllm) % (servers * size.data):
        raise LauncherError(
            f"--vllm-gpus {_listed(vllm)}: {len(vllm)} GPUs cannot be dealt out evenly to {servers * size.data} "
            f"{'servers' if size.data == 1 else 'replicas'}: give a multiple of that"
        )


def _listed(gpus: Gpus) -> str:
    return ",".join(map(str, gpus)) or "none"
