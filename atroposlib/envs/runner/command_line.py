"""The command line of an environment file: `serve` (the default), `process` and `evaluate`, and the
settings that flags and a YAML file give it.
"""

import argparse
import asyncio
import difflib
import functools
import json
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import openai
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from atroposlib.command_line import add_flags
from atroposlib.envs.config import (
    ENV_NAMESPACE,
    NAMESPACE_SEP,
    OPENAI_NAMESPACE,
    SERVER_MANAGER_NAMESPACE,
    BaseEnvConfig,
)
from atroposlib.envs.runner.items import as_list
from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.client import describe
from atroposlib.inference.server_manager import (
    APIServerConfig,
    FleetFollower,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.utils.files import cannot_write, disk_refusal, remedy, require_writable
from atroposlib.utils.jsonl import replace_file
from atroposlib.utils.log_lines import LogLines
from atroposlib.utils.yaml_files import YamlError, load_yaml, read_yaml
from atroposlib.web.addresses import proxy_trouble
from atroposlib.web.keys import (
    SERVICE_KEY,
    all_settings,
    given_or_variable,
    is_secret,
    open_settings,
)

logger = logging.getLogger(__name__)

MISSPELT = 0.8
"""An unknown key that is so much like a known one (difflib's ratio) is a misspelt one."""
OF_OTHER_PROGRAMS = ("tinker",)
"""Top-level keys of a YAML file that are for other programs that read the same file."""


Servers = ServerBaseline | APIServerConfig | list[APIServerConfig]


@dataclass
class Settings:
    """Everything an environment is constructed with."""

    env: BaseEnvConfig
    servers: Servers
    manager: ServerManagerConfig
    more: dict[str, Servers] = field(default_factory=dict)


def models_of(env_cls: type[BaseModel], more: Iterable[str] = ()) -> dict[str, type[BaseModel]]:
    """Return the settings of each namespace. `more`: namespaces of servers beside `openai`."""
    return {
        ENV_NAMESPACE: env_cls,
        **dict.fromkeys((OPENAI_NAMESPACE, *more), APIServerConfig),
        SERVER_MANAGER_NAMESPACE: ServerManagerConfig,
    }


def flags_of(namespace: str, name: str) -> list[str]:
    """Return the flags of a setting. A setting of the server manager has a short one first."""
    flag = f"--{namespace}{NAMESPACE_SEP}{name}"
    return [f"--{name}", flag] if namespace == SERVER_MANAGER_NAMESPACE else [flag]


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`s, in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def flag_parser(
    env_cls: type[BaseModel],
    more: Iterable[str] = (),
    defaults: Mapping[str, BaseModel] | None = None,
    **texts: Any,
) -> FlagParser:
    """Return a parser of all flags, whose values stay text.

    Args:
        env_cls: the environment's settings.
        more: namespaces of servers beside `openai`.
        defaults: settings whose values the help shows, by namespace.
        texts: of the help, as argparse takes them.
    """
    parser = FlagParser(add_help=False, allow_abbrev=False, **texts)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    for namespace, model in models_of(env_cls, more).items():
        flags = functools.partial(flags_of, namespace)
        shown_settings = (defaults or {}).get(namespace)
        add_flags(parser, model, flags, shown_settings, nargs="?", const="true", metavar="BOOL")
    return parser


FlagValues = Mapping[str, dict[str, Any]]
"""The user's flags by namespace. Values are still text."""


def parse_flags(
    arguments: list[str], env_cls: type[BaseModel], more: Iterable[str] = ()
) -> FlagValues:
    """Read `--env.group_size 8`, `--env.group_size=8` and, for booleans, a bare `--env.use_wandb`.

    Dashes and underscores in names are the same. The word None stands for no value.

    Returns:
        The server manager's settings and `config` have an empty namespace.

    Raises:
        UsageError: an unknown flag (with the nearest known one), a stray word, or a missing value.
    """
    more = list(more)
    values, rest = flag_parser(env_cls, more).parse_known_args(map(underscored, arguments))
    if rest:
        flag = rest[0].partition("=")[0]
        if not flag.startswith("--"):
            raise UsageError(
                f"{flag!r} is neither a command (serve, process, evaluate) nor the value of a flag"
            )
        near = nearest(flag.removeprefix("--"), flag_names(env_cls, more), "--")
        raise UsageError(f"unknown flag {flag}{near}; --help lists all flags")
    flags: dict[str, dict[str, Any]] = defaultdict(dict)
    for flag, value in vars(values).items():
        namespace, _, name = flag.rpartition(NAMESPACE_SEP)
        flags[namespace][name] = None if value == "None" else value
    return flags


def underscored(word: str) -> str:
    """Write `_` for `-` in the name of a flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def flag_names(env_cls: type[BaseModel], more: Iterable[str] = ()) -> list[str]:
    """Return the names of all flags, without dashes."""
    flags = [
        flag.removeprefix("--")
        for namespace, model in models_of(env_cls, more).items()
        for name in model.model_fields
        for flag in flags_of(namespace, name)
    ]
    return ["config", *flags]


def nearest(name: str, names: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """` (did you mean X?)`, or nothing when no known name is near."""
    names = list(names)
    bare = {entry.rpartition(NAMESPACE_SEP)[2]: entry for entry in reversed(names)}
    matches = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    matches = matches or difflib.get_close_matches(
        name.rpartition(".")[2], bare, n=1, cutoff=cutoff
    )
    if not matches:
        return ""
    return f" (did you mean {prefix}{bare.get(matches[0], matches[0])}?)"


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        UsageError: the file cannot be read, is not YAML, or does not hold a table of keys.
    """
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except YamlError as error:
        raise UsageError(f"--config {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {path}: must hold keys such as `env:` and `openai:`, not a {type(content).__name__}"
        )
    return content


def known_keys(
    content: Any, names: Iterable[str], where: str, cutoff: float | None = None
) -> dict[str, Any]:
    """Return a table of settings; empty for None.

    Args:
        content: from the YAML file.
        names: the known keys.
        where: the place of the table, for messages.
        cutoff: keys that are less like a known key than this (difflib's ratio) are left out with a
            warning. Files written for Atropos have such keys. None: each is an error.

    Raises:
        UsageError: it is not a table, or has an unknown key.
    """
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{where} must hold keys and values, not {content!r:.60}")
    fields = set(names)
    foreign = [key for key in content if key not in fields]
    for key in foreign:
        near = nearest(str(key), fields, cutoff=cutoff or 0.6)
        if near or cutoff is None:
            raise UsageError(f"unknown key {key!r} in {where}{near}")
    if foreign:
        logger.warning(
            "%s has settings that do not exist, and they are ignored: %s",
            where,
            ", ".join(map(str, foreign)),
        )
    return {key: value for key, value in content.items() if key in fields}


def yaml_tables(
    yaml_content: Mapping[str, Any], env_cls: type[BaseEnvConfig], more: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a YAML file's content, its environment settings, and its settings of the server manager.

    Args:
        more: namespaces of servers beside `openai`.

    Raises:
        UsageError: an unknown key.
    """
    manager_fields = ServerManagerConfig.model_fields
    top = {
        ENV_NAMESPACE,
        OPENAI_NAMESPACE,
        SERVER_MANAGER_NAMESPACE,
        *manager_fields,
        *OF_OTHER_PROGRAMS,
        *more,
    }
    content = known_keys(dict(yaml_content), top, "the YAML file")
    env = known_keys(
        content.get(ENV_NAMESPACE),
        env_cls.model_fields,
        f"`{ENV_NAMESPACE}` of the YAML file",
        MISSPELT,
    )
    manager = known_keys(
        content.get(SERVER_MANAGER_NAMESPACE),
        manager_fields,
        f"`{SERVER_MANAGER_NAMESPACE}` of the YAML file",
    )
    return content, env, manager | {key: content[key] for key in manager_fields if key in content}


def merge(
    default_env: BaseEnvConfig,
    default_servers: Servers,
    flags: FlagValues,
    yaml_content: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    more: Mapping[str, Servers | None] | None = None,
) -> Settings:
    """Put the sources together.

    Args:
        default_env: from `config_init`, as `default_servers`.
        flags: the flags.
        yaml_content: the YAML file, or an empty table.
        overrides: what a command changes in the environment's defaults, under YAML and flags.
        more: defaults of servers beside `openai`, by their namespace; None where there are none
            unless YAML or flags name them.

    Raises:
        UsageError: an unknown key or a value that does not validate.
    """
    more = more or {}
    content, yaml_env, yaml_manager = yaml_tables(yaml_content, type(default_env), more)
    env = validated(
        type(default_env),
        all_settings(default_env) | dict(overrides or {}) | yaml_env | flags.get(ENV_NAMESPACE, {}),
        ENV_NAMESPACE,
    )
    servers = merged_servers(
        default_servers,
        content.get(OPENAI_NAMESPACE),
        flags.get(OPENAI_NAMESPACE, {}),
        OPENAI_NAMESPACE,
    )
    beside = {
        namespace: merged_servers(
            default or APIServerConfig(),
            content.get(namespace),
            flags.get(namespace, {}),
            namespace,
        )
        for namespace, default in more.items()
        if default is not None or content.get(namespace) or flags.get(namespace)
    }
    manager_flags = {name: value for name, value in flags.get("", {}).items() if name != "config"}
    manager = validated(ServerManagerConfig, yaml_manager | manager_flags, SERVER_MANAGER_NAMESPACE)
    return Settings(env=env, servers=servers, manager=manager, more=beside)


def merged_servers(
    default: Servers, in_yaml: Any, flags: dict[str, Any], namespace: str
) -> Servers:
    """The servers of one namespace: flags over YAML over the environment's own.

    Raises:
        UsageError: a value that does not validate, or a key that is a known one, misspelt.
    """
    in_yaml = in_yaml or []
    entries = [
        known_keys(entry, APIServerConfig.model_fields, f"`{namespace}` of the YAML file", MISSPELT)
        for entry in as_list(in_yaml)
    ]
    single: dict[str, Any] = {}
    if len(as_list(default)) == 1:
        single = all_settings(as_list(default)[0])
    if len(entries) == 1:
        single |= entries[0]
    single |= flags
    validated(APIServerConfig, single, namespace)
    for entry in entries:
        validated(APIServerConfig, entry, namespace)
    several: list[APIServerConfig] = []
    if len(entries) > 1:
        several = [APIServerConfig(**entry) for entry in entries]
    elif isinstance(default, list) and len(default) > 1 and not any(entries):
        several = default
    if several and flags:
        raise UsageError(
            f"--{namespace}{NAMESPACE_SEP}{min(flags)}: {len(several)} servers are configured, "
            f"so set it in the YAML file's `{namespace}` list"
        )
    if several:
        return several
    if type(default) is ServerBaseline and not any(entries) and not flags:
        return default
    server = APIServerConfig(**single)
    if isinstance(default, APIServerConfig):
        return server
    return [server]


def validated(model: type[Any], values: dict[str, Any], namespace: str) -> Any:
    """An instance of the model; text from flags is turned into the fields' types, lists and tables
    being YAML.

    Raises:
        UsageError: the first value that does not fit, by the name of its flag.
    """
    try:
        return model(**values)
    except ValidationError as first:
        # A flag is text: where the field wants a list or a table, the text is read as YAML.
        wrong = {
            str(error["loc"][0])
            for error in first.errors()
            if error["loc"] and isinstance(error["input"], str)
        }
        as_yaml = dict(values)
        for name in wrong & values.keys():
            if isinstance(values[name], str):
                try:
                    as_yaml[name] = load_yaml(values[name])
                except YamlError:
                    as_yaml[name] = values[name]
        try:
            return model(**as_yaml)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = NAMESPACE_SEP.join([namespace, *(str(part) for part in problem["loc"])])
            message = problem["msg"].removeprefix("Value error, ")
            # A whole model's input holds its keys too.
            hidden = not problem["loc"] or is_secret(
                str(problem["loc"][0]), model.model_fields.get(str(problem["loc"][0]))
            )
            value = f" {problem['input']!r:.80}"
            if hidden:
                value = ""
            # Not `from error`: a traceback would show the input.
            raise UsageError(f"--{flag}{value}: {message}") from None


if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv


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
        flags = parse_flags(arguments, type(default_env), more)
        config = flags[""]["config"]
        yaml_content = read_config(config) if config else {}
        overrides = command_defaults(command, env_cls, default_env)
        settings = merge(default_env, default_servers, flags, yaml_content, overrides, more)
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
        # A refusal by a server, or a rollout that failed, is not a fault of this program, so that
        # a traceback would mislead.
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
    if command == "process":
        check_groups(settings.env)
    check_outputs(settings.env)
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
            # Also when it is stopped, because a person may want to read the rollouts then too.
            say_where_groups_are(settings.env.data_path_to_save_groups, env)


def check_groups(config: Any) -> None:
    """Refuse to make no groups.

    Raises:
        UsageError: `total_steps` is below 1.
    """
    if (groups := config.total_steps) < 1:
        raise UsageError(
            f"--{ENV_NAMESPACE}.total_steps {groups}: `process` makes this many groups, give 1 or more"
        )


def check_outputs(config: Any) -> None:
    """Refuse files that cannot be written, before any work is done for them.

    Raises:
        UsageError: a path is a folder, or its own folder cannot be made or written.
    """
    for name in ("eval_output", "data_path_to_save_groups"):
        if (value := getattr(config, name, None)) is None:
            continue
        path, flag = Path(value), f"--{ENV_NAMESPACE}.{name}"
        if path.is_dir():
            raise UsageError(f"{flag} {path} is a folder: name a file in it")
        if path.exists() and not path.is_file():  # a device or a pipe
            continue
        try:
            require_writable(path.parent)
        except OSError as error:
            advice = remedy(error, "name another path")
            raise UsageError(f"{flag}: {cannot_write(path, error)}; {advice}") from error


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
    """Log the command that shows the groups that were written, if there are any."""
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
    for chatty in ("httpx", "httpx2", "httpcore", "openai", "filelock", "urllib3"):
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
