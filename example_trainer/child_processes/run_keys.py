"""The API keys of one run, in a file that only its owner can read."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from example_trainer.child_processes.files import cannot_write, write_whole
from example_trainer.child_processes.processes import ProcessError

KEYS_FILE = "keys.env"
SERVICE, VLLM = "ROLLOUT_API_KEY", "VLLM_API_KEY"


def read_keys(run: Path) -> dict[str, str]:
    """Variable -> key, as the run's file has them; empty if there is none.

    Raises:
        ProcessError: the file cannot be read, or holds something else.
    """
    path = run / KEYS_FILE
    try:
        words = shlex.split(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProcessError(
            f"{path} cannot be read ({error}), which holds the run's keys: stop what runs with them and remove it"
        ) from None
    return {
        name: key for word in words if word != "export" for name, _, key in [word.partition("=")]
    }


def make_keys(run: Path, environment: Mapping[str, str], running: bool) -> dict[str, str]:
    """Return the keys for the parts of this run: the shell's, else the ones that the run
    has, else new ones.

    Args:
        run: its folder; gets the file, mode 0600.
        environment: of the shell.
        running: parts of the run live, with the keys that are in the file.

    Raises:
        ProcessError: the shell names another key than the living parts have, their key is nowhere, or
            the file cannot be written.
    """
    old = read_keys(run)
    keys = {}
    for name in (SERVICE, VLLM):
        if running and not (environment.get(name) or old.get(name)):
            raise ProcessError(
                f"{run / KEYS_FILE} has no {name}, with which parts of the run live: put the file back, set {name} in this "
                "shell, or stop them first"
            )
        keys[name] = environment.get(name) or old.get(name) or secrets.token_urlsafe(32)
        if running and old and keys[name] != old.get(name):
            raise ProcessError(
                f"{name} in this shell is another key than the parts that run in {run} have: `unset {name}`, or stop them first"
            )
    path = run / KEYS_FILE
    content = "".join(f"export {name}={shlex.quote(key)}\n" for name, key in keys.items()).encode()
    try:
        write_whole(path, content, mode=0o600)
    except OSError as error:
        reason = cannot_write(path, error, len(content))
        raise ProcessError(f"{reason}, which holds the run's keys; make room there") from error
    return keys
