"""The files of a run, and the folders of runs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from atroposlib.utils.jsonl import parse_object

METRICS = re.compile(r"metrics(\.\d+)?\.jsonl")
"""The trainer's rows; an earlier run's in the same folder have a number."""
OBSERVED = "observed"
"""Folder of the rollout service's record of a run; NAME.observed beside a store elsewhere."""
DEPTH = 3
"""Depth to which folders below a named one are searched."""
MAX_RUNS = 500
_MAX_ENTRIES = 20_000
_MAX_OBJECT = 1 << 22
MAX_GROUP_BYTES = 64 << 20
_NO_GROUPS = frozenset({"metrics.jsonl", "evaluations.jsonl", "events.jsonl", "servers.jsonl"})
M = TypeVar("M", bound=BaseModel)
_PASSED_OVER = frozenset(
    {
        "checkpoints",
        "tensorboard",
        "wandb",
        "logs",
        "node_modules",
        "__pycache__",
        "env_checkpoints",
    }
)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run.

    Attributes:
        id: names it in addresses: letters, digits and `._~-`.
        name: for people.
        folder: of the run.
        metrics: the trainer's rows; the file may not exist yet.
        evaluations: the environments' evaluations; the file may not exist yet.
        observed: folder of the rollout service's record; None if there is none.
        groups: files of rollouts that environments wrote.
        environment: rows of an environment's own, over every answer that was sampled; None if there
            are none.
    """

    id: str
    name: str
    folder: Path
    metrics: Path
    evaluations: Path
    observed: Path | None = None
    groups: tuple[Path, ...] = ()
    environment: Path | None = None

    def recorded(self, name: str) -> Path:
        """Return a file of the service's record. It does not exist if there is no record."""
        return (self.observed or self.metrics.with_suffix(".unrecorded")) / name


def find_runs(root: Path) -> list[RunFiles]:
    """Return the runs in a folder and below it, newest first, at most MAX_RUNS. A file of groups
    outside of them is a run of its own.

    A folder that cannot be read is skipped, and no link is followed.

    Args:
        root: the folder; or a file of groups.
    """
    if root.is_file():
        return [_of_groups(root, root.parent)] if holds_groups(root) else []
    observed: dict[Path, Path] = {}
    metrics: list[Path] = []
    groups: list[Path] = []
    for folder, names in _folders(root):
        for name in names:
            if METRICS.fullmatch(name):
                metrics.append(folder / name)
            elif name in ("run.json", "events.jsonl", "rollouts.db") and _is_observed(folder):
                observed[_run_of(folder)] = folder
            elif (
                name.endswith(".jsonl") and not _is_observed(folder) and holds_groups(folder / name)
            ):
                groups.append(folder / name)
    for folder in list(observed.values()):
        if log_dir := registered_log_dir(folder):
            observed[log_dir] = folder
    runs = [
        _of_metrics(path, root, _observed_beside(path.parent, root, observed))
        for path in metrics
        if path.parent.name != "environment"  # the rows of an environment have the same name
    ]
    shown = {run.observed for run in runs}
    runs += [
        _of_observed(folder, root)
        for folder in dict.fromkeys(observed.values())
        if folder not in shown
    ]
    shown_groups = {file for run in runs for file in run.groups}
    runs += [_of_groups(file, root) for file in groups if file not in shown_groups]
    return sorted(runs, key=changed, reverse=True)[:MAX_RUNS]


def holds_groups(path: Path) -> bool:
    """Return whether the first line of a file is a group: an object with scores, and tokens or
    messages.
    """
    try:
        return path.stat().st_size > 0 and _begins_with_group(path, path.stat().st_ino)
    except OSError:
        return False


@lru_cache(4096)
def _begins_with_group(path: Path, inode: int) -> bool:
    with path.open("rb") as file:
        group = parse_object(file.readline(MAX_GROUP_BYTES)) or {}
    return bool(group.get("scores") and (group.get("tokens") or group.get("messages")))


def groups_of(folder: Path) -> tuple[Path, ...]:
    """Return the files of groups of a run."""
    paths = [*sorted(folder.glob("*.jsonl")), *sorted((folder / "environment").glob("*.jsonl"))]
    return tuple(path for path in paths if path.name not in _NO_GROUPS and holds_groups(path))


def registered_log_dir(observed: Path) -> Path | None:
    """Return the folder of figures that a run's trainer registered; None if it is not on this
    machine, or was not registered.
    """
    log_dir = read_object(observed / "run.json").get("log_dir")
    if isinstance(log_dir, str) and log_dir.startswith("/") and Path(log_dir).is_dir():
        return Path(log_dir)
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; empty if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            return parse_object(file.read(_MAX_OBJECT)) or {}
    except OSError:
        return {}


def read_model(path: Path, model: type[M]) -> M | None:
    """Return the record in a small file of JSON; None if there is none, or it cannot be read."""
    try:
        return model.model_validate(read_object(path))
    except ValidationError:
        return None


def changed(run: RunFiles) -> float:
    """Return the Unix time of the last change of the run's files; 0 if it has none."""
    paths = [run.metrics, *run.groups, run.recorded("stack.json"), run.recorded("run.json")]
    return max(map(modified, paths))


def modified(path: Path) -> float:
    """Return the Unix time of the last change of a file; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Return the folders from `root` down, with the names of their files. No link is followed, and a
    folder that cannot be read is skipped.
    """
    entries = 0
    for path, folders, names in os.walk(root):
        folder = Path(path)
        entries += len(folders) + len(names)
        depth = len(folder.relative_to(root).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < DEPTH and name not in _PASSED_OVER and not name.startswith(".")
        )
        yield folder, [name for name in sorted(names) if not (folder / name).is_symlink()]
        if entries > _MAX_ENTRIES:
            return


def _run_of(observed: Path) -> Path:
    """Return the folder of the run that a service's record belongs to."""
    return observed.parent if observed.name == OBSERVED else observed


def _is_observed(folder: Path) -> bool:
    return folder.name == OBSERVED or folder.name.endswith(f".{OBSERVED}")


def environment_rows(folder: Path) -> Path | None:
    """Return the rows of a run's environment, if it writes some beside the trainer's."""
    path = folder / "environment" / "metrics.jsonl"
    return path if path.is_file() else None


def _observed_beside(folder: Path, root: Path, observed: dict[Path, Path]) -> Path | None:
    """Return the service's folder of the run whose metrics are in `folder`: in it, or above it."""
    for place in (folder, *folder.parents):
        if place in observed:
            return observed[place]
        if place == root:
            break
    return None


def _of_metrics(path: Path, root: Path, observed: Path | None) -> RunFiles:
    number = path.name.removeprefix("metrics").removesuffix(".jsonl")
    folder = path.parent
    if folder.name == "trainer":
        folder = folder.parent
    name = _name(folder, root)
    if number:
        name += f" (earlier run {number[1:]})"
    evaluations = path.with_name(f"evaluations{number}.jsonl")
    run = RunFiles(_id(path, name), name, folder, path, evaluations)
    if number:
        return run
    return replace(
        run,
        observed=observed,
        groups=groups_of(folder),
        environment=environment_rows(folder),
    )


def _of_observed(folder: Path, root: Path) -> RunFiles:
    """A run whose trainer wrote elsewhere, or nothing."""
    run = _run_of(folder)
    name = _name(run, root).removesuffix(f".{OBSERVED}")
    figures = registered_log_dir(folder) or run
    return RunFiles(
        _id(folder, name),
        name,
        run,
        figures / "metrics.jsonl",
        figures / "evaluations.jsonl",
        folder,
    )


def _of_groups(file: Path, root: Path) -> RunFiles:
    """A file of rollouts alone."""
    name = _name(file.with_suffix(""), root)
    return RunFiles(
        _id(file, name),
        name,
        file.parent,
        file / "metrics.jsonl",
        file / "evaluations.jsonl",
        groups=(file,),
    )


def _name(folder: Path, root: Path) -> str:
    if folder == root or not folder.is_relative_to(root):
        return folder.resolve().name
    return folder.relative_to(root).as_posix()


def _id(path: Path, name: str) -> str:
    """Return a readable name that differs for every path."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-40:] or "run"
    return f"{readable}~{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
