"""Figures of a trainer that restarts vLLM on checkpoints: from its log, its rows and its checkpoint
folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.summary import table

GIGABYTE = 1e9
_SERVES = re.compile(r"\[Bridge\] vLLM serves weight version (\d+) after ([\d.]+) s")
_PLACE = re.compile(r"\[Bridge\] vLLM will run on .*")
_TIME = re.compile(r"^(?:\w+ )?(\d\d):(\d\d):(\d\d) (.*)$")


def legacy_figures(
    log: str, rows: Iterable[Mapping[str, Any]], checkpoints: Path
) -> dict[str, Any]:
    """Measure the restarts of a run.

    Args:
        log: the trainer's.
        rows: of metrics.jsonl.
        checkpoints: its --save-path.

    Returns:
        `server`: the logged choice of vLLM's GPUs and share; `starts`: seconds of each start by
        version, the first included; `seconds_of_restarts`: of each restart by phase;
        `seconds_from_weights_to_state`: by checkpoint, how long after its weights the optimizer's
        state was whole; `checkpoints`: gigabytes by checkpoint.
    """
    place = _PLACE.search(log)
    restarts = [
        {"step": row["step"], "stop": row["sync/stop"], "start": row["sync/start"]}
        for row in rows
        if row.get("sync/start") is not None
    ]
    return {
        "server": place[0] if place else None,
        "starts": [
            {"version": int(version), "seconds": float(seconds)}
            for version, seconds in _SERVES.findall(log)
        ],
        "seconds_of_restarts": [
            {name: round(value, 2) for name, value in restart.items()} for restart in restarts
        ],
        "seconds_from_weights_to_state": _states_after_weights(log),
        "checkpoints": {
            path.name: _sizes(path) for path in sorted(checkpoints.glob("step_*"), key=_step)
        },
    }


def legacy_table(found: Mapping[str, Any]) -> str:
    """Tables of `legacy_figures`."""
    starts = [["start at version", *(start["version"] for start in found["starts"])]]
    starts += [["seconds", *(start["seconds"] for start in found["starts"])]]
    heads = ["checkpoint", "weights GB", "state GB", "state after weights s"]
    late = found["seconds_from_weights_to_state"]
    sizes = [
        [name, size["weights_gb"], size["state_gb"], late.get(name, "")]
        for name, size in found["checkpoints"].items()
    ]
    return "\n".join(
        [str(found["server"]), table([""] * len(starts[0]), starts), table(heads, sizes)]
    )


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _sizes(path: Path) -> dict[str, float]:
    state = sum(file.stat().st_size for file in path.glob("trainer_state/*"))
    weights = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
    return {"weights_gb": round(weights / GIGABYTE, 3), "state_gb": round(state / GIGABYTE, 3)}


def _states_after_weights(log: str) -> dict[str, int]:
    """Seconds between the two log lines of a checkpoint, by its name; the log's clock has whole
    seconds.
    """
    written: dict[str, int] = {}
    found: dict[str, int] = {}
    for line in log.splitlines():
        match = _TIME.match(line)
        if match is None:
            continue
        hours, minutes, seconds, text = match.groups()
        now = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        if weights := re.match(r"Saved the weights of (\S+) for vLLM", text):
            written[Path(weights[1]).name] = now
        elif (whole := re.match(r"Saved checkpoint (\S+)", text)) and Path(
            whole[1]
        ).name in written:
            found[Path(whole[1]).name] = (now - written[Path(whole[1]).name]) % 86400
    return found
