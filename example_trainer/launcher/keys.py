"""The API keys of one run, handed to the parts as variables, never as flags."""

from __future__ import annotations

from collections.abc import Mapping

from example_trainer.child_processes.run_keys import KEYS_FILE, SERVICE, VLLM, make_keys, read_keys
from example_trainer.launcher.errors import LauncherError
from example_trainer.launcher.parts import kind_of

__all__ = [
    "KEYS_FILE",
    "NEEDED_BY",
    "SERVICE",
    "VLLM",
    "make_keys",
    "read_keys",
    "refuse_keys",
    "variables_of",
]
BOTH = (SERVICE, VLLM)
NEEDED_BY = {"service": BOTH, "vllm": (VLLM,), "environment": BOTH, "trainer": BOTH}
"""Kind of part -> the variables that it gets. The service asks the servers how they are, for its
page."""


def variables_of(
    part: str, environment: Mapping[str, str], keys: Mapping[str, str]
) -> dict[str, str]:
    """The environment with the keys that a part needs, and without those that it does not."""
    others = {name: value for name, value in environment.items() if name not in (SERVICE, VLLM)}
    return others | {name: keys[name] for name in NEEDED_BY[kind_of(part)]}


def refuse_keys(part: str, words: tuple[str, ...]) -> None:
    """Refuse a key among the further flags of a part.

    Raises:
        LauncherError: there is one; it would stand in `ps` and in the run's folder, for everybody
            to read.
    """
    found = [flag for word in words if "api-key" in (flag := word.split("=")[0]).replace("_", "-")]
    if found:
        raise LauncherError(
            f"--{part}-args holds {found[0]}, which everybody could read in `ps`: leave it out; start.sh takes keys from "
            f"{SERVICE} and {VLLM}, or makes them"
        )
