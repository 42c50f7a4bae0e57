"""The command of each process of a run, in one place: service, vLLM server, environment, trainer
and the workers beside it.

* Addresses, folders and options are filled in by the quick start, the stack of `start.sh`, the
  driver on Ray and simple_rl.py. A trainer that owns its vLLM server, the benchmarks and the
  end-to-end tests fill them in too.
* The scripts are named relative to the repository, in which most commands run; see `anywhere`.
* Values have the names of the program's own options. A value of None or False leaves its flag out.
* `python` is the interpreter. The driver on Ray passes a placeholder, which each node replaces by
  its own interpreter.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher.command_line import ROOT

Value = str | int | float | bool | Path | Sequence[str] | None

BRIDGE_FLAGS = {
    "auto": ("--weight-bridge-mode", "shared_vllm"),
    "broadcast": ("--weight-bridge-mode", "shared_vllm", "--use-shared-memory"),
    "single-copy": ("--weight-bridge-mode", "shared_vllm", "--single-copy"),
    "lora": ("--weight-bridge-mode", "lora_only"),
    "restart": ("--weight-bridge-mode", "none"),
    "none": ("--weight-bridge-mode", "none", "--vllm-restart-interval", "0"),
}
"""Bridge -> the trainer's flags."""
GPU_SHARE_BESIDE_TRAINER = 0.45
"""Part of a GPU's memory that vLLM takes where the trainer runs on the same GPU."""


@dataclass(frozen=True)
class Command:
    """One process: its name, its words, and the variables that it gets on top of the launcher's
    own.
    """

    name: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    log: str
    grace: float = 10.0
    may_finish: bool = False

    def typed(self) -> str:
        """Return the command as a line for a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def script(commands: Sequence[Command], keys: Path | None = None) -> str:
    """Return the commands as a person could type them; `keys` is a file to read in each terminal."""
    lines = [f"cd {shlex.quote(str(ROOT))}"]
    if keys is not None:
        lines.append(f". {shlex.quote(str(keys))}  # in each terminal")
    for command in commands:
        lines.append(f"\n# {command.name}, in a terminal of its own\n{command.typed()}")
    return "\n".join(lines) + "\n"


def flags(**values: Value) -> list[str]:
    """Write values as flags: `seq_len=512` as `--seq-len 512`, True as the flag alone, each entry
    of a sequence with the flag.

    A value that begins with a dash is joined to its flag by `=`: the program would take it for a
    flag.
    """
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
            continue
        if isinstance(value, str | int | float | Path):
            value = [str(value)]
        for entry in value:
            if entry.startswith("-"):
                words.append(f"{flag}={entry}")
            else:
                words += [flag, entry]
    return words


def service(host: str, port: int, *, python: str = sys.executable, **options: Value) -> list[str]:
    """Return the command of the rollout service."""
    return [python, "-u", "-m", "atroposlib.cli.run_api", *flags(host=host, port=port, **options)]


def weights_dtype(on_gpu: bool) -> str:
    """Return the type in which a server keeps weights if its options do not name one."""
    return "bfloat16" if on_gpu else "float32"


def vllm_flags(
    host: str, on_gpu: bool, dtype: str | None = None, eager: bool = False, **options: Value
) -> list[str]:
    """Return the flags of a vLLM server, without the model and the port, which a trainer that owns
    the server adds itself.
    """
    dtype, eager = dtype or weights_dtype(on_gpu), eager or not on_gpu
    return flags(host=host, **options, dtype=dtype, enforce_eager=eager)


def vllm_server(
    model: str | Path, port: int | str, server_flags: Sequence[str], *, python: str = sys.executable
) -> list[str]:
    """Return the command of a vLLM server; `server_flags` come from `vllm_flags`."""
    return [
        python,
        "-u",
        "example_trainer/vllm_api_server.py",
        *flags(model=model, port=port),
        *server_flags,
    ]


def environment_file(name: str) -> str:
    """Return the file of an environment: `arithmetic` names one of the project's, and a path stands
    for itself.
    """
    return name if name.endswith(".py") else f"environments/{name}_server.py"


def environment(
    name: str,
    service_url: str,
    vllm_urls: Sequence[str],
    *,
    action: str = "serve",
    follow_fleet: bool = False,
    settings: Mapping[str, Value],
    python: str = sys.executable,
) -> list[str]:
    """Return the command of an environment; `settings` are fields of its configuration (`--env.…`)."""
    words = [python, "-u", environment_file(name), action, "--env.rollout_server_url", service_url]
    words += ["--openai.base_url", ",".join(vllm_urls), "--openai.server_type", "vllm"]
    if follow_fleet:
        words.append("--follow_fleet")
    for field, value in settings.items():
        if isinstance(value, bool):
            value = str(value).lower()
        if value is not None:
            words += [f"--env.{field}", str(value)]
    return words


def trainer(
    model: str | Path,
    bridge: str | None,
    service_url: str,
    options: Mapping[str, Value],
    *,
    python: str = sys.executable,
) -> list[str]:
    """Return the command of the trainer; `bridge` is one of BRIDGE_FLAGS, or None if the caller adds
    the flags of the bridge.
    """
    words = [python, "-u", "example_trainer/grpo.py", *flags(model_name=model)]
    if bridge is not None:
        words += BRIDGE_FLAGS[bridge]
    return [*words, *flags(atropos_url=service_url, **options)]


def trainer_with_file(config: Path, *, python: str = sys.executable) -> list[str]:
    """Return the command of a trainer that reads all its options from a file."""
    return [python, "-u", "example_trainer/grpo.py", *flags(config=config)]


def reference_worker(
    model: str, service_url: str, *, python: str = sys.executable, **options: Value
) -> list[str]:
    """Return the command of a reference worker, which computes the logprobs of the reference model."""
    words = [python, "-u", "-m", "example_trainer.reference_worker"]
    return [*words, *flags(model_name=model, atropos_url=service_url, **options)]


def parameter_server(
    model: str | Path,
    service_url: str | None,
    vllm_servers: Sequence[str],
    *,
    python: str = sys.executable,
    **options: Value,
) -> list[str]:
    """Return the command of a parameter server, which hands the trainer's weights on to vLLM
    servers.
    """
    words = [python, "-u", "-m", "example_trainer.parameter_server"]
    words += flags(model_name=model, atropos_url=service_url, **options)
    return [*words, "--vllm-servers", *vllm_servers]


def anywhere(words: Sequence[str]) -> list[str]:
    """Return a command that can run in any folder: the project's scripts have absolute paths."""
    folders = ("example_trainer/", "environments/")
    return [str(ROOT / word) if word.startswith(folders) else word for word in words]


def bridge_variables(rendezvous_port: int, folder: Path, shared: bool) -> dict[str, str]:
    """Return the variables by which trainer and vLLM servers on one machine find each other.

    Args:
        rendezvous_port: the port on which they meet.
        folder: the server writes its part of the bridge's configuration there.
        shared: the trainer sends weights into the server's memory.
    """
    variables = {
        "VLLM_ENABLE_SHARED_WEIGHTS": str(int(shared)),
        "NUM_INFERENCE_NODES": "0",
        "LOGDIR": str(folder),
    }
    return variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(rendezvous_port)}


def device_variables(gpus: Sequence[int], threads: int) -> dict[str, str]:
    """Return the variables that give a process its GPUs, or without GPUs its number of threads."""
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    # Trainer and sampler take turns on the same cores: a thread that waits must sleep, not spin.
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
