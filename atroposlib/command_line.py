"""Command lines generated from settings models: each field is a flag with its type and help."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from atroposlib.one_line_parser import OneLineParser
from atroposlib.web.keys import shown

Options = TypeVar("Options", bound=BaseModel)

METAVARS = {int: "N", float: "X", Path: "PATH"}
UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
NOT_SHOWN = ("none", "False", "[]", "PydanticUndefined")
"""Defaults that the help leaves out: they mean only that the flag may be left out."""


def read_bytes(value: object) -> object:
    """Read a number of bytes such as 4096 or 4G. Values other than text are returned unchanged."""
    if not isinstance(value, str):
        return value
    digits = value.upper().rstrip("".join(UNITS))
    unit = value.upper()[len(digits) :]
    if not digits.isdecimal() or len(unit) > 1:
        raise ValueError("give a number of bytes, such as 4096 or 4G")
    return int(digits) << UNITS.get(unit, 0)


def read_network(text: str) -> str:
    """Return an IP address or network in its usual form.

    Raises:
        ValueError: the text is something else.
    """
    read = ipaddress.ip_network if "/" in text else ipaddress.ip_address
    return str(read(text))


Port = Annotated[int, Field(ge=0, le=65535)]
AtLeastOne = Annotated[int, Field(ge=1)]
ByteCount = Annotated[int, BeforeValidator(read_bytes)]
Seconds = Annotated[float, Field(gt=0, lt=1e9)]
Network = Annotated[str, BeforeValidator(read_network)]


def add_flags(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    flags: Callable[[str], Sequence[str]],
    defaults: BaseModel | None = None,
    lists_repeat: bool = False,
    **switch: Any,
) -> None:
    """Add the fields of a model to a parser. A flag that is not given leaves no trace in the result.

    Args:
        parser: the parser, which leaves values as text.
        model: the settings.
        flags: the flags of a field, by the field's name; a name without dashes is a positional
            argument.
        defaults: settings whose values the help shows; by default the class's own.
        lists_repeat: a list has an entry for each time that its flag is given.
        switch: how argparse reads a boolean field.
    """
    for name, field in model.model_fields.items():
        help_text, names = field.description or "", flags(name)
        default = getattr(defaults, name, field.get_default(call_default_factory=True))
        default_text = shown(name, default, model.model_fields)
        if default_text not in NOT_SHOWN and "(default: " not in help_text:
            help_text = f"{help_text} (default: {default_text})".lstrip()
        is_list = get_origin(field.annotation) is list
        reading: dict[str, Any] = {"metavar": metavar(field.annotation)}
        if field.annotation is bool:
            reading = switch
        elif not names[0].startswith("-"):
            reading = {} if field.is_required() else {"nargs": "*" if is_list else "?"}
        elif is_list and lists_repeat:
            reading["action"] = "append"
        parser.add_argument(
            *names, default=argparse.SUPPRESS, help=help_text.replace("%", "%%"), **reading
        )


def metavar(annotation: Any) -> str:
    """Return the word that stands for a field's value in the help."""
    kinds = (annotation, *get_args(annotation))
    return next((METAVARS[kind] for kind in kinds if kind in METAVARS), "TEXT")


def parse_options(
    model: type[Options],
    arguments: Sequence[str] | None,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
) -> Options:
    """Read the command line of a program.

    Args:
        model: the program's options.
        arguments: without the program; None for this process's arguments.
        prog: the program's name.
        description: for the help.
        positional: fields that are given without a flag.

    Raises:
        SystemExit: help was asked for, or a flag or a value is wrong; stderr names it in one line.
    """

    def flags(name: str) -> list[str]:
        return [name] if name in positional else [f"--{name.replace('_', '-')}"]

    parser = OneLineParser(prog=prog, description=description)
    add_flags(parser, model, flags, lists_repeat=True, action="store_const", const=True)
    values = vars(parser.parse_args(arguments))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # the check of several fields together
            parser.error(message)
        name, value = flags(str(problem["loc"][0]))[0], repr(problem["input"])
        if not message.startswith(value):
            message = f"{value}: {message[0].lower()}{message[1:]}"
        parser.error(f"argument {name}: {message}")
