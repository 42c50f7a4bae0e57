"""Which commands make up the stack, as the README's launch sequence types them, with ports, folders and devices filled in."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.ops.keys import KEYS_FILE
from scripts.ops.options import StackOptions
from scripts.quickstart.options import ROOT
from scripts.quickstart.plan import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    MAX_MODEL_LENGTH,
    MAX_RESPONSE_TOKENS,
    MAX_SEQUENCES,
    MICRO_BATCH,
    Command,
    cores,
)

LOGS = {"service": "api.log", "vllm": "vllm.log", "trainer": "trainer.log"}
"""As the launch sequence names them; the environment's is gsm8k.log or env.log."""
BRIDGE_FLAGS = {
    "auto": ("--weight-bridge-mode", "shared_vllm"),
    "broadcast": ("--weight-bridge-mode", "shared_vllm", "--use-shared-memory"),
    "single-copy": ("--weight-bridge-mode", "shared_vllm", "--single-copy"),
    "lora": ("--weight-bridge-mode", "lora_only"),
    "restart": ("--weight-bridge-mode", "none"),
    "none": ("--weight-bridge-mode", "none"),
}


@dataclass(frozen=True)
class Stack:
    """The commands of one run."""

    options: StackOptions

    @property
    def service_url(self) -> str:
        """Address of the rollout service."""
        return f"http://localhost:{self.options.service_port}"

    @property
    def vllm_url(self) -> str:
        """Address of the vLLM server."""
        return f"http://localhost:{self.options.vllm_port}"

    def command(self, part: str) -> Command:
        """What starts a part."""
        made: Command = getattr(self, part)()
        return made

    def port(self, part: str) -> int:
        """Where a part listens, or the vLLM server that the trainer owns; 0 if nowhere."""
        owner = "trainer" if self.options.bridge == "restart" else "vllm"
        return {"service": self.options.service_port, owner: self.options.vllm_port}.get(part, 0)

    def ports(self) -> dict[int, str]:
        """Every port that will be needed, and what for."""
        options, needed = self.options, {}
        if "service" in options.parts:
            needed[options.service_port] = "--service-port"
        if "vllm" in options.parts or ("trainer" in options.parts and options.bridge == "restart"):
            needed[options.vllm_port] = "--vllm-port"
        if "trainer" in options.parts:
            if options.bridge in ("auto", "broadcast"):
                needed[options.master_port] = "--master-port"
            if options.metrics_port:
                needed[options.metrics_port] = "--metrics-port"
        return needed

    def log(self, part: str) -> Path:
        """A part's log."""
        return self.options.run / (self._environment_log() if part == "environment" else LOGS[part])

    def _environment_log(self) -> str:
        return "gsm8k.log" if Path(self.options.environment).name.startswith("gsm8k") else "env.log"

    def _variables(self, gpus: tuple[int, ...]) -> dict[str, str]:
        shared = self.options.bridge not in ("none", "restart", "lora")
        variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "1" if shared else "0", "NUM_INFERENCE_NODES": "0"}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.options.master_port), "LOGDIR": str(self.options.run)}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        else:
            # Trainer and sampler take turns on the same cores: a thread that waits must sleep, not spin.
            variables |= {"OMP_NUM_THREADS": str(cores()), "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
        return variables

    def service(self) -> Command:
        """The rollout service."""
        arguments = [sys.executable, "-u", "-m", "atroposlib.cli.run_api", "--port", str(self.options.service_port)]
        arguments += ["--host", self.options.host, "--store", str(self.options.run / "rollouts.db"), *self.options.service_args]
        return Command("service", tuple(arguments), {}, LOGS["service"])

    def _vllm_flags(self) -> list[str]:
        options = self.options
        flags = ["--host", options.host]
        if len(options.vllm_gpus) > 1:
            flags += ["--tensor-parallel-size", str(len(options.vllm_gpus))]
        if options.vllm_gpus:
            flags += ["--dtype", "bfloat16"]
            if set(options.vllm_gpus) & set(options.trainer_gpus):
                flags += ["--gpu-memory-utilization", "0.45"]  # room for the trainer beside it
        else:
            flags += ["--dtype", "float32", "--enforce-eager"]
        if options.bridge == "lora":
            flags.append("--enable-lora")
        if options.small:
            flags += ["--max-model-len", str(MAX_MODEL_LENGTH), "--max-num-seqs", str(MAX_SEQUENCES)]
        return [*flags, *options.vllm_args]

    def vllm(self) -> Command:
        """The inference server."""
        arguments = [sys.executable, "-u", "example_trainer/vllm_api_server.py", "--model", self.options.model]
        arguments += ["--port", str(self.options.vllm_port), *self._vllm_flags()]
        return Command("vllm", tuple(arguments), self._variables(self.options.vllm_gpus), LOGS["vllm"], grace=30.0)

    def environment(self) -> Command:
        """The environment, which waits for the others by itself."""
        name = self.options.environment
        file = name if name.endswith(".py") else f"environments/{name}_server.py"
        arguments = [sys.executable, "-u", file, "serve", "--env.rollout_server_url", self.service_url]
        arguments += ["--openai.base_url", self.vllm_url, "--openai.server_type", "vllm"]
        if self.options.small:
            arguments += ["--env.group_size", str(GROUP_SIZE), "--env.max_token_length", str(MAX_RESPONSE_TOKENS)]
        arguments += self.options.environment_args
        return Command("environment", tuple(arguments), {"OMP_NUM_THREADS": "1"}, self._environment_log(), may_finish=True)

    def trainer(self) -> Command:
        """The trainer, one process for each of its GPUs."""
        options = self.options
        launcher = [sys.executable, "-u"]
        if len(options.trainer_gpus) > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc-per-node", str(len(options.trainer_gpus))]
        arguments = [*launcher, "example_trainer/grpo.py", "--model-name", options.model, *BRIDGE_FLAGS[options.bridge]]
        arguments += ["--vllm-port", str(options.vllm_port), "--atropos-url", self.service_url]
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
            lr, batch_size = 5e-4 if lr is None else lr, batch_size or MICRO_BATCH
            accumulation = max(1, GROUP_SIZE * GROUPS_PER_STEP // batch_size)
            arguments += ["--gradient-accumulation-steps", str(accumulation), "--seq-len", str(MAX_MODEL_LENGTH)]
        arguments += ["--lr", repr(lr)] if lr is not None else []
        arguments += ["--batch-size", str(batch_size)] if batch_size is not None else []
        variables = self._variables(options.trainer_gpus)
        return Command("trainer", (*arguments, *options.trainer_args), variables, LOGS["trainer"], grace=120.0, may_finish=True)

    def script(self) -> str:
        """The commands as a person could type them, for a file in the run's folder."""
        commands = [self.command(part) for part in self.options.parts]
        lines = [f"# {command.name}, in a terminal of its own\n{command.typed()}" for command in commands]
        keys = f". {shlex.quote(str(self.options.run / KEYS_FILE))}  # in each terminal"
        return f"cd {shlex.quote(str(ROOT))}\n{keys}\n\n" + "\n\n".join(lines) + "\n"
