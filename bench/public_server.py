"""The public Atropos server in a virtual environment of its own, to hold ours against.

    python bench/public_server.py    # make the environment and print its interpreter

Its package has the same name as ours: run it from a folder that is not this checkout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PUBLIC = "atroposlib==0.4.0"
PUBLIC_NEEDS = ["fastapi", "uvicorn", "pydantic", "numpy"]
FOLDER = Path(__file__).resolve().parents[1] / "runs" / "bench" / PUBLIC.replace("==", "-")


def is_ready() -> bool:
    """Report if the virtual environment has been made, completely."""
    return (FOLDER / "ready").exists()


def public_python() -> Path:
    """The interpreter of a virtual environment that holds the public server; made at the first
    call.

    Raises:
        subprocess.SubprocessError: pip failed, or took longer than ten minutes.
    """
    python = FOLDER / "bin" / "python"
    if not is_ready():
        print(f"installing {PUBLIC} in {FOLDER} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True, timeout=120)
        install: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        # The server needs a few packages only; the environments' (datasets, nltk, …) would take
        # minutes.
        subprocess.run([*install, "--no-deps", PUBLIC], check=True, timeout=600)
        subprocess.run(
            [*install, *PUBLIC_NEEDS], check=True, timeout=600, stderr=subprocess.DEVNULL
        )
        (FOLDER / "ready").touch()
    return python


if __name__ == "__main__":
    print(public_python())
