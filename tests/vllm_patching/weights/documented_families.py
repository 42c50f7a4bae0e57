"""The tables of architectures in docs/models.md, from the table of families and from the tests.

python -m tests.vllm_patching.weights.documented_families     prints the tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.gpu.shapes import SHAPES
from tests.e2e.test_families_in_vllm import CASES
from tests.example_trainer.models.transformers_cases import CONFIGS
from tests.geometries import geometry_of
from tests.tiny_models import SERVED, UPDATED
from vllm_patching.weights.families import FAMILIES, PROJECTIONS, Family, adapted_projections

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
START, END = "<!-- architectures -->", "<!-- end of architectures -->"
TRIED, END_OF_TRIED = "<!-- tried -->", "<!-- end of tried -->"
_OTHER_NAMES = {
    "CTRL": "CTRLLMHeadModel",
    "Gemma4Text": "Gemma4ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Qwen2_5_VL": "Qwen2_5_VLForConditionalGeneration",
}
"""Classes that are not named after the configuration's class."""
HEAD = (
    "architecture",
    "tier",
    "`--deterministic`",
    "`--single-copy` on several GPUs",
    "adapters on",
    "ran with vLLM on",
)
RESULTS = PAGE.parents[1] / "bench" / "results"


@cache
def architectures_on_gpus() -> frozenset[str]:
    """Return the architectures that a results file of a machine with GPUs and vLLM names."""
    architectures = set()
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        machine = data.get("machine") or {}
        if machine.get("gpus") and machine.get("vllm", "not installed") != "not installed":
            architectures |= {
                name for shape in shapes_in(data) for name in SHAPES[shape]["architectures"]
            }
    return frozenset(architectures)


def shapes_in(data: Any) -> Iterator[str]:
    """Yield the names of shapes in the contents of a results file."""
    if isinstance(data, list):
        data = dict(enumerate(data))
    if isinstance(data, dict):
        if data.get("shape") in SHAPES:
            yield data["shape"]
        for value in data.values():
            yield from shapes_in(value)


def row(family: Family) -> list[str]:
    """Return the cells of one family."""
    geometry = geometry_of(family.architecture.removesuffix("ForCausalLM"), 1, 8, 6, 4, 2, 2, 10)
    names = adapted_projections(geometry, PROJECTIONS)
    adapters = "all seven projections"
    if names != PROJECTIONS:
        adapters = ", ".join(f"`{name}`" for name in names)
    return [
        f"`{family.architecture}`",
        "1",
        "no" if family.no_determinism else "yes",
        "no" if family.joint_qk_norm else "yes",
        adapters,
        _machines(family.architecture),
    ]


def _machines(architecture: str) -> str:
    """Return where a model of the architecture was trained or compared beside vLLM."""
    machines = ["GPUs"] if architecture in architectures_on_gpus() else []
    if architecture.removesuffix("ForCausalLM") in CASES:
        machines.append("CPUs")
    return ", ".join(machines) or "none"


def families_table() -> str:
    """One row for each family, and one for all other architectures."""
    rows = [list(HEAD), ["---"] * len(HEAD), *map(row, FAMILIES.values())]
    rows.append(["any other that transformers has", "2", "no", "no", "none", "CPUs"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def tried_table() -> str:
    """One row for each architecture of tier 2 that tests try."""
    rows = [["architecture", "trained and resumed", "updated in vLLM"], ["---"] * 3]
    for name in sorted({*CONFIGS, *SERVED, *UPDATED}, key=str.lower):
        architecture = _OTHER_NAMES.get(name, f"{name}ForCausalLM")
        update = "by its layout" if name in SERVED else "no"
        update = "a running server" if name in UPDATED else update
        trained = "yes" if name in CONFIGS or name in SERVED else "no"
        if architecture not in FAMILIES:
            rows.append([f"`{architecture}`", trained, update])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def written_table(start: str = START, end: str = END) -> str:
    """Return a table that the page has."""
    return PAGE.read_text(encoding="utf-8").partition(start)[2].partition(end)[0].strip()


if __name__ == "__main__":
    print(families_table(), tried_table(), sep="\n\n")
