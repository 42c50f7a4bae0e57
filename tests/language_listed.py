"""Phrases and texts of code that tests/language.py counts and that stay as they are, each with the
reason.
"""

from __future__ import annotations

_JUDGE = "text that the judge reads; with another wording it would give other scores"
_TASK = "part of a generated task; with another wording a seed would give other tasks"
_WORDS = "a list of words, without sentences"
_SQL = "SQL, which has no sentences"

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
    (
        "atroposlib/compat/reward_fns/rewards.py",
        "a an and are as at be but by for from had has have he her hi …",
    ): _WORDS,
    (
        "atroposlib/dashboard/rollouts/archive.py",
        "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NU …",
    ): _SQL,
    (
        "atroposlib/dashboard/rollouts/archive.py",
        "AS listed CROSS JOIN rollouts r ON r.id = listed.value JOIN …",
    ): _SQL,
    (
        "atroposlib/dashboard/rollouts/archive.py",
        "SELECT x, id FROM rollouts WHERE environment = ?1 AND x = ?2 …",
    ): _SQL,
    (
        "atroposlib/service/sqlite_store.py",
        "CREATE TABLE records (kind TEXT NOT NULL, id NOT NULL, recor …",
    ): _SQL,
    (
        "atroposlib/utils/math_scoring.py",
        "or and if when for mod but not where with plus minus times o …",
    ): _WORDS,
    (
        "environments/arithmetic_server.py",
        "Ada Amir Anna Ben Carla Chen Dana Eli Emma Femi Grace Hugo I …",
    ): _WORDS,
    (
        "environments/arithmetic_server.py",
        "apples beads books boxes bricks buttons cakes cards chairs c …",
    ): _WORDS,
    (
        "environments/code_server.py",
        "apple banana cherry onion eel pear plum fig quince melon ivy …",
    ): _WORDS,
    (
        "example_trainer/observe/metrics.py",
        "Step x/x reward xx loss x kl x entropy x clipped x gra …",
    ): "a row of figures, which people grep for",
}
"""File and phrase, as `python -m tests.language FILE` prints it -> why the phrase stays."""
