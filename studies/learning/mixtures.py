"""Compare what a mixture of experts learns with equal bits, with router replay, and with neither.

    python -m studies.word_problems.make_model --shape mixture --output model    # first, once: one GPU
    python studies/learning/mixtures.py --output DIR --model model               # type it again to continue
    python studies/learning/mixtures.py --output DIR --device cpu --tiny         # the starter model as a mixture, to try it

Sampler and trainer round differently, so their routers send some tokens to different experts.
Each of three arms is trained with fresh batches and with batches of four steps before, with three
seeds:

    ordinary   ordinary kernels
    replay     ordinary kernels; the trainer takes the experts that the sampler chose
    exact      the same kernels on both sides, so the routers agree in every bit

No arm corrects for the difference. As in trainings.py, a finished training is kept in DIR and not
run again. A training does not begin if it would not end within --seconds. A training that takes longer
than --run-timeout (540 s) has failed: lower --steps or --jobs. DIR/mixtures.json gets curves of
reward, KL and the experts' load, the share of held-out problems solved, and how a run collapsed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import io
import shlex
from contextlib import redirect_stderr
from functools import partial

from bench.gpu.runs import run_and_report
from bench.measured import Options, command_line
from example_trainer import simple_rl
from studies.learning.plan import MIXTURES, Variant
from studies.learning.trainings import OPTIONS as LEARNING
from studies.learning.trainings import Learning, completed, report
from studies.starter_model import mixture


class Mixtures(Learning):
    """See Learning; of MIXTURES."""

    variants = MIXTURES
    file = "mixtures.json"

    def refusal(self, variant: Variant) -> str | None:
        """Return the reason why an arm cannot be trained here; None if it can."""
        return super().refusal(variant) or unknown_flags(variant)


def unknown_flags(variant: Variant) -> str | None:
    """The last line of simple_rl.py about flags that it does not take; None if it takes all."""
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            simple_rl.parse_arguments(list(variant.flags))
    except SystemExit:
        return errors.getvalue().strip().splitlines()[-1]
    return None


OPTIONS: Options = LEARNING | {
    "--output": {
        "type": Path,
        "required": True,
        "help": "folder of mixtures.json, and of each training's files",
    },
    "--model": {
        "type": Path,
        "default": None,
        "help": "what studies.word_problems.make_model --shape mixture wrote; --tiny: the starter model as a mixture",
    },
    "--only": {
        "nargs": "+",
        "choices": MIXTURES,
        "metavar": "ARM",
        "help": "arms to train; default: all of --list",
    },
    "--steps": {"type": int, "default": None, "help": "default: 100; --tiny: 3"},
    "--jobs": {
        "type": int,
        "default": 2,
        "help": "trainings at a time on each GPU (default: %(default)s); --tiny: 1",
    },
    "--run-timeout": {
        "type": float,
        "default": 540.0,
        "help": "seconds that one training may take (default: %(default)s)",
    },
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    whole = {"only": list(MIXTURES), "seeds": [0, 1, 2], "steps": 100, "model": Path("model")}
    tiny_model = args.output / "model"
    return completed(args, whole, whole | {"seeds": [0], "steps": 3, "model": tiny_model})


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.list:
        for variant in MIXTURES.values():
            print(f"{variant.name:<12}{variant.label:<46}{shlex.join(variant.flags)}")
        return 0
    if args.tiny and args.model == (args.output / "model").resolve():
        mixture.main(["--output", str(args.model), "--experts", "4", "--experts-per-token", "2"])
    return run_and_report(args, Mixtures, partial(report, variants=MIXTURES))


if __name__ == "__main__":
    raise SystemExit(main())
