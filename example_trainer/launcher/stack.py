"""Commands of the stack, as example_trainer/README.md types them, with ports, folders and devices filled in."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher.errors import LauncherError
from example_trainer.launcher.gpus import degrees
from example_trainer.launcher.keys import KEYS_FILE
from example_trainer.launcher.options import StackOptions
from example_trainer.launcher.parts import server_name, server_number
from example_trainer.launcher.quickstart.options import LEARNING_RATES, ROOT
from example_trainer.launcher.quickstart.plan import (
    BATCHES,
    MAX_MODEL_LENGTH,
    MAX_RESPONSE_TOKENS,
    MAX_SEQUENCES,
    MICRO_BATCH,
    Command,
    cores,
)

LOGS = {"service": "api.log", "vllm": "vllm.log", "trainer": "trainer.log"}
"""As the launch sequence names them; the environment's is gsm8k.log or env.log, a further server's vllm-2.log and so on."""
SMALL_BATCH = BATCHES["arithmetic"]
"""Shape of a batch if the starter model is trained."""
BRIDGE_FLAGS = {
    "auto": ("--weight-bridge-mode", "shared_vllm"),
    "broadcast": ("--weight-bridge-mode", "shared_vllm", "--use-shared-memory"),
    "single-copy": ("--weight-bridge-mode", "shared_vllm", "--single-copy"),
    "lora": ("--weight-bridge-mode", "lora_only"),
    "restart": ("--weight-bridge-mode", "none"),
    "none": ("--weight-bridge-mode", "none", "--vllm-restart-interval", "0"),
}


@dataclass(frozen=True)
class Stack:
    """The commands of one run."""

    options: StackOptions

    @property
    def service_url(self) -> str:
        """Address of the rollout service."""
        return f"http://localhost:{self.options.service_port}"

    def vllm_url(self, server: int = 0) -> str:
        """Address of a vLLM server, counted from 0."""
        return f"http://localhost:{self.options.vllm_ports[server]}"

    def command(self, part: str) -> Command:
        """What starts a part."""
        number = server_number(part)
        made: Command = getattr(self, part)() if number is None else self.vllm(number)
        return made

    def port(self, part: str) -> int:
        """Where a part listens, or the vLLM server that the trainer owns; 0 if nowhere."""
        number = server_number(part)
        if self.options.bridge == "restart":
            number = 0 if part == "trainer" else None
        if number is not None:
            return self.options.vllm_ports[number]
        return self.options.service_port if part == "service" else 0

    def ports(self) -> dict[int, str]:
        """Every port that will be needed, and what for.

        Raises:
            LauncherError: one is needed twice.
        """
        options = self.options
        needed: list[tuple[int, str]] = []
        if "service" in options.parts:
            needed.append((options.service_port, "--service-port"))
        servers = [number for part in options.parts if (number := server_number(part)) is not None]
        if "trainer" in options.parts and options.bridge == "restart":
            servers = [0]
        needed += [(options.vllm_ports[n], "--vllm-port" + f" of {server_name(n)}" * (n > 0)) for n in servers]
        if "trainer" in options.parts:
            if options.bridge in ("auto", "broadcast"):
                needed.append((options.master_port, "--master-port"))
            if options.metrics_port:
                needed.append((options.metrics_port, "--metrics-port"))
        found: dict[int, str] = {}
        for number, flag in needed:
            if number in found:
                raise LauncherError(f"port {number} is both {found[number]} and {flag}: give another one of them")
            found[number] = flag
        return found

    def log(self, part: str) -> Path:
        """A part's log."""
        name = self._environment_log() if part == "environment" else LOGS.get(part, f"{part}.log")
        return self.options.run / name

    def folder(self, server: int) -> Path:
        """Where a vLLM server, counted from 0, publishes its configuration; the first one in the run's own folder."""
        return self.options.run if server == 0 else self.options.run / server_name(server)

    def _environment_log(self) -> str:
        return "gsm8k.log" if Path(self.options.environment).name.startswith("gsm8k") else "env.log"

    def _variables(self, gpus: tuple[int, ...], folder: Path) -> dict[str, str]:
        shared = self.options.bridge not in ("none", "restart", "lora")
        variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "1" if shared else "0", "NUM_INFERENCE_NODES": "0"}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.options.master_port), "LOGDIR": str(folder)}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        else:
            # Trainer and sampler take turns on the same cores: a thread that waits must sleep, not spin.
            variables |= {"OMP_NUM_THREADS": str(cores()), "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
        return variables

    def service(self) -> Command:
        """The rollout service."""
        arguments = [sys.executable, "-u", "-m", "atroposlib.cli.run_api", "--port", str(self.options.service_port)]
        arguments += ["--host", self.options.host, "--store", str(self.options.run / "rollouts.db")]
        arguments += ["--run-folder", str(self.options.run)]
        for server in range(self.options.servers):
            arguments += ["--vllm-server", self.vllm_url(server)]
        arguments += self.options.service_args
        return Command("service", tuple(arguments), {}, LOGS["service"])

    def _vllm_flags(self) -> list[str]:
        options, size = self.options, degrees(self.options.vllm_args)
        flags = ["--host", options.host]
        gpus = len(options.gpus_of(0)) // size.data
        if gpus > 1 and size.tensor is None:
            flags += ["--tensor-parallel-size", str(gpus)]
        if options.vllm_gpus:
            flags += ["--dtype", "bfloat16"]
            if options.bridge != "restart" and set(options.vllm_gpus) & set(options.trainer_gpus):
                flags += ["--gpu-memory-utilization", "0.45"]  # room for the trainer beside it
        else:
            flags += ["--dtype", "float32", "--enforce-eager"]
        if options.bridge == "lora":
            flags.append("--enable-lora")
        if options.small:
            flags += ["--max-model-len", str(MAX_MODEL_LENGTH), "--max-num-seqs", str(MAX_SEQUENCES)]
        return [*flags, *options.vllm_args]

    def vllm(self, server: int = 0) -> Command:
        """An inference server, counted from 0."""
        name = server_name(server)
        arguments = [sys.executable, "-u", "example_trainer/vllm_api_server.py", "--model", self.options.model]
        arguments += ["--port", str(self.options.vllm_ports[server]), *self._vllm_flags()]
        variables = self._variables(self.options.gpus_of(server), self.folder(server))
        return Command(name, tuple(arguments), variables, self.log(name).name, grace=30.0)

    def environment(self) -> Command:
        """The environment, which waits for the others by itself."""
        name = self.options.environment
        file = name if name.endswith(".py") else f"environments/{name}_server.py"
        arguments = [sys.executable, "-u", file, "serve", "--env.rollout_server_url", self.service_url]
        urls = ",".join(self.vllm_url(server) for server in range(self.options.servers))
        arguments += ["--openai.base_url", urls, "--openai.server_type", "vllm"]
        arguments += ["--follow_fleet"] if self.options.servers > 1 else []  # one that joins later gets requests too
        if self.options.small:
            arguments += ["--env.group_size", str(SMALL_BATCH.group_size)]
            arguments += ["--env.max_num_workers_per_node", str(SMALL_BATCH.groups_in_work)]
            arguments += ["--env.max_token_length", str(MAX_RESPONSE_TOKENS)]
        arguments += self.options.environment_args
        return Command("environment", tuple(arguments), {"OMP_NUM_THREADS": "1"}, self._environment_log(), may_finish=True)

    def trainer(self) -> Command:
        """The trainer, which starts one process for each of its GPUs."""
        options = self.options
        arguments = [sys.executable, "-u", "example_trainer/grpo.py", "--model-name", options.model]
        arguments += BRIDGE_FLAGS[options.bridge]
        if options.servers > 1:
            arguments += ["--vllm-servers", ",".join(f"localhost:{port}" for port in options.vllm_ports)]
        else:
            arguments += ["--vllm-port", str(options.vllm_port)]
        arguments += ["--atropos-url", self.service_url]
        arguments += ["--training-steps", str(options.steps), "--log-dir", str(options.run / "trainer")]
        arguments += ["--save-path", str(options.run / "checkpoints")]
        arguments += ["--resume", "auto"] if options.resume else []
        if options.metrics_port:
            arguments += ["--metrics-port", str(options.metrics_port), "--metrics-host", options.host]
        if options.bridge == "restart":
            arguments += ["--vllm-restart-interval", str(options.restart_interval)]
            arguments += [f"--vllm-args={' '.join(self._vllm_flags())}"]
            if options.vllm_gpus:
                arguments += ["--vllm-gpus", ",".join(map(str, options.vllm_gpus))]
        lr, batch_size = options.lr, options.batch_size
        if options.small:
            lr, batch_size = LEARNING_RATES["arithmetic"] if lr is None else lr, batch_size or MICRO_BATCH
            accumulation = max(1, SMALL_BATCH.rollouts // batch_size)
            arguments += ["--lr-schedule", "cosine"]
            arguments += ["--gradient-accumulation-steps", str(accumulation), "--seq-len", str(MAX_MODEL_LENGTH)]
        arguments += ["--lr", repr(lr)] if lr is not None else []
        arguments += ["--batch-size", str(batch_size)] if batch_size is not None else []
        variables = self._variables(options.trainer_gpus, options.run)
        return Command("trainer", (*arguments, *options.trainer_args), variables, LOGS["trainer"], grace=120.0, may_finish=True)

    def script(self) -> str:
        """The commands as a person could type them, for a file in the run's folder."""
        commands = [self.command(part) for part in self.options.parts]
        lines = [f"# {command.name}, in a terminal of its own\n{command.typed()}" for command in commands]
        keys = f". {shlex.quote(str(self.options.run / KEYS_FILE))}  # in each terminal"
        return f"cd {shlex.quote(str(ROOT))}\n{keys}\n\n" + "\n\n".join(lines) + "\n"
