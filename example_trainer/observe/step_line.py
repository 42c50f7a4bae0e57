"""The trainer's log line of one optimizer step, written and read. Pure: no I/O, no state."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
        success: share of solved items, from 0 to 1; None if the environments do not say.
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
    found = _LINE.search(line)
    if found is None:
        return None
    success = found["success"]
    return StepFigures(
        int(found["step"]),
        int(found["steps"]),
        float(found["reward"]),
        None if success is None else float(success),
        float(found["rate"]),
        found["age"],
    )


def step_line(step: int, steps: int, row: Row) -> str:
    """Write the figures of a step as one line for people: `Step 1/100  reward 0.500 …`."""
    age = (
        "age ?" if row["age_mean"] is None else f"age {row['age_mean']:.1f} (max {row['age_max']})"
    )
    if row.get("uses_mean") is not None:
        age += f"  used before {row['uses_mean']:.2f}"
    success = "" if row.get("success_rate") is None else f"  success {row['success_rate']:.3f}"
    parity = older = ""
    if "mismatched_tokens" in row:
        parity = f"  mismatched {row['mismatched_tokens']}/{row['compared_tokens']}  weights {row['weights_sha']}"
        older = (
            f"  kl of present weights {row['parity_kl']:.5f}"
            f"  older {row['older_tokens']}  kl of older {row['older_kl']:.5f}"
        )
    turn = f"  turn {row['turn/seconds']:.2f} s" if "turn/seconds" in row else ""
    perplexities = (
        f"{_known(row, 'perplexity_rollout', '.4g')}/{_known(row, 'perplexity_trainer', '.4g')}"
    )
    return (
        f"Step {step}/{steps}  reward {row['reward_mean']:.3f}{success}  loss {row['loss']:.4f}  "
        f"kl {_known(row, 'kl', '.5f')}  "
        f"entropy {row['entropy']:.3f}  clipped {row['clip_fraction']:.3f}  grad norm {row['grad_norm']:.3f}  "
        f"length {row['response_length_mean']:.1f}  {row['tokens_per_second']:.0f} tok/s  queue {row['queue_size']}  {age}  "
        f"wait {row['seconds_wait']:.2f} s  train {row['seconds_train']:.2f} s  sync {row['seconds_sync']:.2f} s"
        f"{turn}{parity}  "
        f"forwarded {row['forwarded_tokens_per_second']:.0f} tok/s  packed {row['packing_ratio']:.2f}  "
        f"mfu {_known(row, 'mfu', '.3f')}  "
        f"waiting {100 * row['waiting_share']:.0f} %  peak {row['peak_memory_bytes'] / 2**30:.2f} GiB{older}  "
        f"ratio p99 {_known(row, 'ratio_p99', '.3f')}  ess {_known(row, 'ess', '.3f')}  "
        f"mismatch kl {_known(row, 'mismatch_kl', '.1e')}  ppl {perplexities}"
    )


def _known(row: Row, name: str, form: str) -> str:
    return "?" if row[name] is None else format(row[name], form)
