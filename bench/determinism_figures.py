"""Tables and figures of docs/determinism.md out of bench/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.bridge_figures import markdown, sources
from bench.results_book import Book, FigureError
from studies.bitwise.summary import differences

COST, PUBLISHED = "deterministic_cost", "on_off_published"
SAMPLING = {
    "1 sequence": "sampling, 1 sequence",
    "1 sequence, seeded": "1 sequence, seeded",
    "256 sequences": "256 sequences",
    "256 sequences, seeded": "256 sequences, seeded",
    "256 sequences, long prompts": "256 sequences, prompts of 800 tokens",
}
STEPS = {
    "16 x 512 to 1024": "trainer's step, 16 sequences of 512 to 1,024 tokens",
    "4 x 3000 to 4000": "trainer's step, 4 of 3,000 to 4,000",
}


def speed(book: Book, mode: str, load: str) -> float:
    """Tokens per second, mean of all rounds."""
    rounds = [key for key in book.get(COST, f"rollout/{mode}/{load}") if key.startswith("round")]
    return statistics.fmean(
        book.number(COST, f"rollout/{mode}/{load}/{key}/tokens_per_second") for key in rounds
    )


def cost(book: Book) -> str:
    """Tokens per second with the mode off, in vLLM's own and in ours, and their ratios."""
    rows = []
    for load, text in SAMPLING.items():
        off, theirs, ours = (speed(book, mode, load) for mode in ("off", "vllm", "ours"))
        rows.append(
            [
                text,
                _rounded(off),
                _rounded(theirs),
                _rounded(ours),
                f"{theirs / off:.2f}",
                f"**{ours / off:.2f}**",
            ]
        )
    for step, text in STEPS.items():
        off, ours = (
            book.number(COST, f"step/{mode}/{step}/tokens_per_second") for mode in ("off", "ours")
        )
        rows.append([text, _rounded(off), "", _rounded(ours), "", f"**{ours / off:.2f}**"])
    head = [
        "Qwen3-1.7B shape, tokens per second (mean of three rounds)",
        "off",
        "vLLM's own mode",
        "ours",
    ]
    text = markdown([*head, "its ÷ off", "ours ÷ off"], rows)
    return f"{text}\n\n{sources(book, {'all': (COST, 'rollout/ours/1 sequence/round 1')})}"


def _rounded(value: float) -> str:
    """Three digits: 480, 34,600."""
    step = 10 ** (len(str(int(value))) - 3)
    return f"{round(value / step) * step:,.0f}"


def ratios(mode: str) -> Callable[[Book], str]:
    """The least and the largest share of vLLM's usual speed: `0.92 to 1.05`."""

    def found(book: Book) -> str:
        shares = [speed(book, mode, load) / speed(book, "off", load) for load in SAMPLING]
        return f"{min(shares):.2f} to {max(shares):.2f}"

    return found


def rounds_apart(book: Book) -> str:
    """By how much rounds of one mode differ at most, per cent of the slower: `up to 24 %`."""
    apart = 0.0
    for mode in ("off", "vllm", "ours"):
        for load in SAMPLING:
            found = [
                row["tokens_per_second"]
                for key, row in book.get(COST, f"rollout/{mode}/{load}").items()
                if "round" in key
            ]
            apart = max(apart, max(found) / min(found) - 1)
    return f"up to {100 * apart:.0f} %"


def parity_total(book: Book) -> str:
    """Millions of compared tokens of all matrices. Raises FigureError if one of them differed."""
    totals = {
        key: row for key, row in book.get("parity_matrix", "totals").items() if key != "control"
    }
    for key in totals:
        book.measured("parity_matrix", f"totals/{key}")
    if any(row["mismatched"] for row in totals.values()):
        raise FigureError(
            "parity_matrix.json: tokens differ, so no document may say that none does"
        )
    return f"{sum(row['tokens'] for row in totals.values()) / 1e6:.1f}"


def cells(book: Book, section: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Bridge, name and row of every comparison in a section of parity_matrix.json."""
    for server in book.get("parity_matrix", section).values():
        for bridge, rows in server.items() if isinstance(server, dict) else ():
            for name, row in rows.items() if isinstance(rows, dict) else ():
                if isinstance(row, dict) and "mismatched" in row:
                    yield bridge, name, row


def control_difference(book: Book) -> str:
    """The largest difference of a logprob with the mode off."""
    rows = [row for _, _, row in cells(book, "qwen3-0.6b") if row["mismatched"]]
    return f"{max(row['max_difference'] for row in rows):.2f}"


def on_off_published(book: Book) -> str:
    """Return by how much the mode changes the reward of the published study's last ten steps, and
    the tokens that differed.
    """
    if not book.has(PUBLISHED):
        return "Not measured yet."
    page = book.page(PUBLISHED)
    runs: dict[str, dict[str, Any]] = page["runs"]
    for name, run in runs.items():
        book.measured(PUBLISHED, f"runs/{name}")
        if run["failed"] or run["steps"] != page["steps"]:
            raise FigureError(
                f"{PUBLISHED}.json runs/{name}: not a whole run: {run['failed'] or run['steps']}"
            )
    rows = list(runs.values())
    tokens = "; ".join(
        f"with the mode {mode} "
        f"{sum(sum(run['mismatched_tokens']) for run in rows if run['mode'] == mode):,} of "
        f"{sum(sum(run['compared_tokens']) for run in rows if run['mode'] == mode):,} tokens differed"
        for mode in ("on", "off")
    )
    machine = page["machine"]
    where = (
        f"{machine['gpus'][0]}, torch {machine['torch']}, vLLM {machine['vllm']}"
        if machine["gpus"]
        else "On a CPU"
    )
    return "\n\n".join(
        [
            *differences(rows),
            f"In these {len(rows)} runs, {tokens}.",
            f"{where}. {sources(book, {name: (PUBLISHED, f'runs/{name}') for name in runs})}",
        ]
    )


NAMED: dict[str, Callable[[Book], str]] = {
    "cost": cost,
    "cost_ours": ratios("ours"),
    "cost_vllm": ratios("vllm"),
    "rounds_apart": rounds_apart,
    "parity_total": parity_total,
    "control_difference": control_difference,
    "on_off_published": on_off_published,
}
