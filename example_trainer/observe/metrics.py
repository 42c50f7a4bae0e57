"""One row of figures per optimizer step: to metrics.jsonl, to TensorBoard, to Weights & Biases and Prometheus when asked."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atroposlib.utils.lives import Life
from example_trainer.api_keys import without_secrets
from example_trainer.batch.groups import Batch
from example_trainer.errors import ConfigError
from example_trainer.observe.exporter import MetricsServer
from example_trainer.training.optimizer import StepReport
from example_trainer.training.step import StepSums
from example_trainer.weight_bridge.base import SyncReport, WeightBridge

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""Numbers, text, or None where a figure is not known."""


def step_row(
    batch: Batch,
    sums: StepSums,
    step: StepReport,
    sync: SyncReport,
    bridge: WeightBridge,
    queue_size: int,
    seconds: tuple[float, float, float],
    version: int,
    lives: Sequence[Life] = (),
) -> Row:
    """The figures of one optimizer step.

    Args:
        queue_size: groups waiting in the rollout service.
        seconds: waiting for the batch, computing the step, handing over the weights.
        version: the weight version that the step made.
        lives: of the run; see weight_age.
    """
    scores = np.array([sequence.score for sequence in batch.sequences])
    lengths = [len(sequence.positions) for sequence in batch.sequences]
    ages = batch.ages(version - 1, lives)
    return {
        "reward_mean": float(scores.mean()),
        "reward_std": float(scores.std()),
        **vars(sums),
        **vars(step),
        "tokens": batch.trained_tokens,
        "tokens_per_second": batch.trained_tokens / sum(seconds),
        "response_length_mean": float(np.mean(lengths)),
        "sequences": len(batch.sequences),
        "groups_invalid": len(batch.invalid),
        "sequences_truncated": batch.truncated,
        "queue_size": queue_size,
        "age_mean": float(np.mean(ages)) if ages else None,
        "age_max": max(ages) if ages else None,
        "weight_version": sync.version,
        "params_mapped": bridge.params_mapped,
        "params_total": bridge.params_total,
        "bytes_moved": sync.bytes_moved,
        "checksum": sync.checksum,
        "seconds_wait": seconds[0],
        "seconds_train": seconds[1],
        "seconds_sync": seconds[2],
        "first_byte_to_verified": sync.first_byte_to_verified,
        **{f"sync/{phase}": value for phase, value in sync.seconds.items()},
        **{f"server/{phase.removeprefix('to_')}": value for phase, value in sync.server_seconds.items()},
    }


def step_line(step: int, steps: int, row: Row) -> str:
    """One line for people: `Step 1/100  reward 0.500 …`."""
    age = "age ?" if row["age_mean"] is None else f"age {row['age_mean']:.1f} (max {row['age_max']})"
    parity = ""
    if "mismatched_tokens" in row:
        parity = f"  mismatched {row['mismatched_tokens']}/{row['compared_tokens']}  weights {row['weights_sha']}"
    return (
        f"Step {step}/{steps}  reward {row['reward_mean']:.3f}  loss {row['loss']:.4f}  kl {row['kl']:.5f}  "
        f"entropy {row['entropy']:.3f}  clipped {row['clip_fraction']:.3f}  grad norm {row['grad_norm']:.3f}  "
        f"length {row['response_length_mean']:.1f}  {row['tokens_per_second']:.0f} tok/s  queue {row['queue_size']}  {age}  "
        f"wait {row['seconds_wait']:.2f} s  train {row['seconds_train']:.2f} s  sync {row['seconds_sync']:.2f} s{parity}"
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
        self._wandb = _start_wandb(wandb, config, folder) if wandb else None
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _prepare(path, first_step)
            self._file = path.open("a", encoding="utf-8")
            self._tensorboard = _tensorboard(folder / "tensorboard", first_step + 1)
        except OSError as error:
            raise ConfigError(f"cannot write metrics to --log-dir {folder}: {error.strerror or error}") from error

    def write(self, step: int, row: Row) -> None:
        """Write one row. Figures that are not known are None."""
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(f"train/{name}", value, step)
            self._tensorboard.flush()
        if self._exporter is not None:
            self._exporter.update(step, row)
        if self._wandb is not None:
            self._wandb.log({f"train/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Finish all logs."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._exporter is not None:
            self._exporter.close()
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
