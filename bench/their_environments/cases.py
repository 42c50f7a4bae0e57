"""Which files of the public repository run, and which do not."""

from __future__ import annotations

from bench.their_environments.case import Case
from bench.their_environments.evaluation_cases import EVALUATING
from bench.their_environments.serving_cases import SERVING

CASES: tuple[Case, ...] = (*SERVING, *EVALUATING)

NOT_RUN: dict[str, str] = {}
"""Files that were looked at and do not run here, and what they would need."""
