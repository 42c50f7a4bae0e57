"""Phrases of code that tests/language.py counts and that stay as they are, each with the reason."""

from __future__ import annotations

_JUDGE = "text that the judge reads; with another wording it would give other scores"
_TASK = "part of a generated task; with another wording a seed would give other tasks"

LISTED: dict[tuple[str, str], str] = {
    ("atroposlib/dashboard/static/weights.js", "What handing over takes …"): (
        "a chart's title, which docs/images/ui_weights_light.png shows"
    ),
    ("bench/async_modes.py", "meanwhile"): (
        "a title in docs/images/async_timelines.svg, which is drawn from the traces of a run"
    ),
    ("environments/code_server.py", "Of these values, return x. …"): _TASK,
    ("environments/judge_server.py", "What stands between the lines [x] was wr …"): _JUDGE,
    ("environments/judge_server.py", "is no score"): _JUDGE,
    ("environments/judge_server.py", "Say"): _JUDGE,
    ("environments/judge_server.py", "said"): _JUDGE,
    ("environments/judge_server.py", "somebody"): _TASK,
    ("environments/judge_server.py", "tell"): _TASK,
    ("studies/starter_model/report.py", "told"): (
        "a sentence of assets/calculator_model/README.md, which was written with the model"
    ),
}
"""File and phrase, as `python -m tests.language FILE` prints it -> why the phrase stays."""
