"""A deterministic trainer of several ranks on several GPUs, without a server.

    python tests/gpu/check_deterministic_layouts.py [--ranks N] [--device cpu] [--json FILE]

A model of four layers of Qwen3-0.6B's sizes learns for three steps from sequences that one rank of
the same model gives logprobs to. With experts on several ranks, it is two layers of a mixture. Each
layout (FSDP2, tensor parallel, and experts) must compute the bits of one rank, and must end in
equal weights twice. It must stop all ranks with one error for one wrong bit. Takes about five
minutes. Needs PyTorch, vLLM's kernels and a GPU for each rank; not pytest. With --device cpu it
takes a smaller model and Gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.gpu.checks import JSON, write_results
from bench.measured import Options, command_line
from tests.example_trainer.deterministic.layouts import ROOT, ranks_command, write_model, written

STEPS, SECONDS = 3, 240
OPTIONS: Options = {
    "--ranks": {"type": int, "default": 2},
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
}


@dataclass
class Row:
    """The outcome of one layout.

    Attributes:
        layout: FSDP2, tensor parallel, or a layer's experts shared by two ranks; with the parts of
            the server's sums.
        ranks: of the trainer.
        repeated: hash of the weights after each step, if two runs and all ranks agree.
        error: of a wrong bit, if all ranks raise the same.
        log: the last lines of a run that failed; empty otherwise.
    """

    layout: str
    ranks: int
    repeated: list[str]
    error: str
    log: str = ""

    @property
    def good(self) -> bool:
        """Return whether the layout does what it must."""
        return len(set(self.repeated)) == STEPS and self.error.startswith("1 of ")


class Failed(Exception):
    """The ranks ended with an error. Its text is the end of their log."""


def run(folder: Path, ranks: int, device: str, *arguments: object) -> list[dict[str, Any]]:
    """Run the ranks. Raises Failed."""
    command = ranks_command(arguments[0], folder, *arguments[1:])
    here = os.environ | {"PYTHONPATH": str(ROOT), "FORKED_RANKS": str(ranks)}
    here["LAYOUT_DEVICE"] = device
    done = subprocess.run(
        command, env=here, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise Failed("\n".join((done.stdout + done.stderr).splitlines()[-30:]))
    return written(folder, ranks)


def model_of(layout: str, device: str) -> str:
    """Return the model that a layout is checked with."""
    on_gpu = device == "cuda"
    if layout.startswith("experts"):
        return {True: "two layers of a mixture", False: "mixture"}[on_gpu]
    return {True: "four layers of 0.6B", False: "untied"}[on_gpu]


def check(layout: str, ranks: int, device: str, folder: Path) -> Row:
    """Train twice, and once with a wrong bit."""
    write_model(folder, model_of(layout, device))
    row = Row(layout, ranks, [], "")
    try:
        results = [run(folder, ranks, device, layout, STEPS) for _ in range(2)]
        hashes = [list(result.values()) for both in results for result in both]
        if all(one == hashes[0] for one in hashes):
            row.repeated = hashes[0]
        errors = {result["error"] for result in run(folder, ranks, device, layout, 2, "bit")}
        if len(errors) == 1:
            row.error = errors.pop()
    except Failed as error:
        row.log = str(error)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a layout does not do what it must."""
    options = command_line(__doc__, JSON | OPTIONS).parse_args(arguments)
    ranks, device = options.ranks, options.device
    if device == "cuda" and torch.cuda.device_count() < ranks:
        print(f"needs {ranks} GPUs, and sees {torch.cuda.device_count()}: give --ranks")
        return 2
    rows = []
    layouts = ["fsdp1", f"fsdp{ranks}", f"tensor_parallel{ranks}"]
    if ranks % 2 == 0:
        layouts += ["experts1", f"experts{ranks}"]
    for layout in dict.fromkeys(layouts):
        with tempfile.TemporaryDirectory() as folder:
            row = check(layout, ranks, device, Path(folder))
        rows.append(row)
        verdict = {True: "ok    ", False: "FAILED"}[row.good]
        print(
            f"{verdict} {layout} on {ranks} ranks: {row.repeated} {row.error}{row.log}", flush=True
        )
    write_results(options, {"torch": torch.__version__, "rows": [asdict(row) for row in rows]})
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
