"""The cases that need no trainer: `evaluate`, whose metrics and samples are compared, and `process`, whose groups are."""

from __future__ import annotations

from bench.their_environments.case import Case
from bench.their_environments.serving_cases import ANSWER_TAGS, BOXED, GSM8K, MATH

EVALUATING: tuple[Case, ...] = (
    Case("gsm8k_server_evaluate", "gsm8k_server.py", "evaluation", BOXED, GSM8K, command="evaluate", servers=2),
    Case("gsm8k_server_process", "gsm8k_server.py", "`process`", BOXED, GSM8K, command="process", servers=2),
    Case("math_server_zero_evaluate", "math_server_zero.py", "evaluation", ANSWER_TAGS, MATH, command="evaluate", servers=2),
)
