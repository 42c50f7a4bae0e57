"""One row of figures per optimizer step: to metrics.jsonl, to TensorBoard, to Weights & Biases and
Prometheus when asked.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.utils.files import KeptLines, cannot_write, remedy, write_whole
from atroposlib.utils.metrics import offline_mode
from example_trainer.api_keys import without_secrets
from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.reader import safe_name
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.observe.exporter import MetricsServer

# Where the results of evaluations go: evaluations.jsonl, a line in the log, scalars for
# dashboards.

logger = logging.getLogger(__name__)

_OWN = "eval/"
"""Beginning of the names of metrics in many environments, and of all names on dashboards here."""


class EvaluationFile:
    """A line of JSON for each evaluation, in the file when `write` returns, unless the disk is
    full: then it waits in memory.

    Args:
        path: the file. A new run moves that of an earlier one aside, as it does with metrics.jsonl.
        continued: whether the run is resumed. The file's lines then stay, later steps than the one
            resumed from too. They measured the weights of that time, even if these steps are
            trained again. Lines that cannot be read stay, with a warning; half a line at the end,
            as of a trainer that was killed, is cut off.
    """

    def __init__(self, path: Path, continued: bool) -> None:
        self.seen: list[tuple[int, float]] = []
        """Keys of the evaluations that are in the file already, in their order."""
        if path.exists() and not continued:
            move_aside(path)
        elif path.exists():
            self._continue(path)
        self._file = KeptLines(path)

    def _continue(self, path: Path) -> None:
        *lines, half = path.read_bytes().split(b"\n")
        unreadable = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self.seen.append((int(row["id"]), float(row["time"])))
            except (ValueError, KeyError, TypeError, OverflowError):
                unreadable.append(number)
        if unreadable:
            logger.warning(
                "%d lines of %s are not evaluations, the first is line %d; they stay, and are "
                "passed over",
                len(unreadable), path, unreadable[0],
            )  # fmt: skip
        if half:
            os.truncate(
                path, path.stat().st_size - len(half)
            )  # in place, so that whole lines are always there

    def write(self, step: int, evaluation: Evaluation) -> None:
        """Add one. `step` is that of the trainer when it learned of it."""
        self._file.write(json.dumps(vars(evaluation) | {"step": step}).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def evaluation_line(evaluation: Evaluation) -> str:
    """One line for people: `Evaluation gsm8k_0 at version 12: eval/percent_correct 0.412 …`."""
    version = _known(evaluation.weight_version, "d")
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in sorted(evaluation.metrics.items()))
    return " ".join(
        f"Evaluation {evaluation.name} at version {version}: {numbers or 'no numbers'}".splitlines()
    )


def scalars(evaluation: Evaluation) -> tuple[str, dict[str, float]]:
    """Return the name of the axis of weight versions, and the numbers by names for dashboards:
    `eval/<name>/<metric>`.
    """
    prefix = f"{_OWN}{safe_name(evaluation.name)}/"
    return f"{prefix}weight_version", {
        prefix + name.removeprefix(_OWN): value for name, value in evaluation.metrics.items()
    }


def move_aside(path: Path) -> Path:
    """Rename an earlier run's `name.jsonl` to the first free `name.<number>.jsonl`."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


# The trainer's log line of one optimizer step, written and read. Pure: no I/O, no state.

Row = dict[str, Any]
"""Numbers, text, or None where a figure is not known."""

_NUMBER = r"(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf|nan)"
_LINE = re.compile(
    rf"(?<!\S)Step (?P<step>\d+)/(?P<steps>\d+)  reward (?P<reward>{_NUMBER})(?:  success (?P<success>{_NUMBER}))?  loss .*?"
    rf"  (?P<rate>{_NUMBER}) tok/s  queue \d+  age (?P<age>\?|{_NUMBER} \(max \d+\))"
)


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step that are worth a short line.

    Attributes:
        step, steps: optimizer steps done and to be done.
        reward: mean score of the step's sequences.
        success: share of solved items, from 0 to 1; None if unknown.
        rate: trained tokens per second.
        age: weight versions since the sequences were sampled, as text: mean and maximum, or `?` if
            unknown.
    """

    step: int
    steps: int
    reward: float
    success: float | None
    rate: float
    age: str

    def __str__(self) -> str:
        success = "" if self.success is None else f"  success {100 * self.success:.1f} %"
        return f"step {self.step}/{self.steps}  reward {self.reward:.3f}{success}  {self.rate:.0f} tok/s  staleness {self.age}"


def read_step_line(line: str) -> StepFigures | None:
    """Read a line of the trainer's log; None if it is not the line of a step."""
    match = _LINE.search(line)
    if match is None:
        return None
    success = match["success"]
    return StepFigures(
        int(match["step"]),
        int(match["steps"]),
        float(match["reward"]),
        None if success is None else float(success),
        float(match["rate"]),
        match["age"],
    )


def step_line(step: int, steps: int, row: Row) -> str:
    """Write the figures of a step as one line for people: `Step 1/100  reward 0.500 …`."""
    age = "age ?"
    if row["age_mean"] is not None:
        age = f"age {row['age_mean']:.1f} (max {row['age_max']})"
    if row.get("uses_mean") is not None:
        age += f"  used before {row['uses_mean']:.2f}"
    success = parity = older = turn = experts = ""
    if row.get("success_rate") is not None:
        success = f"  success {row['success_rate']:.3f}"
    if "mismatched_tokens" in row:
        parity = f"  mismatched {row['mismatched_tokens']}/{row['compared_tokens']}  weights {row['weights_sha']}"
        older = (
            f"  kl of present weights {row['parity_kl']:.5f}"
            f"  older {row['older_tokens']}  kl of older {row['older_kl']:.5f}"
        )
    if "turn/seconds" in row:
        turn = f"  turn {row['turn/seconds']:.2f} s"
    if row.get("expert_load") is not None:
        experts = (
            f"  expert load {row['expert_load']:.2f} (max {row['expert_load_max']:.2f})"
            f"  unused {row['unused_experts']:.0f}  router entropy {row['router_entropy']:.3f}"
        )
    if row.get("rerouted_share") is not None:
        experts += f"  rerouted {row['rerouted_share']:.2%}"
    perplexities = (
        f"{_known(row['perplexity_rollout'], '.4g')}/{_known(row['perplexity_trainer'], '.4g')}"
    )
    return (
        f"Step {step}/{steps}  reward {row['reward_mean']:.3f}{success}  loss {row['loss']:.4f}  "
        f"kl {_known(row['kl'], '.5f')}  "
        f"entropy {row['entropy']:.3f}  clipped {row['clip_fraction']:.3f}  grad norm {row['grad_norm']:.3f}  "
        f"length {row['response_length_mean']:.1f}  {row['tokens_per_second']:.0f} tok/s  queue {row['queue_size']}  {age}  "
        f"wait {row['seconds_wait']:.2f} s  train {row['seconds_train']:.2f} s  sync {row['seconds_sync']:.2f} s"
        f"{turn}{parity}  "
        f"forwarded {row['forwarded_tokens_per_second']:.0f} tok/s  packed {row['packing_ratio']:.2f}  "
        f"mfu {_known(row['mfu'], '.3f')}  "
        f"waiting {100 * row['waiting_share']:.0f} %  peak {row['peak_memory_bytes'] / 2**30:.2f} GiB{older}  "
        f"ratio p99 {_known(row['ratio_p99'], '.3f')}  ess {_known(row['ess'], '.3f')}  "
        f"mismatch kl {_known(row['mismatch_kl'], '.1e')}  ppl {perplexities}{experts}"
    )


def _known(value: float | None, form: str) -> str:
    """Format a figure; `?` for an unknown one."""
    return "?" if value is None else format(value, form)


if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_WAITING_ROWS = 1000
_CLOSE_SECONDS = 30.0


class MetricsLog:
    """Writes rows. A row is in the file when `write` returns, unless the disk is full.

    A new run moves an earlier metrics.jsonl aside; a resumed one continues it, without the rows
    after the step that it resumes from. It treats evaluations.jsonl in the same way, but a resumed run keeps
    all.

    Args:
        folder: gets metrics.jsonl, evaluations.jsonl and tensorboard/.
        config: the run's options, for W&B.
        first_step: the step that the run starts from, 0 unless resumed.
        wandb: project and group, or None.
        exporter: shows each row to Prometheus; closed with this log.

    Raises:
        ConfigError: W&B refuses to start, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        first_step: int = 0,
        wandb: tuple[str, str] | None = None,
        exporter: MetricsServer | None = None,
    ) -> None:
        self._exporter = exporter
        wandb_run = wandb and _start_wandb(wandb, config, folder)
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _prepare(path, first_step)
            self._file = KeptLines(path)
            self.evaluations = EvaluationFile(
                folder / "evaluations.jsonl", continued=first_step > 0
            )
            self._others = _Background(
                _tensorboard(folder / "tensorboard", first_step + 1), wandb_run
            )
        except OSError as error:
            reason = cannot_write(
                folder / "metrics.jsonl", error, name=f"metrics to --log-dir {folder}"
            )
            raise ConfigError(f"{reason}; {remedy(error, 'give another --log-dir')}") from error

    def write(self, step: int, row: Row) -> None:
        """Write one row. Figures that are not known are None. Waits for no network, and for no disk
        but metrics.jsonl's.

        A full disk ends no run: the row waits in memory until there is space.
        """
        self._file.write(json.dumps({"step": step} | row).encode())
        if self._exporter is not None:
            self._exporter.update(step, row)
        numbers = {
            f"train/{name}": value for name, value in row.items() if isinstance(value, int | float)
        }
        self._others.write(_Scalars(step, numbers, step))

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write what an environment measured; in TensorBoard and W&B it stands at the weights that
        were measured.

        Args:
            step: the trainer's present one.
        """
        self.evaluations.write(step, evaluation)
        if self._exporter is not None:
            self._exporter.update_evaluation(evaluation)
        axis, numbers = scalars(evaluation)
        version = step if evaluation.weight_version is None else evaluation.weight_version
        self._others.write(_Scalars(step, numbers, version, axis))

    def close(self) -> None:
        """Finish all logs."""
        self._file.close()
        self.evaluations.close()
        self._others.close()
        if self._exporter is not None:
            self._exporter.close()


def make_metrics(
    config: TrainerConfig, first_step: int, exporter: MetricsServer | None = None, main: bool = True
) -> MetricsLog | None:
    """Make the log of figures on the main rank; None on the others, which have the same figures."""
    if not main:
        return None
    wandb = None
    if config.use_wandb:
        wandb = config.wandb_names
    return MetricsLog(config.log_dir, config.shareable, first_step, wandb, exporter)


@dataclass(frozen=True)
class _Scalars:
    """Numbers for TensorBoard and W&B.

    Attributes:
        step: at which they are logged; W&B takes no earlier step than the last.
        at: where they stand, for evaluations the weight version.
        axis: what W&B calls it, if it is not the step.
    """

    step: int
    numbers: dict[str, float]
    at: int
    axis: str | None = None


class _Background:
    """Hands numbers to TensorBoard and Weights & Biases in a thread of its own, so that no step
    waits for them.

    metrics.jsonl has all that they show. So rows that they take too slowly, or not at all, are left
    out with a warning.
    """

    def __init__(self, tensorboard: SummaryWriter | None, wandb: Any) -> None:
        self._tensorboard, self._wandb = tensorboard, wandb
        self._rows: queue.Queue[_Scalars | None] = queue.Queue(_WAITING_ROWS)
        self._failure: Exception | None = None
        self._axes: set[str] = set()
        self._thread: threading.Thread | None = None
        if tensorboard is not None or wandb is not None:
            self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
            self._thread.start()

    def write(self, scalars: _Scalars) -> None:
        if self._thread is None or self._failure is not None:
            return
        try:
            self._rows.put_nowait(scalars)
        except queue.Full:
            logger.warning(
                "TensorBoard or W&B is %d rows behind: step %d is in metrics.jsonl alone",
                _WAITING_ROWS,
                scalars.step,
            )

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._hand_over(row)
            except Exception as error:  # noqa: BLE001 - whatever another library raises; the run goes on without its view
                self._failure = error
                reason = " ".join(str(error).split())
                logger.error(
                    "No more rows for TensorBoard and W&B, metrics.jsonl only: %s: %s",
                    type(error).__name__,
                    reason,
                )
                return

    def _hand_over(self, scalars: _Scalars) -> None:
        if self._tensorboard is not None:
            for name, value in scalars.numbers.items():
                self._tensorboard.add_scalar(name, value, scalars.at)
            self._tensorboard.flush()
        if self._wandb is not None:
            numbers = scalars.numbers
            if scalars.axis is not None:
                numbers = numbers | {scalars.axis: scalars.at}
                if scalars.axis not in self._axes:
                    self._axes.add(scalars.axis)
                    self._wandb.define_metric(
                        f"{scalars.axis.rpartition('/')[0]}/*", step_metric=scalars.axis
                    )
            self._wandb.log(numbers, step=scalars.step)

    def close(self) -> None:
        """Wait until every row is handed over, within a deadline, and finish both."""
        if self._thread is None:
            return
        if self._failure is None:
            try:
                self._rows.put(None, timeout=_CLOSE_SECONDS)
                self._thread.join(_CLOSE_SECONDS)
            except queue.Full:
                logger.debug("there is no room for the end either")
            if self._thread.is_alive():
                logger.warning(
                    "TensorBoard or W&B did not take the last rows in %.0f s, metrics.jsonl has",
                    _CLOSE_SECONDS,
                )
                return
        for other, finish in ((self._tensorboard, "close"), (self._wandb, "finish")):
            if other is None:
                continue
            try:
                getattr(other, finish)()
            except Exception as error:  # noqa: BLE001 - whatever another library raises; the run is over without its view
                if self._failure is None:  # or it is the same once more
                    reason = " ".join(str(error).split())
                    logger.error(
                        "The last rows for TensorBoard and W&B are lost, metrics.jsonl has them: %s",
                        reason,
                    )


def _prepare(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    if first_step:
        kept, unreadable = [], 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                later = not line.endswith(b"\n") or json.loads(line)["step"] > first_step
            except (ValueError, KeyError, TypeError):
                later, unreadable = False, unreadable + 1
            if not later:
                kept.append(line)
        if unreadable:
            logger.warning(
                "%d lines of %s are not rows of figures; they stay, and are passed over",
                unreadable,
                path,
            )
        write_whole(path, b"".join(kept))
        return
    logger.info("Moved the metrics of an earlier run to %s", move_aside(path))


def _tensorboard(folder: Path, first_step: int) -> SummaryWriter | None:
    """A writer, or None (with a warning) where TensorBoard is not installed: metrics.jsonl has all
    that it would show.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        logger.warning(
            "No TensorBoard log, metrics.jsonl only: %s (pip install tensorboard)", error
        )
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def _start_wandb(names: tuple[str, str], config: dict[str, Any], folder: Path) -> Any:
    """A W&B run, offline where there is no login, or None (with a warning) where wandb is not
    installed.

    metrics.jsonl has all that W&B would show.

    Raises:
        ConfigError: W&B refuses to start.
    """
    try:
        import wandb
    except ImportError:
        logger.warning(
            "No W&B log, metrics.jsonl and TensorBoard only: wandb is not installed (pip install wandb)"
        )
        return None
    folder.mkdir(parents=True, exist_ok=True)
    mode, notice = offline_mode(folder)
    if notice:
        logger.info("%s", notice)
    sys.argv[:] = without_secrets(sys.argv)  # W&B keeps the command line
    try:
        return wandb.init(
            project=names[0],
            group=names[1],
            config=config,
            dir=str(folder),
            job_type="trainer",
            **mode,
        )
    except wandb.Error as error:
        raise ConfigError(
            f"--use-wandb: {' '.join(str(error).split())}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error
