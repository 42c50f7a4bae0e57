"""Tables and figures of docs/determinism.md out of bench/results/."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.bridge_figures import markdown, sources
from bench.on_off_summary import HEAD, differences, row_of
from bench.results_book import Book, FigureError

COST, PROBE, ON_OFF, PUBLISHED = "deterministic_cost", "determinism_probe", "bi_on_off", "on_off_published"
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
    return statistics.fmean(book.number(COST, f"rollout/{mode}/{load}/{key}/tokens_per_second") for key in rounds)


def cost(book: Book) -> str:
    """Tokens per second with the mode off, in vLLM's own and in ours, and their ratios."""
    rows = []
    for load, text in SAMPLING.items():
        off, theirs, ours = (speed(book, mode, load) for mode in ("off", "vllm", "ours"))
        rows.append([text, _rounded(off), _rounded(theirs), _rounded(ours), f"{theirs / off:.2f}", f"**{ours / off:.2f}**"])
    for step, text in STEPS.items():
        off, ours = (book.number(COST, f"step/{mode}/{step}/tokens_per_second") for mode in ("off", "ours"))
        rows.append([text, _rounded(off), "", _rounded(ours), "", f"**{ours / off:.2f}**"])
    head = ["Qwen3-1.7B shape, tokens per second (mean of three rounds)", "off", "vLLM's own mode", "ours"]
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
                row["tokens_per_second"] for key, row in book.get(COST, f"rollout/{mode}/{load}").items() if "round" in key
            ]
            apart = max(apart, max(found) / min(found) - 1)
    return f"up to {100 * apart:.0f} %"


def kernels(mode: str, of: str = "") -> Callable[[Book], str]:
    """Milliseconds that the kernels of one step of one sequence take; `of`: those whose name holds that alone."""

    def found(book: Book) -> str:
        row = book.get(COST, f"kernels/1 sequence/{mode}")
        book.measured(COST, f"kernels/1 sequence/{mode}")
        seconds = sum(kernel[2] for kernel in row["kernels"] if of in kernel[0]) if of else row["busy_seconds"]
        return f"{seconds / row['steps'] * 1e3:.2f} ms"

    return found


def parity_total(book: Book) -> str:
    """Millions of compared tokens of all matrices. Raises FigureError if one of them differed."""
    totals = {key: row for key, row in book.get("parity_matrix", "totals").items() if key != "control"}
    for key in totals:
        book.measured("parity_matrix", f"totals/{key}")
    if any(row["mismatched"] for row in totals.values()):
        raise FigureError("parity_matrix.json: tokens differ, so no document may say that none does")
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


def preemptions(book: Book) -> str:
    """How many preemptions the 0.6B matrix saw with the mode on."""
    return str(sum(row["preemptions"] for _, _, row in cells(book, "qwen3-0.6b") if not row["mismatched"]))


def over_broadcast(book: Book) -> str:
    """Tokens of the matrix on two GPUs that were sampled after updates over broadcast."""
    found = cells(book, "qwen3-0.6b, single copy and broadcast, two GPUs")
    return f"{sum(row['tokens'] for bridge, _, row in found if bridge == 'broadcast' and not row['mismatched']):,}"


def rewards(mode: str) -> Callable[[Book], str]:
    """Mean reward of the last ten steps over the seeds: `0.792 ± 0.076 … (0.787, 0.870, 0.719)` without the words."""

    def found(book: Book) -> str:
        runs = {key: row for key, row in book.get(ON_OFF, "runs").items() if row["mode"] == mode}
        for key in runs:
            book.measured(ON_OFF, f"runs/{key}")
        last = [statistics.fmean(row["reward_mean"][-10:]) for row in runs.values()]
        each = ", ".join(f"{value:.3f}" for value in last)
        return f"{statistics.fmean(last):.3f} ± {statistics.stdev(last):.3f} with the mode {mode} ({each})"

    return found


def tokens_off(book: Book) -> str:
    """With the mode off: `1,068,243 of 1,068,401`."""
    runs = [row for row in book.get(ON_OFF, "runs").values() if row["mode"] == "off"]
    return f"{sum(sum(row['mismatched_tokens']) for row in runs):,} of {sum(sum(row['compared_tokens']) for row in runs):,}"


def on_off_table(book: Book) -> str:
    """The published study's runs, one row each, and by how much the mode changes the last ten steps."""
    if not book.has(PUBLISHED):
        return "Not measured yet."
    page = book.page(PUBLISHED)
    runs: dict[str, dict[str, Any]] = page["runs"]
    for name, run in runs.items():
        book.measured(PUBLISHED, f"runs/{name}")
        if run["failed"] or run["steps"] != page["steps"]:
            raise FigureError(f"{PUBLISHED}.json runs/{name}: not a whole run: {run['failed'] or run['steps']}")
    text = markdown(HEAD, [row_of(run) for run in runs.values()])
    machine = page["machine"]
    where = f"{machine['gpus'][0]}, torch {machine['torch']}, vLLM {machine['vllm']}" if machine["gpus"] else "On a CPU"
    return "\n\n".join(
        [
            text,
            *differences(list(runs.values())),
            f"{where}. {sources(book, {name: (PUBLISHED, f'runs/{name}') for name in runs})}",
        ]
    )


def worst_gradient(kind: str) -> Callable[[Book], str]:
    """The largest relative error of an operation's gradients against float64: `bf16` or `float32`."""

    def found(book: Book) -> str:
        worst = 0.0
        for name, row in book.get("deterministic_trainer", "checks").items():
            if not row["passed"]:
                raise FigureError(f"deterministic_trainer.json: {name!r} did not pass")
            if name.startswith("float64:") and kind in name:
                worst = max(worst, *map(float, re.findall(r"\d\.\de-\d\d", row["seen"])))
        return f"{worst:.1e}".replace("e-0", "e-")

    return found


def probe_rows(part: str, *names: str) -> Callable[[Book], str]:
    """How many rows of a part were compared, in all or of these names; raises FigureError if one differs."""

    def found(book: Book) -> str:
        rows = {key: row for key, row in book.get(PROBE, part).items() if not names or key in names}
        compared = {k: r for k, r in rows.items() if isinstance(r, dict) and "differ" in r and "splits free" not in k}
        if any(row["differ"] for row in compared.values()):
            raise FigureError(f"determinism_probe.json {part}: rows differ")
        return f"{sum(row['rows'] for row in compared.values()):,}"

    return found


def triton_slower(book: Book) -> str:
    """How many times as long as the pinned library vLLM's Triton kernel takes: `1.3 to 6.4`."""
    times = book.get(PROBE, "linear, microseconds")
    found = []
    for name, row in times.items():
        if isinstance(row, dict) and name.endswith(" triton"):
            pinned = times[name.replace(" triton", " pinned")]
            found += [value / pinned[size] for size, value in row.items() if size in pinned]
    return f"{min(found):.1f} to {max(found):.1f}"


def pinned_slower(book: Book) -> str:
    """Where pinning costs more than a tenth: `0.6b o at 2 rows 12.7 for 8.1 µs, …`."""
    times = book.get(PROBE, "linear, microseconds")
    found = []
    for name, row in times.items():
        if isinstance(row, dict) and name.endswith(" as it comes"):
            layer = name.removesuffix(" as it comes")
            pinned = times[f"{layer} pinned"]
            slow = {size: (pinned[size], value) for size, value in row.items() if pinned[size] > 1.1 * value}
            if slow:
                each = ", ".join(f"{size} ({pair[0]:.1f} for {pair[1]:.1f} µs)" for size, pair in slow.items())
                found.append(f"`{layer}` at {each}")
    return "; ".join(found)


NAMED: dict[str, Callable[[Book], str]] = {
    "cost": cost,
    "cost_ours": ratios("ours"),
    "cost_vllm": ratios("vllm"),
    "rounds_apart": rounds_apart,
    "kernels_ours": kernels("ours"),
    "kernels_off": kernels("off"),
    "kernels_vllm": kernels("vllm"),
    "kernels_vllm_product": kernels("vllm", "matmul_kernel_persistent"),
    "parity_total": parity_total,
    "control_difference": control_difference,
    "preemptions": preemptions,
    "over_broadcast": over_broadcast,
    "rewards_on": rewards("on"),
    "rewards_off": rewards("off"),
    "tokens_off": tokens_off,
    "on_off_published": on_off_table,
    "worst_gradient_bf16": worst_gradient("bf16"),
    "worst_gradient_float32": worst_gradient("float32"),
    "probe_attention_rows": probe_rows("attention, heads of 128"),
    "triton_slower": triton_slower,
    "pinned_slower": pinned_slower,
}
