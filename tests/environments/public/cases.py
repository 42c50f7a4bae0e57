"""Which files of the public repository run, and which do not."""

from __future__ import annotations

from tests.environments.public.case import Case
from tests.environments.public.evaluation_cases import EVALUATING
from tests.environments.public.serving_cases import SERVING

CASES: tuple[Case, ...] = (*SERVING, *EVALUATING)

NOT_RUN: dict[str, str] = {
    "sft_loader_server.py": "imports `OpenaiConfig`, which the public SDK 0.4.0 does not have either",
    "eval_environments/math500_eval.py": "its constructor takes no `slurm`, which the public SDK 0.4.0, too, passes",
    "dataset_environment/dataset_env.py": "gives back a pair where the public SDK 0.4.0, too, wants groups (read, not run)",
}
"""Files that were looked at and do not run, and why."""
