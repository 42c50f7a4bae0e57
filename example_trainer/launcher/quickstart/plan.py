"""The commands of a quick start, with ports, folders and threads filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher import roles
from example_trainer.launcher.quickstart.options import Options
from example_trainer.launcher.roles import Command
from example_trainer.launcher.starter_models import (
    BATCHES,
    BATCHES_AHEAD,
    MAX_MODEL_LENGTH,
    MAX_RESPONSE_TOKENS,
    MAX_SEQUENCES,
    MICRO_BATCH,
    BatchShape,
)

KEEPS_EQUAL_SCORES = frozenset({"arithmetic"})
"""Environments whose groups of equal scores are trained on too, though they teach nothing. Once the
task is nearly solved most groups are such. To replace them took more sampling than all the rest.
The calculator's model begins with next to nothing right, and would have batches with nothing to
learn from.
"""


GPU_SHARES = {"single-copy": roles.GPU_SHARE_BESIDE_TRAINER, "broadcast": 0.85}
"""Bridge -> part of its GPU's memory that vLLM takes."""


@dataclass(frozen=True)
class Ports:
    """Where the processes of one run listen, all on this machine."""

    service: int
    vllm: int
    rendezvous: int


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
        """The environment's metrics, JSON lines: over every answer that was sampled, also in groups
        that it dropped.
        """
        return self.options.output / "environment" / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """The groups that were trained on, JSON lines."""
        return self.options.output / "environment" / "rollouts.jsonl"

    def _variables(self, gpus: tuple[int, ...], threads: int) -> dict[str, str]:
        """Return the variables of a process that computes."""
        found = roles.bridge_variables(self.ports.rendezvous, self.logs, shared=True)
        return found | roles.device_variables(gpus, threads)

    def service(self) -> Command:
        """The rollout service."""
        words = roles.service(
            "127.0.0.1",
            self.ports.service,
            new_run=True,
            run_folder=self.options.output,
            vllm_server=[f"http://localhost:{self.ports.vllm}"],
        )
        return Command("rollout service", tuple(words), {}, "service.log")

    def vllm(self) -> Command:
        """The inference server, its weights shared with the trainer."""
        options, share = self.options, None
        # Half of the cores: a small model's steps cost more processor time on several threads than
        # on one. The trainer and the processes between them need some too.
        variables = self._variables(options.gpus[:1], max(1, roles.cores() // 2))
        variables["VLLM_NO_USAGE_STATS"] = "1"
        if options.gpus:
            share = GPU_SHARES[options.bridge]
        else:
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        server = roles.vllm_flags(
            "127.0.0.1",
            bool(options.gpus),
            gpu_memory_utilization=share,
            max_model_len=MAX_MODEL_LENGTH,
            max_num_seqs=MAX_SEQUENCES,
            seed=options.seed,
        )
        words = roles.vllm_server(options.model, self.ports.vllm, server)
        return Command("vLLM server", tuple(words), variables, "vllm.log", grace=20.0)

    def _environment(self, action: str, **settings: roles.Value) -> tuple[str, ...]:
        """Return the environment's command, with the settings that serving and evaluating have in
        common.
        """
        options = self.options
        words = roles.environment(
            options.environment,
            self.service_url,
            [self.vllm_url],
            action=action,
            settings={
                "seed": options.seed,
                "max_token_length": MAX_RESPONSE_TOKENS,
                "group_size": self.batch.group_size,
                "difficulty": ",".join(map(str, options.difficulty)) or None,
                **settings,
            },
        )
        return tuple(words)

    def environment(self) -> Command:
        """The environment that poses problems, samples and scores."""
        words = self._environment(
            "serve",
            steps_per_eval=0,
            max_batches_offpolicy=BATCHES_AHEAD,
            max_num_workers_per_node=self.batch.groups_in_work,
            ensure_scores_are_not_same=self.options.environment not in KEEPS_EQUAL_SCORES,
            metrics_path=self.environment_metrics,
            data_path_to_save_groups=self.rollouts,
        )
        return Command(
            "environment", words, {"OMP_NUM_THREADS": "1"}, "environment.log", may_finish=True
        )

    def evaluation(self, which: str, result: Path) -> Command:
        """Greedy answers to the held-out problems, the result written to a JSON file."""
        words = self._environment("evaluate", eval_size=self.options.eval_size, eval_output=result)
        return Command(
            f"evaluation {which} training",
            words,
            {"OMP_NUM_THREADS": "1"},
            f"evaluation-{which}.log",
        )

    def trainer(self) -> Command:
        """The GRPO trainer, joined to vLLM by the weight bridge."""
        options = self.options
        words = roles.trainer(
            options.model,
            options.bridge,
            self.service_url,
            {
                "vllm_port": self.ports.vllm,
                "training_steps": options.steps,
                "lr": options.lr,
                "lr_schedule": "cosine",
                "seed": options.seed,
                "batch_size": MICRO_BATCH,
                "gradient_accumulation_steps": self.batch.rollouts // MICRO_BATCH,
                "seq_len": MAX_MODEL_LENGTH,
                "log_dir": self.trainer_folder,
                "save_path": options.output / "checkpoints",
                "checkpoint_interval": 0,
            },
        )
        gpus = options.gpus[:1]
        if options.bridge == "broadcast":
            gpus = options.gpus[1:2]
        return Command(
            "trainer", tuple(words), self._variables(gpus, roles.cores()), "trainer.log", grace=20.0
        )

    def script(self) -> str:
        """The run as a person could type it, for a file beside the logs."""
        return roles.script([self.service(), self.vllm(), self.environment(), self.trainer()])
