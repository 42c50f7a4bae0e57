"""Which commands make up the stack: what a person would type, with ports, folders and threads filled in."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher.quickstart.options import ROOT, Options

BATCHES_AHEAD = 1
"""Batches that the environment may be ahead of the trainer: vLLM samples the next one while the trainer works on this one."""


@dataclass(frozen=True)
class BatchShape:
    """Rollouts of one optimizer step: `groups` problems with `group_size` answers to each."""

    groups: int
    group_size: int

    @property
    def rollouts(self) -> int:
        """Sequences of one optimizer step."""
        return self.groups * self.group_size

    @property
    def groups_in_work(self) -> int:
        """Groups that the environment works on at once.

        With the groups of one batch alone, vLLM would idle while that batch waits for its longest answer.
        """
        return self.groups * (1 + BATCHES_AHEAD)


BATCHES = {
    "arithmetic": BatchShape(groups=16, group_size=8),
    "calculator": BatchShape(groups=8, group_size=16),
}
"""Shape of a batch in each environment.

Late in an arithmetic run, nearly all answers to one problem get the same reward. The reward of a batch
is then an average over its problems, not over its answers: if 2 of 8 problems fail, it drops to 75 %
although the model has not changed. More problems with fewer answers each cost the same.
"""
MICRO_BATCH = 64
KEEPS_EQUAL_SCORES = frozenset({"arithmetic"})
"""Environments whose groups of equal scores are trained on too, though they teach nothing: once the task is nearly solved most
groups are such, and to replace them took more sampling than all the rest. The calculator's model begins with next to nothing
right, and would have batches with nothing to learn from."""
MAX_RESPONSE_TOKENS = 96
MAX_MODEL_LENGTH = 512
MAX_SEQUENCES = 256


@dataclass(frozen=True)
class Ports:
    """Where the processes of one run listen, all on this machine."""

    service: int
    vllm: int
    rendezvous: int


@dataclass(frozen=True)
class Command:
    """One process: what to call it, what to type, and with which variables."""

    name: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    log: str
    grace: float = 10.0
    may_finish: bool = False

    def typed(self) -> str:
        """The command as a line for a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


@dataclass(frozen=True)
class Plan:
    """Every command of one run."""

    options: Options
    ports: Ports

    @property
    def service_url(self) -> str:
        """Address of the rollout service."""
        return f"http://localhost:{self.ports.service}"

    @property
    def page_url(self) -> str:
        """Address of the page on which a person sees the run."""
        return f"{self.service_url}/ui"

    @property
    def vllm_url(self) -> str:
        """Address of the vLLM server."""
        return f"http://localhost:{self.ports.vllm}"

    @property
    def environment_file(self) -> str:
        """The environment's program, from the repository's root."""
        return f"environments/{self.options.environment}_server.py"

    @property
    def batch(self) -> BatchShape:
        """Rollouts of one optimizer step."""
        return BATCHES[self.options.environment]

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.options.output / "logs"

    @property
    def trainer_folder(self) -> Path:
        """Folder of the trainer's metrics."""
        return self.options.output / "trainer"

    @property
    def environment_metrics(self) -> Path:
        """The environment's metrics, JSON lines: over every answer that was sampled, also those of groups it dropped."""
        return self.options.output / "environment" / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """The groups that were trained on, JSON lines."""
        return self.options.output / "environment" / "rollouts.jsonl"

    def shared_variables(self, gpu: int | None, threads: int) -> dict[str, str]:
        """What every process that computes gets."""
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.ports.rendezvous), "NUM_INFERENCE_NODES": "0"}
        variables["LOGDIR"] = str(self.logs)
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = str(gpu)
        else:
            variables["OMP_NUM_THREADS"] = str(threads)
            # Trainer and sampler take turns on the same cores: a thread that waits must sleep, not spin.
            variables["OMP_WAIT_POLICY"] = "passive"
        return variables

    def service(self) -> Command:
        """The rollout service."""
        arguments = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.ports.service)]
        arguments += ["--new-run", "--run-folder", str(self.options.output)]
        arguments += ["--vllm-server", f"http://localhost:{self.ports.vllm}"]
        return Command("rollout service", tuple(arguments), {}, "service.log")

    def vllm(self) -> Command:
        """The inference server, its weights shared with the trainer."""
        variables = {
            "VLLM_ENABLE_SHARED_WEIGHTS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Half of the cores: a small model's steps cost more processor time on several threads than on one, and the trainer
            # and the processes between them need some too.
            **self.shared_variables(self.options.gpus[0] if self.options.gpus else None, max(1, cores() // 2)),
        }
        arguments = [sys.executable, "-u", "example_trainer/vllm_api_server.py", "--model", self.options.model]
        arguments += ["--port", str(self.ports.vllm), "--host", "127.0.0.1"]
        arguments += ["--max-model-len", str(MAX_MODEL_LENGTH), "--max-num-seqs", str(MAX_SEQUENCES)]
        arguments += ["--seed", str(self.options.seed)]
        if self.options.gpus:
            # Room for the trainer beside it, which with a single copy runs on the same GPU.
            share = "0.45" if self.options.bridge == "single-copy" else "0.85"
            arguments += ["--dtype", "bfloat16", "--gpu-memory-utilization", share]
        else:
            arguments += ["--dtype", "float32", "--enforce-eager"]
            variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return Command("vLLM server", tuple(arguments), variables, "vllm.log", grace=20.0)

    def environment_flags(self) -> list[str]:
        """What serving and evaluating have in common."""
        flags = ["--env.rollout_server_url", self.service_url, "--env.seed", str(self.options.seed)]
        flags += ["--env.max_token_length", str(MAX_RESPONSE_TOKENS), "--env.group_size", str(self.batch.group_size)]
        flags += ["--openai.base_url", self.vllm_url, "--openai.server_type", "vllm"]
        if self.options.difficulty:
            flags += ["--env.difficulty", ",".join(map(str, self.options.difficulty))]
        return flags

    def environment(self) -> Command:
        """The environment that poses problems, samples and scores."""
        arguments = (sys.executable, self.environment_file, "serve", *self.environment_flags())
        arguments += ("--env.steps_per_eval", "0", "--env.max_batches_offpolicy", str(BATCHES_AHEAD))
        arguments += ("--env.max_num_workers_per_node", str(self.batch.groups_in_work))
        if self.options.environment in KEEPS_EQUAL_SCORES:
            arguments += ("--env.ensure_scores_are_not_same", "false")
        arguments += ("--env.metrics_path", str(self.environment_metrics))
        arguments += ("--env.data_path_to_save_groups", str(self.rollouts))
        return Command("environment", arguments, {"OMP_NUM_THREADS": "1"}, "environment.log", may_finish=True)

    def evaluation(self, which: str, result: Path) -> Command:
        """Greedy answers to the held-out problems, the result written to a JSON file."""
        arguments = (sys.executable, self.environment_file, "evaluate", *self.environment_flags())
        arguments += ("--env.eval_size", str(self.options.eval_size), "--env.eval_output", str(result))
        return Command(f"evaluation {which} training", arguments, {"OMP_NUM_THREADS": "1"}, f"evaluation-{which}.log")

    def trainer(self) -> Command:
        """The GRPO trainer, joined to vLLM by the weight bridge."""
        options = self.options
        arguments = [sys.executable, "-u", "example_trainer/grpo.py", "--model-name", options.model]
        arguments += ["--weight-bridge-mode", "shared_vllm"]
        arguments += ["--use-shared-memory"] if options.bridge == "broadcast" else ["--single-copy"]
        arguments += ["--vllm-port", str(self.ports.vllm), "--atropos-url", self.service_url]
        arguments += ["--training-steps", str(options.steps), "--lr", repr(options.lr), "--lr-schedule", "cosine"]
        arguments += ["--seed", str(options.seed)]
        micro_batches = self.batch.rollouts // MICRO_BATCH
        arguments += ["--batch-size", str(MICRO_BATCH), "--gradient-accumulation-steps", str(micro_batches)]
        arguments += ["--seq-len", str(MAX_MODEL_LENGTH), "--log-dir", str(self.trainer_folder)]
        arguments += ["--save-path", str(options.output / "checkpoints"), "--checkpoint-interval", "0"]
        gpu = None
        if options.gpus:
            gpu = options.gpus[1 if options.bridge == "broadcast" else 0]
        variables = {"VLLM_ENABLE_SHARED_WEIGHTS": "1", **self.shared_variables(gpu, cores())}
        return Command("trainer", tuple(arguments), variables, "trainer.log", grace=20.0)

    def script(self) -> str:
        """The run as a person could type it, for a file beside the logs."""
        commands = [self.service(), self.vllm(), self.environment(), self.trainer()]
        lines = [f"# {command.name}, in a terminal of its own\n{command.typed()}" for command in commands]
        return f"cd {shlex.quote(str(ROOT))}\n\n" + "\n\n".join(lines) + "\n"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
