"""Metrics: statistics of a list under the names that the dashboards use, and a table for a
terminal. Weights & Biases is asked for its login without a prompt.
"""

import logging
import math
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from atroposlib.utils.files import disk_refusal

logger = logging.getLogger(__name__)


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: dict[str, Any]
) -> dict[str, Any]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` of a list that is not empty, and
    return the same dict.
    """
    values = np.asarray(data, dtype=float)
    for statistic in ("mean", "std", "max", "min"):
        metrics_dict[f"{name}_{statistic}"] = float(getattr(values, statistic)())
    return metrics_dict


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate, from `samples` answers with `correct` right ones, that one of
    `k` fresh answers is right.

    It is the share of the choices of k answers that hold a right one, 1 - C(n - c, k) / C(n, k)
    (Chen et al. 2021, equation 1).

    Raises:
        ValueError: k is not within 1 to the number of samples, or more are right than there are.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(
            f"pass@{k} of {samples} samples, {correct} of them right: k must be 1 to the number of samples"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def display_metrics_table(
    task_name: str, metrics: dict[str, Any], start_time: float, end_time: float
) -> None:
    """Print an evaluation's metrics. Times are Unix times in seconds.

    Standard output may be a log on a full disk: that costs the table, and not the evaluation.
    """
    table = Table(title=f"{task_name} ({end_time - start_time:.1f} s)", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    try:
        Console().print(table)
    except OSError as error:
        if disk_refusal(error) is None:
            raise
        logger.warning("the table of %s is not printed: %s", task_name, error.strerror)


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
