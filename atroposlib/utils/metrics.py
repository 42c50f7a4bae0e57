"""Statistics of a list, under the names that the dashboards use."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, Any]) -> dict[str, Any]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` of a list that is not empty; returns the same dict."""
    values = np.asarray(data, dtype=float)
    for statistic in ("mean", "std", "max", "min"):
        metrics_dict[f"{name}_{statistic}"] = float(getattr(values, statistic)())
    return metrics_dict
