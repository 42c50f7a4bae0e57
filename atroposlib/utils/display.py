"""Tables for a person at a terminal."""

import logging
from typing import Any

from rich.console import Console
from rich.table import Table

from atroposlib.utils.whole_files import disk_refusal

logger = logging.getLogger(__name__)


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
