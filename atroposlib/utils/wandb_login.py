"""Find out whether Weights & Biases has a login, without prompting for one."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_HOST = "https://api.wandb.ai"
DECIDED_BY = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")
"""Variables by which a user has decided how W&B runs, or has logged in."""


def is_logged_in(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether W&B has a login or a mode of its own, by its variables or by the netrc file
    that `wandb login` writes.

    Args:
        environ: environment variables; by default this process's.
    """
    environ = os.environ if environ is None else environ
    if any(environ.get(name) for name in DECIDED_BY):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or DEFAULT_HOST).hostname or ""
    home = Path(environ.get("HOME") or Path.home())
    files = [home / ".netrc", home / "_netrc"]
    if environ.get("NETRC"):
        files = [Path(environ["NETRC"])]
    return any(_has_entry(path, host) for path in files)


def offline_mode(
    folder: str | os.PathLike[str], environ: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str]:
    """Return arguments for `wandb.init`, and the line to log about them; both are empty with a
    login.

    Without a login `wandb.init` would ask for one on a terminal, and fail elsewhere.

    Args:
        folder: the `dir` of the W&B run, for the line.
        environ: environment variables; by default this process's.
    """
    if is_logged_in(environ):
        return {}, ""
    place = Path(folder) / "wandb"
    return {"mode": "offline"}, (
        f"W&B has no login (`wandb login` or WANDB_API_KEY): the run is kept offline in {place}; "
        f"after a login, upload it with `wandb sync {place}/offline-run-*`"
    )


def _has_entry(path: Path, host: str) -> bool:
    try:
        entry = netrc.netrc(path).authenticators(host)
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
    return entry is not None and bool(entry[2])
