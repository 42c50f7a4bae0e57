"""One row of figures per optimizer step: to metrics.jsonl, to TensorBoard, to Weights & Biases and Prometheus when asked."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_trainer.api_keys import without_secrets
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError
from example_trainer.observe.exporter import MetricsServer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""Numbers, text, or None where a figure is not known."""

_WAITING_ROWS = 1000
_CLOSE_SECONDS = 30.0


def step_line(step: int, steps: int, row: Row) -> str:
    """One line for people: `Step 1/100  reward 0.500 …`."""
    age = "age ?" if row["age_mean"] is None else f"age {row['age_mean']:.1f} (max {row['age_max']})"
    parity = older = ""
    if "mismatched_tokens" in row:
        parity = f"  mismatched {row['mismatched_tokens']}/{row['compared_tokens']}  weights {row['weights_sha']}"
        older = (
            f"  kl of present weights {row['parity_kl']:.5f}  older {row['older_tokens']}  kl of older {row['older_kl']:.5f}"
        )
    mfu = "?" if row["mfu"] is None else f"{row['mfu']:.3f}"
    return (
        f"Step {step}/{steps}  reward {row['reward_mean']:.3f}  loss {row['loss']:.4f}  kl {row['kl']:.5f}  "
        f"entropy {row['entropy']:.3f}  clipped {row['clip_fraction']:.3f}  grad norm {row['grad_norm']:.3f}  "
        f"length {row['response_length_mean']:.1f}  {row['tokens_per_second']:.0f} tok/s  queue {row['queue_size']}  {age}  "
        f"wait {row['seconds_wait']:.2f} s  train {row['seconds_train']:.2f} s  sync {row['seconds_sync']:.2f} s{parity}  "
        f"forwarded {row['forwarded_tokens_per_second']:.0f} tok/s  packed {row['packing_ratio']:.2f}  mfu {mfu}  "
        f"waiting {100 * row['waiting_share']:.0f} %  peak {row['peak_memory_bytes'] / 2**30:.2f} GiB{older}"
    )


class MetricsLog:
    """Writes rows. A row is on the disk when `write` returns.

    A new run moves an earlier metrics.jsonl aside; a resumed one continues it, without the rows after the step that it
    resumes from.

    Args:
        folder: gets metrics.jsonl and tensorboard/.
        config: the run's options, for W&B.
        first_step: the step that the run starts from, 0 unless resumed.
        wandb: project and group, or None.
        exporter: shows each row to Prometheus; closed with this log.

    Raises:
        ConfigError: W&B is asked for and not installed, or the folder cannot be written.
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
        wandb_run = _start_wandb(wandb, config, folder) if wandb else None
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _prepare(path, first_step)
            self._file = path.open("a", encoding="utf-8")
            self._others = _Background(_tensorboard(folder / "tensorboard", first_step + 1), wandb_run)
        except OSError as error:
            raise ConfigError(f"cannot write metrics to --log-dir {folder}: {error.strerror or error}") from error

    def write(self, step: int, row: Row) -> None:
        """Write one row. Figures that are not known are None. Waits for no network, and for no disk but metrics.jsonl's."""
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        if self._exporter is not None:
            self._exporter.update(step, row)
        self._others.write(step, {name: value for name, value in row.items() if isinstance(value, int | float)})

    def close(self) -> None:
        """Finish all logs."""
        self._file.close()
        self._others.close()
        if self._exporter is not None:
            self._exporter.close()


class NoMetrics(MetricsLog):
    """Rank 0 writes the figures; the others have the same ones and write none."""

    def __init__(self) -> None:
        return

    def write(self, step: int, row: Row) -> None:
        return

    def close(self) -> None:
        return


def make_metrics(
    config: TrainerConfig, first_step: int, exporter: MetricsServer | None = None, main: bool = True
) -> MetricsLog:
    """Where the figures go; they are the same on every rank, and the main one writes them."""
    if not main:
        return NoMetrics()
    wandb = config.wandb_names if config.use_wandb else None
    return MetricsLog(config.log_dir, config.shareable, first_step, wandb, exporter)


class _Background:
    """Hands numbers to TensorBoard and Weights & Biases in a thread of its own, so that no step waits for them.

    metrics.jsonl has all that they show. So rows that they take too slowly, or not at all, are left out with a warning.
    """

    def __init__(self, tensorboard: SummaryWriter | None, wandb: Any) -> None:
        self._tensorboard, self._wandb = tensorboard, wandb
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_WAITING_ROWS)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if tensorboard is not None or wandb is not None:
            self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
            self._thread.start()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if self._thread is None or self._failure is not None:
            return
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            logger.warning("TensorBoard or W&B is %d rows behind: step %d is in metrics.jsonl alone", _WAITING_ROWS, step)

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                self._hand_over(*row)
            except Exception as error:  # noqa: BLE001 - whatever another library raises; the run goes on without its view
                self._failure = error
                told = " ".join(str(error).split())
                logger.error("No more rows for TensorBoard and W&B, metrics.jsonl only: %s: %s", type(error).__name__, told)
                return

    def _hand_over(self, step: int, numbers: dict[str, float]) -> None:
        named = {f"train/{name}": value for name, value in numbers.items()}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(named, step=step)

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
                logger.warning("TensorBoard or W&B did not take the last rows in %.0f s, metrics.jsonl has", _CLOSE_SECONDS)
                return
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _prepare(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    if first_step:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first_step]
        path.write_text("".join(kept), encoding="utf-8")
        return
    number = 1
    while (aside := path.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    path.rename(aside)
    logger.info("Moved the metrics of an earlier run to %s", aside)


def _tensorboard(folder: Path, first_step: int) -> SummaryWriter | None:
    """A writer, or None (with a warning) where TensorBoard is not installed: metrics.jsonl has all that it would show."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        logger.warning("No TensorBoard log, metrics.jsonl only: %s (pip install tensorboard)", error)
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def import_wandb() -> Any:
    """The wandb module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--use-wandb needs the package wandb, which is not installed: pip install wandb") from error
    return wandb


def _start_wandb(names: tuple[str, str], config: dict[str, Any], folder: Path) -> Any:
    wandb = import_wandb()
    folder.mkdir(parents=True, exist_ok=True)
    sys.argv[:] = without_secrets(sys.argv)  # W&B keeps the command line
    try:
        return wandb.init(project=names[0], group=names[1], config=config, dir=str(folder), job_type="trainer")
    except wandb.Error as error:
        raise ConfigError(
            f"--use-wandb: {' '.join(str(error).split())}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error
