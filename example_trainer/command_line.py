"""The trainer's command line and YAML file: every field of TrainerConfig is a flag and a key, and
what is wrong is one line.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from atroposlib.utils.yaml_files import YamlError, read_yaml, underscored
from atroposlib.web.addresses import proxy_trouble
from example_trainer.algorithm.advantages import find_advantages, is_import, make_importable
from example_trainer.api_keys import SECRETS
from example_trainer.config import SECTIONS, TrainerConfig, flag_of
from example_trainer.errors import ConfigError

Options = TypeVar("Options", bound=BaseModel)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo.py",
        description="Train a language model with GRPO on rollouts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with any of the options below; flags win over it",
    )
    for section in SECTIONS:
        add_section(parser, section)
    return parser


def add_section(
    parser: argparse.ArgumentParser, section: type[BaseModel], leave_out: Collection[str] = ()
) -> None:
    """Add the flags of a section. Flags that are not given are absent from the result.

    Args:
        leave_out: fields that get no flag.
    """
    group = parser.add_argument_group(section.__doc__)
    for name, field in section.model_fields.items():
        if name in leave_out:
            continue
        group.add_argument(flag_of(name), **_argument(name, field))
        if _is_switch(field.annotation):
            group.add_argument(
                "--no-" + flag_of(name).removeprefix("--"),
                dest=name, action="store_const", const="off", default=argparse.SUPPRESS, help=argparse.SUPPRESS,
            )  # fmt: skip


def _argument(name: str, field: FieldInfo) -> dict[str, Any]:
    """The arguments with which argparse reads and explains a field."""
    shown = f"default: {field.get_default()}"
    if name in SECRETS:
        shown = f"default: ${SECRETS[name]}"
    elif field.is_required():
        shown = "required"
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = f"{field.description} ({shown})".replace("%", "%%")
    if _is_switch(field.annotation):
        options |= {"nargs": "?", "const": "on", "metavar": "{auto,on,off}"}
    elif field.annotation is bool or bool in get_args(field.annotation):
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(field.annotation) is list:
        options |= {"nargs": "+", "metavar": "NAME"}
    else:
        options["metavar"] = _metavar(field.annotation)
    return options


def _is_switch(annotation: Any) -> bool:
    """Return whether a field is on, off or auto (see options.model.Switch)."""
    return {bool, Literal["auto"]} <= set(get_args(annotation))


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) in (Union, UnionType):
        return _metavar(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return {int: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")


def _nearest(name: str, known: Sequence[str]) -> str:
    for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"; did you mean {match}?"
    return "; see --help"


def parse_config(arguments: Sequence[str]) -> TrainerConfig:
    """Read the options from the command line and from the YAML file that it names.

    Raises:
        ConfigError: an unknown flag or key (the nearest valid name is given), a value that does not
            fit, or advantages of the user's that are none. From here on modules are found in the
            current directory and beside the YAML file too.
        SystemExit: --help was given.
    """
    flags = read_flags(_parser(), arguments)
    file, values = flags.pop("config"), {}
    if file:
        values = _read_options(file)
    return checked_config(values | flags, flags, file)


def read_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of flags, by name.

    Raises:
        ConfigError: an unknown flag; the nearest that there is is given.
        SystemExit: --help was given.
    """
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=")[0]
        kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
        options = [
            option
            for action in parser._actions
            for option in action.option_strings
            if option.startswith("--")
        ]
        raise ConfigError(f"{kind} {flag}{_nearest(flag, options)}")
    return vars(flags)


def checked_config(
    values: Mapping[str, Any], flags: Collection[str], file: Path | None = None
) -> TrainerConfig:
    """The options of these values.

    Args:
        flags: names of the values that came as flags.
        file: where the others came from.

    Raises:
        ConfigError: a value does not fit, or the variables for proxies cannot be read.
    """
    if trouble := proxy_trouble():
        raise ConfigError(trouble)
    config = checked(TrainerConfig, values, flags, file)
    method = config.method
    if is_import(method.loss) or is_import(method.advantages):
        make_importable([Path.cwd()])
        if file:
            make_importable([file.parent])
    # Long before the first batch; the loss is tried when the objective is made of it.
    find_advantages(method.advantages)
    return config


def parse_section(section: type[Options], program: str, arguments: Sequence[str]) -> Options:
    """Read the flags of a program that has one section of options.

    Raises:
        ConfigError: an unknown flag, or a value that does not fit.
        SystemExit: --help was given.
    """
    parser = Parser(prog=program, allow_abbrev=False)
    add_section(parser, section)
    flags = read_flags(parser, arguments)
    return checked(section, flags, flags)


def checked(
    options: type[Options],
    values: Mapping[str, Any],
    flags: Collection[str],
    file: Path | None = None,
) -> Options:
    """As checked_config, of any options."""
    try:
        return options.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, from_flags=set(flags), file=file)) from error


def read_config(file: Path) -> Any:
    """Return the content of a configuration file, which may be anything that YAML can express.

    Raises:
        ConfigError: the file cannot be read or is not YAML; a single line.
    """
    try:
        return read_yaml(file)
    except OSError as error:
        raise ConfigError(f"cannot read --config {file}: {error.strerror or error}") from error
    except YamlError as error:
        raise ConfigError(f"--config {file} is not YAML: {error}") from error


def with_underscores(table: dict[Any, Any], file: Path) -> dict[str, Any]:
    """Return a table with `_` for `-` in its keys.

    Raises:
        ConfigError: two keys become the same.
    """
    try:
        return underscored(table)
    except YamlError as error:
        raise ConfigError(f"--config {file}: {error}") from error


def _read_options(file: Path) -> dict[str, Any]:
    content = read_config(file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {file} must hold options as 'name: value' lines, not {type(content).__name__}"
        )
    values = with_underscores(content, file)
    for key in values:
        if key not in TrainerConfig.model_fields:
            raise ConfigError(
                f"unknown key {key!r} in {file}{_nearest(key, list(TrainerConfig.model_fields))}"
            )
    return values


def _one_line(error: ValidationError, from_flags: set[str], file: Path | None) -> str:
    problems = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        if not item["loc"]:
            problems.append(message)
            continue
        name = str(item["loc"][0])
        if item["type"] == "missing":
            problems.append(f"{flag_of(name)} is required")
            continue
        source = flag_of(name)
        if file is not None and name not in from_flags:
            source = f"{name} in {file}"
        if name not in SECRETS and "--api-key" not in message:
            source += f" {item['input']!r}"
        problems.append(f"{source}: {message[0].lower()}{message[1:]}")
    return "; ".join(problems)
