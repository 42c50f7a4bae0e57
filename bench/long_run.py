"""Files of a made-up long run: rows of a trainer, and an archive of rollouts as a rollout service
keeps it.

The archive's first groups are kept by the service's own Archive, with a tokenizer of 150,000 tokens
and what a trainer reports of every twelfth rollout; all others are copies of these within the file,
row by row, with drifts and versions of their own. So a million rollouts take a minute and no
memory, and every index has the size and the order that it has in a real archive.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from atroposlib.dashboard.rollouts.archive import Archive, PostedGroup
from atroposlib.dashboard.rollouts.rollout_stats import TrainedTokens

FIGURES = 130
"""Figures in a row of the trainer."""
SHOWN = (
    "reward_mean", "response_length_mean", "response_length_p95", "response_length_max", "kl", "mismatch_kl", "reference_kl",
    "entropy", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "seconds_wait", "seconds_train", "seconds_sync",
    "tokens_per_second", "forwarded_tokens_per_second", "mfu", "age_mean", "age_max", "ratio_p50", "ratio_p99", "ratio_max",
    "grad_norm", "waiting_share", "queue_size",
)  # fmt: skip
"""Figures that the overview draws (static/figures.js)."""
EVALUATED_EVERY = 20
GROUP_SIZE = 8
PROMPT, RESPONSE = (12, 40), (16, 48)
"""Fewest and most tokens: short, so that a million rollouts are within the bytes that a service
keeps by default."""
ENVIRONMENTS = (
    ("arithmetic", 0.5),
    ("code", 0.3),
    ("games", 0.15),
    ("tools", 0.049),
    ("rare", 0.001),
)
"""Name and share of the groups."""
TOKENS = 150_000
NEEDLE = "zqxjkv"
"""A text that one rollout has, the oldest."""
_SPELLED = [ord(letter) - 33 for letter in NEEDLE]
"""The tokens of single characters; the first is `!`."""
_COPIED = "environment, score, tokens, sampled, mean_logprob"


class Rows:
    """Rows of metrics.jsonl, one after the other."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        names = [*SHOWN, *(f"figure_{number}" for number in range(FIGURES - len(SHOWN)))]
        self._figures = {name: self._draw.random() for name in names}
        self.step = 0

    def line(self) -> str:
        """The next one."""
        self.step += 1
        self._figures = {
            name: value + self._draw.gauss(0, 0.01) for name, value in self._figures.items()
        }
        return (
            json.dumps({"step": self.step, **self._figures, "checksum": f"{self.step:032x}"}) + "\n"
        )


def write_figures(folder: Path, steps: int) -> Rows:
    """The trainer's rows and the evaluations of a run of so many steps, in `folder`/trainer.

    Returns the rows.
    """
    (folder / "trainer").mkdir(parents=True)
    rows, draw = Rows(), random.Random(1)
    with (folder / "trainer" / "metrics.jsonl").open("w") as file:
        file.writelines(rows.line() for _ in range(steps))
    with (folder / "trainer" / "evaluations.jsonl").open("w") as file:
        for number in range(1, steps // EVALUATED_EVERY + 1):
            told = {
                "id": number,
                "time": 1e9 + number,
                "step": EVALUATED_EVERY * number,
                "name": "task",
            }
            file.write(json.dumps(told | {"metrics": {"eval/correct": draw.random()}}) + "\n")
    return rows


def tokenizer_file(tokens: int = TOKENS) -> bytes:
    """Make a tokenizer.json of byte pairs, as large as those of today's models; its texts are not a
    language.
    """
    draw = random.Random(2)
    single = [
        chr(code)
        for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    ]
    letters = [chr(code) for code in range(97, 123)]
    words, known, merges = [*letters, *("Ġ" + letter for letter in letters)], set(single), []
    vocabulary = {text: number for number, text in enumerate(single)}
    while len(vocabulary) < tokens:
        left, right = (
            draw.choice(words),
            draw.choice(letters) if draw.random() < 0.6 else draw.choice(words).strip("Ġ"),
        )
        text = left + right
        if (
            text not in known
            and len(text) <= 12
            and right in vocabulary
            and (left in vocabulary or left[0] == "Ġ")
        ):
            if left not in vocabulary:
                vocabulary[left] = len(vocabulary)
                merges.append(["Ġ", left[1:]])
                known.add(left)
            vocabulary[text] = len(vocabulary)
            merges.append([left, right])
            known.add(text)
            words.append(text)
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": merges,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    parts = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
    }
    return orjson.dumps(parts | {"decoder": level, "model": model})


def groups(count: int) -> Iterator[tuple[PostedGroup, TrainedTokens | None]]:
    """Yield groups as an environment posts them, and the trainer's report on the first rollout of
    most of them.
    """
    draw = random.Random(3)
    names, shares = zip(*ENVIRONMENTS, strict=True)
    for number in range(count):
        prompt = [int(TOKENS ** draw.random()) for _ in range(draw.randint(*PROMPT))]
        answers = [
            [int(TOKENS ** draw.random()) for _ in range(draw.randint(*RESPONSE))]
            for _ in range(GROUP_SIZE)
        ]
        if number == 0:
            answers[0][: len(_SPELLED)] = _SPELLED
        logprobs = [[round(-draw.expovariate(2.0), 6) for _ in answer] for answer in answers]
        version = number // 64
        body = {
            "tokens": [prompt + answer for answer in answers],
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "scores": [
                float(draw.random() < 0.4) if number % 2 else round(draw.gauss(0, 1), 3)
                for _ in answers
            ],
            "inference_logprobs": [[1.0] * len(prompt) + row for row in logprobs],
            "weight_versions": [version] * GROUP_SIZE,
            "finish_reasons": ["stop" if draw.random() < 0.9 else "length" for _ in answers],
        }
        posted = PostedGroup(
            number, 1.7e9 + number, draw.choices(names, shares)[0], orjson.dumps(body)
        )
        told = np.asarray(logprobs[0], np.float32)
        columns = (
            told - np.float32(draw.expovariate(20.0)),
            np.abs(told),
            np.full(len(told), 0.5, np.float32),
        )
        yield (
            posted,
            TrainedTokens(version, len(told), *columns)
            if draw.random() < GROUP_SIZE / 12
            else None,
        )


def keep(archive: Archive, count: int) -> float:
    """Keep groups as the service does. Returns seconds of the processor for each."""
    some = list(groups(count))
    began = time.process_time()
    for start in range(0, count, 20):
        with archive.transaction():
            for posted, trained in some[start : start + 20]:
                group = archive.add(posted)
                if trained is not None:
                    archive.add_trained(group, [(0, trained)])
    return (time.process_time() - began) / count


def write_archive(path: Path, kept: int) -> dict[str, Any]:
    """An archive of so many groups, each kept as the service keeps it. Returns what it cost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    archive = Archive(path)
    with archive.transaction():
        archive.keep_tokenizer(tokenizer_file())
    seconds = keep(archive, kept)
    archive.close()
    return {"groups": kept, "processor_ms_per_group": seconds * 1e3}


def multiply(path: Path, rollouts: int) -> dict[str, Any]:
    """Copy the groups of an archive until it has so many rollouts, or a few more.

    Returns their number and the bytes.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    run = connection.execute
    run("PRAGMA synchronous = OFF")
    run("PRAGMA cache_size = -400000")
    groups_of_one, rollouts_of_one = run("SELECT max(id), sum(size) FROM groups").fetchone()
    copies = max(0, -(-rollouts // rollouts_of_one) - 1)
    run("BEGIN")
    for copy in range(1, copies + 1):
        at = {
            "g": groups_of_one * copy,
            "r": rollouts_of_one * copy,
            "v": groups_of_one // 64 * copy,
        }
        of_original = {"groups": groups_of_one, "rollouts": rollouts_of_one}
        run(
            "INSERT INTO groups SELECT id + :g, seq + :g, time + :g, environment, size, first + :r, n_bytes, body FROM groups "
            "WHERE id <= :groups",
            at | of_original,
        )
        run(
            f"INSERT INTO rollouts SELECT id + :r, {_COPIED}, oldest + :v, newest + :v, finish_reason, "
            "drift * (0.5 + abs(random() % 1000) / 1000.0), trained_version + :v, preview FROM rollouts WHERE id <= :rollouts",
            at | of_original,
        )
        run(
            f"INSERT INTO texts SELECT id + :r, replace(text, '{NEEDLE}', '') FROM texts WHERE id <= :rollouts",
            {"r": at["r"]} | of_original,
        )
        run(
            "INSERT INTO trained SELECT id + :r, weight_version + :v, trained, logprobs, entropies, advantages FROM trained "
            "WHERE id <= :rollouts",
            {"r": at["r"], "v": at["v"]} | of_original,
        )
    run("COMMIT")
    (count, held) = run("SELECT sum(size), sum(n_bytes) FROM groups").fetchone()
    connection.close()
    return {"rollouts": count, "counted_bytes": held, "file_bytes": path.stat().st_size}


def forget_cached(path: Path) -> None:
    """Let the system drop what it holds of a file in memory, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
