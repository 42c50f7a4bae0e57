"""Checks of one program on a GPU: run them all, print each outcome, keep them in a results file."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.measured import Options, command_line, measured

Check = Callable[[], tuple[bool, Any]]
"""Returns whether it passed, and what was seen."""
JSON: Options = {"--json": {"type": Path, "help": "write the results there"}}
NEEDS_GPU = "this check needs an NVIDIA GPU"


def outcome_of(check: Check) -> dict[str, Any]:
    """Make one check; an exception is a failure of this check alone."""
    try:
        passed, seen = check()
    except Exception as error:  # noqa: BLE001 - a broken check must not hide the others' outcomes
        where = traceback.format_exc().splitlines()[-4:-1]
        passed, seen = False, f"{type(error).__name__}: {error} @ {where}"[:900]
    return {"passed": passed, "seen": seen}


def run_checks(
    doc: str | None,
    checks: Mapping[str, Check],
    arguments: list[str] | None = None,
    more: Callable[[], dict[str, Any]] = dict,
    needs_gpu: bool = True,
) -> int:
    """Run the checks and return the exit status. The results file is written after each check; its
    `asked` is the number of all.

    Args:
        doc: the program's docstring.
        checks: name -> check.
        more: makes further entries of the results file, after the checks.
        needs_gpu: without a GPU no check is made.
    """
    options = command_line(doc, JSON).parse_args(arguments)
    if needs_gpu and not torch.cuda.is_available():
        print(NEEDS_GPU)
        return 2
    facts: dict[str, Any] = {"gpu": "none", "torch": torch.__version__, "asked": len(checks)}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    outcomes: dict[str, Any] = {}
    for name, check in checks.items():
        began = time.perf_counter()
        outcome = outcomes[name] = outcome_of(check)
        mark = "FAILED"
        if outcome["passed"]:
            mark = "ok    "
        seconds = time.perf_counter() - began
        print(f"{mark} {name}: {outcome['seen']}  ({seconds:.1f} s)", flush=True)
        write_results(options, {**facts, "checks": outcomes})  # a time limit may end the next one
    write_results(options, {**facts, "checks": outcomes, **more()})
    passed = sum(outcome["passed"] for outcome in outcomes.values())
    print(f"{passed} of {len(outcomes)} checks passed")
    return int(passed < len(outcomes))


def write_results(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the file that --json names, with commit and date."""
    if options.json:
        text = json.dumps({"measured": measured(), **results}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
