"""Options of command lines, as tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Add each option of a table to a command line.

    Args:
        options: option -> keyword arguments of `add_argument`.
    """
    for name, keywords in options.items():
        parser.add_argument(name, **keywords)
