"""Functions that an option names: the project's own by a word, the user's as `module:function`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from example_trainer.errors import ConfigError

Thing = TypeVar("Thing")


def make_importable(folders: Iterable[Path]) -> None:
    """Let modules be imported from these folders, behind all that can be imported already: nothing
    of the project is hidden.
    """
    for folder in map(str, (folder.resolve() for folder in folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def is_import(name: str) -> bool:
    """Whether a name is a `module:function` of the user's."""
    return ":" in name


def built_in(flag: str, name: str, known: Mapping[str, Thing]) -> Thing:
    """What a word stands for.

    Raises:
        ConfigError: nothing; the nearest one is named.
    """
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}, or module:function"
    )
    raise ConfigError(f"unknown {flag} {name}; {meant}")


def import_function(flag: str, name: str, parameters: int, expected: str) -> Callable[..., Any]:
    """Import a `module:function`.

    Args:
        flag: which option names it, for errors.
        parameters: how many it is called with, all of them positional.
        expected: what it should be, for errors.

    Raises:
        ConfigError: there is no such module or function, the module cannot be imported, or the
            function cannot be called so.
    """
    module_name, _, function_name = name.partition(":")
    if not all(
        part.isidentifier() for part in [*module_name.split("."), *function_name.split(".")]
    ):
        raise ConfigError(
            f"{flag} {name} is no module:function, as in my_losses:mine; expected is {expected}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            raise ConfigError(
                f"{flag} {name}: there is no module {error.name} in the current directory, beside the --config file or among "
                "the installed ones; expected is a file that can be imported"
            ) from error
        raise refusal(flag, name, f"importing it failed: {told(error)}", expected) from error
    except Exception as error:
        raise refusal(flag, name, f"importing it failed: {told(error)}", expected) from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise refusal(flag, name, f"{module_name} has no {function_name}", expected)
        found = getattr(found, part)
    if not callable(found):
        raise refusal(flag, name, f"it is no function but {type(found).__name__}", expected)
    try:
        inspect.signature(found).bind(*[None] * parameters)
    except TypeError as error:
        count = "one argument" if parameters == 1 else f"{parameters} arguments"
        raise refusal(
            flag, name, f"it cannot be called with {count} ({error})", expected
        ) from error
    except ValueError:  # it has none that Python can see: trying it out will tell
        pass
    function: Callable[..., Any] = found
    return function


def refusal(flag: str, name: str, problem: str, expected: str) -> ConfigError:
    """The one line that says why a function cannot be used."""
    return ConfigError(f"{flag} {name}: {problem}; expected is {expected}")


def told(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
