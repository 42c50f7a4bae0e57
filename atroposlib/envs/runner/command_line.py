"""The command line of an environment file: `serve` (the default), `process` and `evaluate`."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import yaml
from pydantic import BaseModel, ConfigDict, create_model

from atroposlib.envs.config import ENV_NAMESPACE, OPENAI_NAMESPACE
from atroposlib.envs.runner.settings import (
    Settings,
    flag_names,
    flag_parser,
    merge,
    parse_flags,
    read_config,
)
from atroposlib.envs.runner.state import as_list
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.client import describe
from atroposlib.inference.server_manager import APIServerConfig, FleetFollower
from atroposlib.utils.files import disk_refusal
from atroposlib.utils.jsonl import replace_file
from atroposlib.utils.log_lines import LogLines
from atroposlib.web.addresses import proxy_trouble
from atroposlib.web.keys import SERVICE_KEY, given_or_variable, open_settings

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)

COMMANDS = {
    "serve": "make rollouts for a trainer until it is done (the default)",
    "process": "make --env.total_steps groups without a trainer and write them to a file",
    "evaluate": "measure the served model once",
}
GROUPS_BY_DEFAULT = 8
INTERRUPTED = 130


def main(env_cls: "type[BaseEnv]", arguments: list[str] | None = None) -> int:
    """Run a command and return the process's exit code: 0 done or stopped by SIGTERM, 1 failed, 2
    wrong usage.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    configure_logging()
    try:
        default_env, default_servers = env_cls.config_init()
        command = "serve"
        if arguments and arguments[0] in COMMANDS:
            command = arguments.pop(0)
        if "--help" in arguments or "-h" in arguments:
            print(help_text(env_cls, default_env, default_servers))
            return 0
        if trouble := proxy_trouble():
            raise UsageError(trouble)
        more = more_servers(env_cls)
        given = parse_flags(arguments, type(default_env), more)
        yaml_content = read_config(given.config) if given.config else {}
        overrides = command_defaults(command, env_cls, default_env)
        settings = merge(default_env, default_servers, given, yaml_content, overrides, more)
        return asyncio.run(run_until_stopped(start(env_cls, command, settings)))
    except EnvironmentFailure as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return failure.exit_code
    except OSError as error:
        line = disk_refusal(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr, flush=True)
        return EnvironmentFailure.exit_code
    except (httpx.HTTPError, openai.APIError, RolloutFailure) as error:
        # What a server refused, or a rollout that could not be made, is no fault of this program:
        # no traceback.
        print(f"error: {' '.join(describe(error).split())}", file=sys.stderr, flush=True)
        return EnvironmentFailure.exit_code


def config_class(env_cls: "type[BaseEnv]", command: str) -> type[BaseModel]:
    """A model of a command's flags.

    Fields that are given count as flags: over YAML, over `config_init`.
    """

    class Flags(BaseModel):
        model_config = ConfigDict(extra="forbid")

        def run(self) -> int:
            """Run the command; returns the process's exit code."""
            words = [command]
            for name in sorted(self.model_fields_set):
                value = getattr(self, name)
                if value is None:
                    value = "None"
                elif not isinstance(value, str):
                    value = json.dumps(value)
                words += [f"--{name}", value]
            return main(env_cls, words)

    default_env, _ = env_cls.config_init()
    fields: dict[str, Any] = {
        name: (Any, None) for name in flag_names(type(default_env), more_servers(env_cls))
    }
    return create_model(f"Cli{command.capitalize()}Config", __base__=Flags, **fields)


def more_servers(env_cls: "type[BaseEnv]") -> dict[str, Any]:
    """Defaults of servers beside the inference servers, by the prefix of their flags.

    Only an environment with a teacher of its own (`TeacherDistillationEnv`) has the attribute that
    names such a prefix.
    """
    prefix = getattr(env_cls, "teacher_namespace", None)
    if prefix is None:
        return {}
    return {prefix: env_cls.teacher_config_init()}  # type: ignore[attr-defined]


def command_defaults(
    command: str, env_cls: "type[BaseEnv]", default_env: BaseModel
) -> dict[str, Any]:
    """Return a command's changes to the environment's defaults. YAML and flags override them."""
    changes: dict[str, Any] = {}
    if getattr(default_env, "wandb_name", None) is None:
        changes["wandb_name"] = env_cls.name
    if command == "process":
        changes |= {"ensure_scores_are_not_same": False, "include_messages": True}
        if getattr(default_env, "data_path_to_save_groups", None) is None:
            changes["data_path_to_save_groups"] = f"data/{env_cls.name or 'groups'}.jsonl"
        if getattr(default_env, "total_steps", -1) < 0:
            changes["total_steps"] = GROUPS_BY_DEFAULT
    return changes


async def start(env_cls: "type[BaseEnv]", command: str, settings: Settings) -> None:
    """Construct the environment and run one command to its end."""
    env = env_cls(
        config=settings.env,
        server_configs=settings.servers,
        slurm=settings.manager.slurm,
        testing=settings.manager.testing,
    )
    if settings.more:
        env.take_servers(settings.more)  # type: ignore[attr-defined]  # of the class that more_servers asked
    env.server.max_n_completions = settings.manager.max_n_completions
    if settings.manager.proxy_url:
        env.server.proxy_url, env.server.use_proxy = settings.manager.proxy_url, True
    if settings.manager.follow_fleet:
        env.server.follower = FleetFollower(
            settings.env.rollout_server_url,
            given_or_variable(settings.env.rollout_server_api_key, SERVICE_KEY),
        )
    if command == "process":
        await env.process_manager()
        say_where_groups_are(settings.env.data_path_to_save_groups, env)
    elif command == "evaluate":
        if settings.env.data_dir_to_save_evals is not None:
            write_evaluate_config(Path(settings.env.data_dir_to_save_evals), settings)
        await env._runner.evaluate()
    else:
        try:
            await env.env_manager()
        finally:
            # Also when it is stopped: whoever trained wants to read what was sampled.
            say_where_groups_are(settings.env.data_path_to_save_groups, env)


def write_evaluate_config(folder: Path, settings: Settings) -> None:
    """Keep with what an evaluation was run, without the keys: a YAML file that `--config` reads."""
    shown_servers: Any = [open_settings(server) for server in as_list(settings.servers)]
    if not isinstance(settings.servers, list):
        shown_servers = shown_servers[0]
    content = {
        ENV_NAMESPACE: open_settings(settings.env),
        OPENAI_NAMESPACE: shown_servers,
        "slurm": settings.manager.slurm,
        "testing": settings.manager.testing,
    }
    replace_file(folder / "evaluate_config.yaml", yaml.safe_dump(content, sort_keys=False).encode())


def say_where_groups_are(groups_path: str | None, env: "BaseEnv") -> None:
    """Say how a person reads the groups that were written, if there are any."""
    if groups_path and Path(groups_path).is_file() and Path(groups_path).stat().st_size:
        tokenizer = getattr(
            env.loaded_tokenizer, "name_or_path", ""
        )  # it is not to be loaded for this
        named = tokenizer and f" --tokenizer {tokenizer}"
        logger.info(
            "wrote the groups to %s; read them with: view-run %s%s", groups_path, groups_path, named
        )


async def run_until_stopped(work: Awaitable[None]) -> int:
    """Run to the end, or until SIGTERM or SIGINT, in which case the work is cancelled and may clean
    up.
    """
    task = asyncio.ensure_future(work)
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        logger.info("%s: stopping", number.name)
        stopped_by.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped_by:
            raise
    if signal.SIGINT in stopped_by:
        return INTERRUPTED
    return 0


def configure_logging() -> None:
    """Log to stdout, once; `LOG_LEVEL` sets the level."""
    if logging.getLogger().handlers:
        return
    logging.basicConfig(
        level=os.environ.get("LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[LogLines(sys.stdout)],
    )
    for chatty in ("httpx", "httpcore", "openai", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def help_text(env_cls: "type[BaseEnv]", default_env: BaseModel, default_servers: Any) -> str:
    """Return all commands and flags with their defaults."""
    script = Path(sys.argv[0]).name
    commands = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    paragraph = (env_cls.__doc__ or "").strip().partition("\n\n")[0]
    summary = " ".join(paragraph.split())
    defaults = {ENV_NAMESPACE: default_env}
    server = default_servers
    if isinstance(default_servers, list) and default_servers:
        server = default_servers[0]
    if isinstance(server, APIServerConfig):
        defaults[OPENAI_NAMESPACE] = server
    parser = flag_parser(
        type(default_env),
        more_servers(env_cls),
        defaults,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{script} [{'|'.join(COMMANDS)}] [--config FILE.yaml] [flags]",
        description=f"{summary}\n\ncommands:\n{commands}".lstrip(),
        epilog="A YAML file holds the same names under `env:` and `openai:`; flags win over it.",
    )
    return parser.format_help()
