"""A fleet on GPUs when one of three servers, or the trainer, fails in each phase of an update.

    python tests/gpu/check_fleet_faults.py [--json FILE] [--logs FOLDER] [--only PART …]

Runs test_fleet_faults.py on one GPU (by CUDA IPC), and on two (by NCCL, two servers on one GPU). On
four GPUs each server has its own (NCCL). It also runs test_fleet_senders.py, side by side. For each
fault it notes how long the update took that met it. It also notes how long after it answered again
the faulty server served the present weights. Takes about six minutes; needs one GPU, two or four,
pytest and hypothesis, no vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.checks import JSON
from bench.gpu.machine import describe
from bench.gpu.summary import spread_ms, table
from bench.measured import ROOT, Options, command_line, measured

SECONDS = 540.0
PARTS = {
    "one GPU": ("tests/gpu/test_fleet_faults.py", "-k", "one_gpu"),
    "two GPUs": ("tests/gpu/test_fleet_faults.py", "-k", "two_gpus"),
    "four GPUs, direct": ("tests/gpu/test_fleet_faults.py", "-k", "four_gpus and direct"),
    "four GPUs, overlapped": ("tests/gpu/test_fleet_faults.py", "-k", "four_gpus and overlapped"),
    "senders": ("tests/gpu/test_fleet_senders.py",),
}
"""Parts that run at the same time, and pytest's arguments for them."""


def rows_of(part: str, report: Path) -> list[dict[str, Any]]:
    """One for each test that ran, from pytest's report in JUnit's form."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        wrong = next((kind for kind in ("failure", "error") if case.find(kind) is not None), "")
        name, _, chosen = str(case.get("name")).partition("[")
        noted = {
            str(one.get("name")): float(str(one.get("value"))) for one in case.iter("property")
        }
        row = {
            "part": part,
            "test": name.removeprefix("test_"),
            "case": chosen.rstrip("]"),
            "good": not wrong,
        }
        found.append({**row, "seconds": float(str(case.get("time"))), **noted})
    return found


def run_all(parts: Sequence[str], logs: Path) -> tuple[list[dict[str, Any]], bool]:
    """Every test's row, and whether all parts ended as they should."""
    logs.mkdir(parents=True, exist_ok=True)
    started = {}
    for part, arguments in ((part, PARTS[part]) for part in parts):
        stem = logs / part.replace(", ", "_").replace(" ", "_")
        command = [
            sys.executable,
            "-m",
            "pytest",
            *arguments,
            f"--junit-xml={stem}.xml",
            "-o",
            "junit_family=xunit1",
        ]
        with open(f"{stem}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*command, f"--basetemp={stem}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        started[part] = (process, Path(f"{stem}.xml"))
    rows, good = [], True
    for part, (process, report) in started.items():
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait(30)
        if status:
            good = False
            print(
                f"{part}: pytest ended with status {status}:\n{report.with_suffix('.log').read_text()[-6000:]}"
            )
        if report.exists():
            rows += rows_of(part, report)
    return rows, good and bool(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of tests, and for each failing server of three the seconds of the updates
    and until it was right again.
    """
    times = {
        name: spread_ms([row[name] for row in rows if name in row])
        for name in ("update_s", "back_s")
    }
    return {
        "tests": len(rows),
        "good": sum(row["good"] for row in rows),
        "update": times["update_s"],
        "back": times["back_s"],
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """The faults as a table."""
    lines = []
    for row in rows:
        words = row["test"] if "update_s" not in row else "one of three fails"
        took = [f"{row[name]:.2f}" if name in row else "" for name in ("update_s", "back_s")]
        lines.append(
            ["✓" if row["good"] else "✗", row["part"], words.replace("_", " "), row["case"], *took]
        )
    return table(["", "part", "fault", "case", "update s", "right again s"], lines)


def main() -> int:
    """Returns the process's status."""
    only: Options = {
        "--logs": {"type": Path, "help": "keep the logs there"},
        "--only": {"nargs": "+", "choices": PARTS, "default": list(PARTS), "metavar": "PART"},
    }
    options = command_line(__doc__, JSON | only).parse_args()
    if not torch.cuda.is_available():
        print("this check needs an NVIDIA GPU")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows, good = run_all(options.only, options.logs or Path(folder))
    print(shown(rows))
    print(json.dumps(summary(rows)))
    if options.json:
        found = {
            **describe(),
            "measured": measured(),
            "summary": summary(rows),
            "rows": [{"measured": measured(), **row} for row in rows],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
