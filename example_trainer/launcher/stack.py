"""Commands of the stack, as example_trainer/README.md types them, with ports, folders and devices
filled in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from example_trainer.launcher import roles
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.options import StackOptions, degrees
from example_trainer.launcher.records import KEYS_FILE, server_name, server_number
from example_trainer.launcher.roles import Command
from example_trainer.launcher.starter_models import (
    BATCHES,
    LEARNING_RATES,
    MAX_MODEL_LENGTH,
    MAX_RESPONSE_TOKENS,
    MAX_SEQUENCES,
    MICRO_BATCH,
)

LOGS = {"service": "api.log", "vllm": "vllm.log", "trainer": "trainer.log"}
"""As the launch sequence names them; the environment's is gsm8k.log or env.log, a further server's
vllm-2.log and so on."""
SMALL_BATCH = BATCHES["arithmetic"]
"""Shape of a batch if the starter model is trained."""
SMALL_SETTINGS = {
    "group_size": SMALL_BATCH.group_size,
    "max_num_workers_per_node": SMALL_BATCH.groups_in_work,
    "max_token_length": MAX_RESPONSE_TOKENS,
}
"""Settings of the environment if the starter model is trained."""


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
        """The command that starts a part."""
        number = server_number(part)
        made: Command = getattr(self, part)() if number is None else self.vllm(number)
        return made

    def port(self, part: str) -> int:
        """Where a part listens, or the vLLM server that the trainer owns; 0 if nowhere."""
        number = server_number(part)
        if self.options.bridge == "restart":
            number = {"trainer": 0}.get(part)
        if number is not None:
            return self.options.vllm_ports[number]
        return {"service": self.options.service_port}.get(part, 0)

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
        needed += [
            (options.vllm_ports[n], "--vllm-port" + f" of {server_name(n)}" * (n > 0))
            for n in servers
        ]
        if "trainer" in options.parts:
            if options.bridge in ("auto", "broadcast"):
                needed.append((options.master_port, "--master-port"))
            if options.metrics_port:
                needed.append((options.metrics_port, "--metrics-port"))
        found: dict[int, str] = {}
        for number, flag in needed:
            if number in found:
                raise LauncherError(
                    f"port {number} is both {found[number]} and {flag}: give another one of them"
                )
            found[number] = flag
        return found

    def log(self, part: str) -> Path:
        """A part's log."""
        name = self._environment_log() if part == "environment" else LOGS.get(part, f"{part}.log")
        return self.options.run / name

    def folder(self, server: int) -> Path:
        """Where a vLLM server, counted from 0, publishes its configuration; the first one in the
        run's own folder.
        """
        return self.options.run if server == 0 else self.options.run / server_name(server)

    def _environment_log(self) -> str:
        return "gsm8k.log" if Path(self.options.environment).name.startswith("gsm8k") else "env.log"

    def _variables(self, gpus: tuple[int, ...], folder: Path) -> dict[str, str]:
        """Return the variables of a process that computes."""
        shared = self.options.bridge not in ("none", "restart", "lora")
        found = roles.bridge_variables(self.options.master_port, folder, shared)
        return found | roles.device_variables(gpus, roles.cores())

    def service(self) -> Command:
        """The rollout service."""
        options = self.options
        words = roles.service(
            options.host,
            options.service_port,
            store=options.run / "rollouts.db",
            run_folder=options.run,
            vllm_server=[self.vllm_url(server) for server in range(options.servers)],
        )
        return Command("service", (*words, *options.service_args), {}, LOGS["service"])

    def _vllm_flags(self) -> list[str]:
        options, size = self.options, degrees(self.options.vllm_args)
        gpus = len(options.gpus_of(0)) // size.data
        sizes: dict[str, roles.Value] = {}
        if options.small:
            sizes = {"max_model_len": MAX_MODEL_LENGTH, "max_num_seqs": MAX_SEQUENCES}
        if gpus > 1 and size.tensor is None:
            sizes["tensor_parallel_size"] = gpus
        if options.bridge != "restart" and set(options.vllm_gpus) & set(options.trainer_gpus):
            sizes["gpu_memory_utilization"] = roles.GPU_SHARE_BESIDE_TRAINER
        sizes["enable_lora"] = options.bridge == "lora"
        on_gpu = bool(options.vllm_gpus)
        words = roles.vllm_flags(options.host, on_gpu, None, False, **sizes)
        return [*words, *options.vllm_args]

    def vllm(self, server: int = 0) -> Command:
        """An inference server, counted from 0."""
        name = server_name(server)
        words = roles.vllm_server(
            self.options.model, self.options.vllm_ports[server], self._vllm_flags()
        )
        variables = self._variables(self.options.gpus_of(server), self.folder(server))
        return Command(name, tuple(words), variables, self.log(name).name, grace=30.0)

    def environment(self) -> Command:
        """The environment, which waits for the others by itself."""
        options, settings = self.options, dict[str, roles.Value]()
        if options.small:
            settings |= SMALL_SETTINGS
        words = roles.environment(
            options.environment,
            self.service_url,
            [self.vllm_url(server) for server in range(options.servers)],
            follow_fleet=options.servers > 1,  # A server that joins later gets requests too.
            settings=settings,
        )
        words += options.environment_args
        return Command(
            "environment",
            tuple(words),
            {"OMP_NUM_THREADS": "1"},
            self._environment_log(),
            may_finish=True,
        )

    def _owned_server(self) -> dict[str, roles.Value]:
        """Return the trainer's options for the vLLM server that it owns with --bridge restart."""
        options = self.options
        if options.bridge != "restart":
            return {}
        return {
            "vllm_restart_interval": options.restart_interval,
            "vllm_args": " ".join(self._vllm_flags()),
            "vllm_gpus": ",".join(map(str, options.vllm_gpus)) or None,
        }

    def _sizes(self) -> dict[str, roles.Value]:
        """Return learning rate and shape of a batch: as given, or as they suit the starter
        model.
        """
        chosen = {"lr": self.options.lr, "batch_size": self.options.batch_size}
        sizes: dict[str, roles.Value] = {k: v for k, v in chosen.items() if v is not None}
        if not self.options.small:
            return sizes
        micro_batch = self.options.batch_size or MICRO_BATCH
        return {
            "lr": LEARNING_RATES["arithmetic"],
            "lr_schedule": "cosine",
            "batch_size": micro_batch,
            "gradient_accumulation_steps": max(1, SMALL_BATCH.rollouts // micro_batch),
            "seq_len": MAX_MODEL_LENGTH,
            **sizes,
        }

    def trainer(self) -> Command:
        """The trainer, which starts one process for each of its GPUs."""
        options = self.options
        reached: dict[str, roles.Value] = {"vllm_port": options.vllm_port}
        if options.servers > 1:
            addresses = [f"localhost:{port}" for port in options.vllm_ports]
            reached = {"vllm_servers": ",".join(addresses)}
        if options.metrics_port:
            reached |= {"metrics_port": options.metrics_port, "metrics_host": options.host}
        if options.resume:
            reached["resume"] = "auto"
        words = roles.trainer(
            options.model,
            options.bridge,
            self.service_url,
            {
                **reached,
                "training_steps": options.steps,
                "log_dir": options.run / "trainer",
                "save_path": options.run / "checkpoints",
                **self._owned_server(),
                **self._sizes(),
            },
        )
        variables = self._variables(options.trainer_gpus, options.run)
        return Command(
            "trainer",
            (*words, *options.trainer_args),
            variables,
            LOGS["trainer"],
            grace=120.0,
            may_finish=True,
        )

    def script(self) -> str:
        """The commands as a person could type them, for a file in the run's folder."""
        commands = [self.command(part) for part in self.options.parts]
        return roles.script(commands, self.options.run / KEYS_FILE)
