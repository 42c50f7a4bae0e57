"""The API keys of one run: in a file that only its owner can read, handed to the parts as variables, never as flags."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from scripts.ops.parts import kind_of
from scripts.quickstart.errors import QuickstartError

KEYS_FILE = "keys.env"
SERVICE, VLLM = "ROLLOUT_API_KEY", "VLLM_API_KEY"
NEEDED_BY = {"service": (SERVICE,), "vllm": (VLLM,), "environment": (SERVICE, VLLM), "trainer": (SERVICE, VLLM)}
"""Kind of part -> the variables that it gets."""


def read_keys(run: Path) -> dict[str, str]:
    """Variable -> key, as the run's file has them; empty if there is none.

    Raises:
        QuickstartError: the file cannot be read, or holds something else.
    """
    path = run / KEYS_FILE
    try:
        words = shlex.split(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise QuickstartError(
            f"{path} cannot be read ({error}), which holds the run's keys: stop what runs with them and remove it"
        ) from None
    return {name: key for word in words if word != "export" for name, _, key in [word.partition("=")]}


def make_keys(run: Path, environment: Mapping[str, str], running: bool) -> dict[str, str]:
    """The keys that the parts of this run shall have: those of the shell, else those that the run has, else new ones.

    Args:
        run: its folder; gets the file, mode 0600.
        environment: of the shell.
        running: parts of the run live, with the keys that are in the file.

    Raises:
        QuickstartError: the shell names another key than the living parts have, or the file cannot be written.
    """
    old = read_keys(run)
    keys = {}
    for name in (SERVICE, VLLM):
        keys[name] = environment.get(name) or old.get(name) or secrets.token_urlsafe(32)
        if running and old and keys[name] != old.get(name):
            raise QuickstartError(
                f"{name} in this shell is another key than the parts that run in {run} have: `unset {name}`, or stop them first"
            )
    path = run / KEYS_FILE
    draft = path.with_suffix(".draft")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"export {name}={shlex.quote(key)}\n" for name, key in keys.items())
        draft.replace(path)
    except OSError as error:
        raise QuickstartError(f"cannot write the run's keys to {path}: {error.strerror}") from error
    return keys


def variables_of(part: str, environment: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """The environment with the keys that a part needs, and without those that it does not."""
    others = {name: value for name, value in environment.items() if name not in (SERVICE, VLLM)}
    return others | {name: keys[name] for name in NEEDED_BY[kind_of(part)]}


def refuse_keys(part: str, words: tuple[str, ...]) -> None:
    """Refuse a key among the further flags of a part.

    Raises:
        QuickstartError: there is one; it would stand in `ps` and in the run's folder, for everybody to read.
    """
    found = [flag for word in words if "api-key" in (flag := word.split("=")[0]).replace("_", "-")]
    if found:
        raise QuickstartError(
            f"--{part}-args holds {found[0]}, which everybody could read in `ps`: leave it out; start.sh takes keys from "
            f"{SERVICE} and {VLLM}, or makes them"
        )
