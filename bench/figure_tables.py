"""Tables and figures that stand in documents by a name, and passages that need no source.

Most are templates. A function computes what is not one value of one file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.gpu.shapes import SHAPES
from bench.results_book import Book, FigureError, Table, commit_of, filled, markdown, sources
from studies.bitwise.summary import differences
from studies.learning.plan import CHAPTERS, MIXTURES, Variant, shown_in
from studies.learning.summary import COLUMNS, HEADS, variant_rows
from tests.environments.public.cases import CASES, NOT_RUN

MEDIAN_AND_MOST = "{ROW/KEY/median? @ms} ms ({ROW/KEY/max? @ms})"
LOADS = {"idle": "idle", "load_64": "64 requests in flight", "load_256": "256"}
COST_LOADS = {
    "1 sequence": "sampling, 1 sequence",
    "1 sequence, seeded": "1 sequence, seeded",
    "256 sequences": "256 sequences",
    "256 sequences, seeded": "256 sequences, seeded",
    "256 sequences, long prompts": "256 sequences, prompts of 800 tokens",
}
TIMES_SLOWER = {"1.7B": 1.0, "32B": 32.8 / 1.72}
"""Generation time relative to the simulated model. The ratio of parameters is assumed."""
FEWER = "ours, fewer ahead"
"""Our part of a whole run with fewer groups on their way."""
SHOWN_CHAPTERS = ("staleness", "corrections_4", "damping_4", "losses_2x2", "arithmetic")
SHOWN_COLUMNS = [heading for heading in COLUMNS if heading != "solved before"]
NOT_YET = "Not measured yet: there is no `bench/results/learning.json`."
COMMANDS = {"serve": "training", "process": "`process`", "evaluate": "evaluation"}
VERDICTS = {"same": "same", "differs": "differs", "nothing": "nothing to compare"}


def spread(key: str) -> str:
    """Return the template of a median, with the largest value in brackets."""
    return MEDIAN_AND_MOST.replace("KEY", key)


def template(file: str, text: str) -> Callable[[Book], str]:
    """Return a figure that a template of one file makes."""
    return lambda book: filled(book, file, text)


UPDATES = Table(
    "weight_sync_qwen3-1.7b",
    {
        "direct": "bridge/direct",
        "overlapped": "bridge/overlapped",
        "vLLM's own NCCL engine": "vllm_engine",
    },
    {
        **{
            f"**the trainer waits for an update**, {text}": spread(f"{load}/whole_update_ms")
            for load, text in LOADS.items()
        },
        **{
            f"**longest gap between two tokens at a client**, at an update, {text}": spread(
                f"{load}/largest_gap_per_update_ms"
            )
            for load, text in LOADS.items()
            if load != "idle"
        },
        **{
            f"the engine pauses, {text}": spread(f"{load}/halted_ms")
            for load, text in LOADS.items()
        },
        "first byte to verified, idle; vLLM's engine does not verify": (
            "{ROW/idle/first_byte_to_verified_ms/median @ms} ms ({ROW/idle/gb_per_s @.0f} GB/s)"
        ),
    },
    "Medians, in brackets the largest of {bridge/direct/idle/updates @.0f}; medians of the gaps "
    "without an update: {min:bridge/*/load_64/usual_gap_ms/median @.0f} to "
    "{vllm_engine/load_256/usual_gap_ms/median @.0f} ms. {sources}",
    across=True,
    corner="Qwen3-1.7B shape, {bridge/direct/connect, recompute/params_mapped @d}/"
    "{bridge/direct/connect, recompute/params_total @d} parameters, {model_bytes @*1e-9 .2f} GB",
)
TRAINER_SPEED = Table(
    "trainer_speed",
    {
        name: f"cases/{name}"
        for name in (
            "14B, 4k, FSDP2 over two GPUs",
            *(
                f"1.7B, {length}{kind}"
                for length in ("512", "4k", "32k")
                for kind in ("", ", plain PyTorch, layers compiled", ", deterministic")
            ),
            "1.7B, groups of 8, prompt shared",
            "1.7B, groups of 8, prompt repeated",
            "8B, one GPU, offloaded",
        )
    },
    {
        "tokens/s, forward and backward": "{ROW/pass/forwarded_tokens_per_second @,.0f}",
        "of sequences": "{ROW/pass/sequence_tokens_per_second @,.0f}",
        "share of 790 TFLOP/s": "{ROW/pass/mfu @.2f}",
        "with the optimizer, tokens/s": "{ROW/step/forwarded_tokens_per_second? @,.0f}",
        "GPU memory": "{ROW/pass/peak_bytes @*1e-9 .0f} GB",
    },
    "{dates}",
)
MEMORY_PLAN = Table(
    "memory_plan",
    {f"`{{results/{number}/configuration/name @s}}`": f"results/{number}" for number in range(9)},
    {
        "planned": "{ROW/planned/greatest @*1e-9 .1f} GB",
        "used": "{ROW/allocated/greatest @*1e-9 .1f} GB",
        "planned ÷ used": "{ROW/planned/greatest ÷ ROW/allocated/greatest @.3f}",
    },
    "{dates}",
    corner="training",
)
WHOLE_RUN = Table(
    "whole_run",
    {
        "ours, {ROW/ahead @d} batches ahead": "parts/ours",
        "TRL, asynchronous GRPO": "parts/trl",
        "ours, {ROW/ahead @d} batches ahead ": f"parts/{FEWER}",
        "ours, deterministic, {ROW/ahead @d} batches ahead": "parts/deterministic",
    },
    {
        "longest gap of a client": "{ROW/longest_gap_seconds @.2f} s",
        "trained tokens/s": "{ROW/trained_tokens_per_second @,.0f}",
        "trainer waits": "{ROW/waiting_share @.0%}",
        "samples thrown away": "{ROW/samples_thrown_away @,}",
        "of so many trained": "{ROW/sequences @,}",
        **{
            f"{text}, s a step": f"{{ROW/seconds_by_phase/{phase}? ÷ ROW/steps @.1f}}"
            for phase, text in {
                "wait": "waits", "pack": "packs", "train": "trains", "sync": "hands over",
            }.items()
        },
    },
    "A batch has {settings/sequences ÷ settings/group @.0f} groups. {dates}",
)  # fmt: skip
SINGLE_COPY = {
    "**the trainer waits for an update**, idle": spread("idle/whole_update_ms"),
    "**the same**, 64 requests in flight": spread("load_64/whole_update_ms"),
    "**longest gap at a client**, 64": spread("load_64/largest_gap_per_update_ms"),
    "of it the write, idle · 64": (
        "{idle/write_ms/median @ms} ms · {load_64/write_ms/median @ms} ms"
    ),
    "pause beyond the write, idle": spread("idle/pause_beyond_write_ms"),
    "parameters mapped; bytes moved by an update": (
        "{one_copy/params_mapped @d}/{one_copy/params_total @d}; "
        "{one_copy/bytes_moved_by_an_update @d}"
    ),
    "GPU memory freed on the first GPU when the trainer joins": (
        "{one_copy/gpu_bytes_freed_by_joining @*1e-6 ,.0f} MB, its own copy's "
        "{one_copy/model_bytes @*1e-6 ,.0f}"
    ),
}
ASYNC_MODES = Table(
    "async",
    {
        "in turns": "modes_gpu/regimes/turns",
        "overlapped": "modes_gpu/regimes/overlapped",
        **{f"off-policy by {n}": f"modes_gpu/regimes/off_policy_{n}" for n in (1, 2, 4)},
    },
    {
        "seconds a step": "{ROW/seconds_a_step @.2f}",
        "sampled tokens/s": "{ROW/sampled_tokens_per_second @,.0f}",
        "trainer trains": "{ROW/share_of_time/trainer/train @.0%}",
        "waits": "{ROW/share_of_time/trainer/wait @.0%}",
        "hands over": "{ROW/share_of_time/trainer/sync? @.0%}",
        "vLLM generates": "{ROW/share_of_time/generator/generating @.0%}",
        "stands still": "{ROW/share_of_time/generator/halted? @.0%}",
        "age, mean and most": "{ROW/age_mean @.1f}, {ROW/age_max @d}",
        "reward at the end": "{ROW/reward_last @.2f}",
    },
    "Means over {modes_gpu/settings/steps @d} steps of {modes_gpu/settings/sequences @d} answers "
    "without the first {modes_gpu/settings/leave_out @d}; the reward of the last fifth, between -1 "
    "and 1. {sources} The machine's load before it: {modes_gpu/load_average_before/0 @.1f}.",
)
SAMPLING_COST = Table(
    "generate_cost",
    {
        "`/generate`, numbers alone (what environments ask for)": "ways/numbers",
        "`/generate`, text and tables of logprobs": "ways/text and tables",
        "vLLM's `/v1/completions` with token ids": "ways/vLLM completions",
        "`/generate`, numbers alone, the worker in a process of its own": (
            "ways/numbers, worker apart"
        ),
    },
    {
        "tokens/s": "{ROW/tokens_per_second @,.0f}",
        "front end, µs a token": "{ROW/front_end_us_per_token @.1f}",
        "engine process, µs a token": "{ROW/engine_us_per_token @.1f}",
    },
)
SERVICE_RATES = Table(
    "rollout_api_load",
    {"Atropos' public server": "load/medians/public", "ours": "load/medians/ours"},
    {
        "groups posted per second": "{ROW/posted @.0f}",
        "groups drained per second": "{ROW/drained @.0f}",
        "a post, median": "{ROW/p50 @.0f} ms",
        "a post, p99": "{ROW/p99 @.0f} ms",
        "the server's processor time for a group": "{ROW/cpu_ms_per_group @.1f} ms",
    },
    "Medians of {count:load/runs/ours/*/posted @d} rounds, {load/clients @d} clients, two cores. "
    "{sources}",
    across=True,
)
CALCULATOR = Table(
    "calculator",
    {
        "seed 0": "seed 0",
        "seed 0, learning rate 0": "seed 0 flat",
        "seed 1": "seed 1",
        "seed 2": "seed 2",
    },
    {
        "solved before": "{ROW/eval_before @.1%}",
        "after": "{ROW/eval_after @.1%}",
        "used the tool before": "{ROW/tool_use_before @.1%}",
        "after ": "{ROW/tool_use_after @.1%}",
        "steps": "{ROW/steps @d}",
        "run": "{ROW/seconds @minutes}",
    },
    "Shares of {max:*/eval_problems @d} held-out problems, answered greedily, on two cores. "
    "{sources}",
)
COST_COLUMNS = {
    "off": "{mean:rollout/off/ROW/*/tokens_per_second @three digits}",
    "vLLM's own mode": "{mean:rollout/vllm/ROW/*/tokens_per_second @three digits}",
    "ours": "{mean:rollout/ours/ROW/*/tokens_per_second @three digits}",
    "its ÷ off": "{mean:rollout/vllm/ROW/*/tokens_per_second ÷ "
    "mean:rollout/off/ROW/*/tokens_per_second @.2f}",
    "ours ÷ off": "**{mean:rollout/ours/ROW/*/tokens_per_second ÷ "
    "mean:rollout/off/ROW/*/tokens_per_second @.2f}**",
}
COST = Table(
    "deterministic_cost",
    {text: load for load, text in COST_LOADS.items()},
    COST_COLUMNS,
    "",
    corner="Qwen3-1.7B shape, tokens per second (mean of three rounds)",
)
COST_OF_STEPS = Table(
    "deterministic_cost",
    {
        "16 sequences of 512 to 1,024 tokens": "16 x 512 to 1024",
        "4 of 3,000 to 4,000": "4 x 3000 to 4000",
    },
    {
        "off": "{step/off/ROW/tokens_per_second @three digits}",
        "ours": "{step/ours/ROW/tokens_per_second @three digits}",
        "ours ÷ off": "**{step/ours/ROW/tokens_per_second ÷ step/off/ROW/tokens_per_second @.2f}**",
    },
    place="step/ours/ROW",
    corner="the trainer's step, tokens per second",
)
QUICK_START = """```
{seed 0/eval_problems @d} held-out problems, greedy      before    after
solved                              {seed 0/eval_before @>5.1%}{seed 0/eval_after @>9.1%}
mean response length (tokens)     {seed 0/response_length_before @>7.1f}{seed 0/response_length_after @>9.1f}

optimizer steps                   {seed 0/steps @>7d}
weight updates of vLLM ({seed 0/bridge @s}){seed 0/weight_updates @>7d}
parameters mapped                   {seed 0/params_mapped @d}/{seed 0/params_total @d}
train                          {seed 0/seconds_train @minutes}
```"""
QUICK_START_RANGE = (
    "All {count:*/eval_after @d} runs on {max:*/machine/cpus @d} cores, at a load of "
    "{min:*/load/mean @.0f} to {max:*/load/mean @.0f}, ended between {min:*/eval_after @.1%} and "
    "{max:*/eval_after @.1%}"
)
_SAVED = "cases/1.7B, 512, with a checkpoint/checkpoint"
CHECKPOINT_COST = (
    f"{{{_SAVED}/bytes @*1e-9 .0f}} GB took {{{_SAVED}/complete_seconds @.0f}} s. The slowest step "
    f"took {{max:{_SAVED}/step_seconds_after/* @.2f}} s while the thread wrote, and "
    f"{{max:{_SAVED}/step_seconds_before/* @.2f}} s before"
)
_LONGEST = "longest/1.7B, one sequence of 128k/pass"
LONGEST = (
    f"128k tokens forward and backward in {{{_LONGEST}/seconds @.1f}} s, with "
    f"{{{_LONGEST}/peak_bytes @*1e-9 .0f}} GB"
)
SERVICE_KILLS = (
    "{clients @,.0f} clients for {minutes @,.0f} minutes with {kills @,.0f} `kill -9` and restarts: "
    "{groups @,.0f} groups in {batches @,.0f} batches, {lost @.0f} lost, {doubled @.0f} doubled, "
    "{changed @.0f} changed."
)


def speed(book: Book, mode: str, load: str) -> float:
    """Return the tokens per second of a load, the mean of all rounds."""
    rate: float = book.value(
        "deterministic_cost", f"mean:rollout/{mode}/{load}/*/tokens_per_second"
    )
    return rate


def ratios(mode: str, book: Book) -> str:
    """Return the least and the largest share of vLLM's usual speed: `0.92 to 1.05`."""
    shares = [speed(book, mode, load) / speed(book, "off", load) for load in COST_LOADS]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def rounds_apart(book: Book) -> str:
    """Return by how much rounds of one mode differ at most: `up to 24 %` of the slower one."""
    rounds = [
        book.values("deterministic_cost", f"rollout/{mode}/{load}/*/tokens_per_second")
        for mode in ("off", "vllm", "ours")
        for load in COST_LOADS
    ]
    return f"up to {100 * max(max(rates) / min(rates) - 1 for rates in rounds):.0f} %"


def parity_total(book: Book) -> str:
    """Return millions of compared tokens of all matrices. Raises FigureError if one differed."""
    kinds = [kind for kind in book.get("parity_matrix", "totals") if kind != "control"]
    rows = book.values("parity_matrix", "totals/*")
    if sum(row["mismatched"] > 0 for row in rows) > len(rows) - len(kinds):
        raise FigureError(
            "parity_matrix.json: tokens differ, so no document may claim that none does"
        )
    tokens = [book.number("parity_matrix", f"totals/{kind}/tokens") for kind in kinds]
    return f"{sum(tokens) / 1e6:.1f}"


def mismatched_rows(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every comparison below a node of parity_matrix.json in which tokens differed."""
    if isinstance(node, dict):
        if node.get("mismatched"):
            yield node
        for inner in node.values():
            yield from mismatched_rows(inner)


def control_difference(book: Book) -> str:
    """Return the largest difference of a logprob with the mode off."""
    rows = mismatched_rows(book.get("parity_matrix", "qwen3-0.6b"))
    return f"{max(row['max_difference'] for row in rows):.2f}"


def on_off_published(book: Book) -> str:
    """Return the published study's difference of rewards, and the tokens that differed.

    Raises:
        FigureError: a run did not end as planned.
    """
    name = "on_off_published"
    page, places = book.page(name), {}
    runs: dict[str, dict[str, Any]] = page["runs"]
    for run_name, run in runs.items():
        places[run_name] = (name, f"runs/{run_name}")
        if run["failed"] or run["steps"] != page["steps"]:
            raise FigureError(
                f"{name}.json runs/{run_name}: not a whole run: {run['failed'] or run['steps']}"
            )
    counts = {
        (mode, key): sum(sum(run[key]) for run in runs.values() if run["mode"] == mode)
        for mode in ("on", "off")
        for key in ("mismatched_tokens", "compared_tokens")
    }
    tokens = "; ".join(
        f"with the mode {mode} {counts[mode, 'mismatched_tokens']:,} of "
        f"{counts[mode, 'compared_tokens']:,} tokens differed"
        for mode in ("on", "off")
    )
    machine = page["machine"]
    where = f"{', '.join(machine['gpus'][:1])}, torch {machine['torch']}, vLLM {machine['vllm']}"
    return "\n\n".join(
        [
            *differences(list(runs.values())),
            f"In these {len(runs)} runs, {tokens}.",
            f"{where}. {sources(book, places)}",
        ]
    )


def generation_in_all(book: Book) -> str:
    """Return the mean ratio over all settings and runs, and its standard error: `0.99 ± 0.02`."""
    files = sorted(
        path.stem for path in book.folder.glob("weight_sync_qwen3-1.7b_throughput_*.json")
    )
    found = [ratio for file in files for ratio in book.values(file, "throughput/*/ratio")]
    return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found) / math.sqrt(len(found)):.2f}"


def single_copy(book: Book) -> str:
    """Return the table of a single copy, of one rank and of two."""
    files = {
        "Qwen3-1.7B shape, one rank": "single_copy",
        "Qwen2.5-14B shape, two ranks of each": "single_copy_qwen2.5-14b",
    }
    rows = [
        [text, *(filled(book, file, cell.replace("ROW/", "")) for file in files.values())]
        for text, cell in SINGLE_COPY.items()
    ]
    places = {text: (file, "load_64") for text, file in files.items()}
    note = filled(book, "single_copy", "Medians, in brackets the largest of {idle/updates @.0f}.")
    return f"{markdown(['', *files], rows)}\n\n{note} {sources(book, places)}"


def async_exact(book: Book) -> str:
    """Return what a run on Ray that was killed had in common with the run without a kill.

    Raises:
        FigureError: it had not all in common.
    """
    texts = set()
    for kind, found in book.get("async", "exact").items():
        whole, killed = found["runs"]["whole"], found["runs"]["killed"]
        if any(whole[key] != killed[key] for key in ("steps", "weights")):
            raise FigureError(f"async.json, exact, {kind}: the killed run differs")
        compared, differ = (sum(step[place] for step in whole["steps"]) for place in (3, 4))
        if differ:
            raise FigureError(f"async.json, exact, {kind}: {differ} tokens differ")
        texts.add(
            f"with one copy and with a broadcast, killed after step {killed['killed_after_step']} "
            f"of {len(whole['steps'])}. None of {compared:,} tokens differs"
        )
    (text,) = texts
    return text


def async_full_at(book: Book) -> str:
    """Return how many generators fill one service, as in `70 of 1.7B, 1,300 of 32B`."""
    one = book.get("async", "scaling/settings/simulated")
    rates = book.values("async", "scaling/generators/*/groups_per_second")
    rates.append(book.value("async", "scaling/saturation/service/trained_groups_per_second"))
    full = max(rates) * one["group"] * one["tokens"] / one["tokens_per_second"]
    return ", ".join(f"{full * slower:,.0f} of {size}" for size, slower in TIMES_SLOWER.items())


def lengths(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean tokens of an answer that may end at each of its tokens, and of the longest
    of a group, under a cap.

    Args:
        settings: of whole_run.json.
    """
    stay = 1 - settings["end_tokens"] / SHAPES[settings["shape"]]["vocab_size"]
    shorter = [1 - stay**tokens for tokens in range(settings["cap"])]
    longest = sum(1 - share ** settings["group"] for share in shorter)
    return sum(1 - share for share in shorter), longest


def whole_run_bound(book: Book) -> str:
    """Return why the trainer of a whole run waits: the rates of its server and its answers."""
    part, settings = book.value("whole_run", f"parts/{FEWER}"), book.get("whole_run", "settings")
    phases = part["seconds_by_phase"]
    ways = ("numbers", "text and tables")
    gives = max(book.number("generate_cost", f"ways/{way}/tokens_per_second") for way in ways)
    mean, longest = lengths(settings)
    return (
        "The server limits the run: the trainer takes "
        f"{part['trained_tokens'] / (phases['train'] + phases['sync']):,.0f} tokens in each second "
        f"that it does not wait, and `/generate` gives {gives:,.0f} at best. Here it gave "
        f"{part['trained_tokens_per_second']:,.0f}. The server samples "
        f"{settings['in_flight'] * mean / longest:,.0f} of {settings['in_flight']} answers in open "
        "groups at a time, because finished answers wait for the longest of their group"
    )


def trainings_table(file: str, variants: Sequence[Variant], book: Book) -> str:
    """Return a table of trainings, mean ± deviation over the seeds, and the days of their runs.

    Args:
        variants: a row each, if it was trained.
    """
    names = {variant.name for variant in variants}
    runs = {
        name: run
        for name, run in book.get(file, "runs").items()
        if run["variant"] in names and run["status"] != "failed"
    }
    rows = []
    for variant in variants:
        wrong = sum(
            bool(run["diverged"]) for run in runs.values() if run["variant"] == variant.name
        )
        for row in variant_rows(runs, [(variant.name, variant.label)]):
            cells = dict(zip(HEADS, row, strict=True))
            shown = [cells[heading] for heading in SHOWN_COLUMNS]
            rows.append([variant.label, *shown, f"{wrong} of {cells['runs']}"])
    days = sorted(book.measured(file, f"runs/{name}")["date"].split()[0] for name in runs)
    measured = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    return f"{markdown(['', *SHOWN_COLUMNS, 'diverged'], rows)}\n\nMeasured {measured}."


def learning_chapter(chapter: str, book: Book) -> str:
    """Return a chapter's picture and table: its variants and what they are compared with."""
    if not book.has("learning"):
        return NOT_YET
    picture = f"![{CHAPTERS[chapter][0]}](images/learning_{chapter}.png)"
    return f"{picture}\n\n{trainings_table('learning', shown_in(chapter), book)}"


def moe_learning(book: Book) -> str:
    """Return the table of the trainings of a mixture, and how many are not measured yet."""
    file = "moe_learning_vllm033"
    text = trainings_table(file, [*MIXTURES.values()], book)
    return f"{text}{_missing(book, file)}"


def _missing(book: Book, file: str) -> str:
    """Return how many trainings are still to be run; empty if all are there."""
    missing = len(book.page(file).get("missing", ()))
    ended = sum(run["status"] != "failed" for run in book.get(file, "runs").values())
    return f" {missing} of {missing + ended} trainings are still to be run." if missing else ""


def learning_divergences(book: Book) -> str:
    """Return how many trainings diverged, of how many."""
    if not book.has("learning"):
        return NOT_YET
    ended = [run for run in book.get("learning", "runs").values() if run["status"] != "failed"]
    text = f"{sum(bool(run['diverged']) for run in ended)} of {len(ended)} trainings diverged."
    return f"{text}{_missing(book, 'learning')}"


def their_environments(book: Book) -> str:
    """Return how many files ran with both SDKs, with equal results by command, and a row for each
    other file.
    """
    cases = book.get("their_environments", "cases")
    runs = [cases[case.name] for case in CASES if case.name in cases]
    files = {row["file"] for row in runs if row["verdict"] != "nothing"}
    same = [row for row in runs if row["verdict"] == "same"]
    groups, sequences = (sum(row[name][1] for row in same) for name in ("groups", "sequences"))
    days = sorted(row["measured"]["date"].split()[0] for row in runs)
    commits = sorted({commit_of(row["measured"]) for row in runs})
    commands = ", ".join(
        f"{sum(row['command'] == command for row in same)} {title}"
        for command, title in COMMANDS.items()
    )
    total = (
        f"{len(files)} files in {len(runs)} runs, {len(same)} of them the same number for number "
        f"({commands}; {groups} groups, {sequences} sequences). "
        f"Run on {days[-1]}, {', '.join(commits)}. The others:"
    )
    other = [
        [row["file"], f"{VERDICTS[row['verdict']]}: {row['why']}"]
        for row in runs
        if row["verdict"] != "same"
    ]
    other += [[file, f"runs with neither: {why}"] for file, why in NOT_RUN.items()]
    rows = [[f"`{file.removeprefix('environments/')}`", text] for file, text in other]
    return f"{total}\n\n{markdown(['file', 'public and ours'], rows)}"


NAMED: dict[str, Callable[[Book], str]] = {
    "async_modes_gpu": ASYNC_MODES,
    "async_full_at": async_full_at,
    "async_exact": async_exact,
    "memory_plan": MEMORY_PLAN,
    "updates_1.7b": UPDATES,
    "generation_in_all": generation_in_all,
    "single_copy": single_copy,
    "cost": lambda book: f"{COST(book)}\n\n{COST_OF_STEPS(book)}",
    "cost_ours": partial(ratios, "ours"),
    "cost_vllm": partial(ratios, "vllm"),
    "rounds_apart": rounds_apart,
    "parity_total": parity_total,
    "control_difference": control_difference,
    "on_off_published": on_off_published,
    **{f"learning_{chapter}": partial(learning_chapter, chapter) for chapter in SHOWN_CHAPTERS},
    "learning_divergences": learning_divergences,
    "moe_learning": moe_learning,
    "quickstart_table": template("quick_starts", QUICK_START),
    "quick_start_range": template("quick_starts", QUICK_START_RANGE),
    "calculator_table": CALCULATOR,
    "trainer_speed": TRAINER_SPEED,
    "checkpoint_cost": template("trainer_speed", CHECKPOINT_COST),
    "longest_sequence": template("trainer_speed", LONGEST),
    "whole_run": WHOLE_RUN,
    "whole_run_bound": whole_run_bound,
    "sampling_cost": SAMPLING_COST,
    "their_environments": their_environments,
    "service_rates": SERVICE_RATES,
    "service_kills": template("service_kills", SERVICE_KILLS),
}
"""Figures by the name that stands in the documents."""

ELSEWHERE: dict[str, dict[str, str]] = {
    "docs/files.md": {
        "up to 1 GiB or 1,000,000": "MAX_BYTES and MAX_ROLLOUTS of atroposlib/dashboard/rollouts/archive.py",
    },
    "docs/inference-servers.md": {
        "`--max-body-bytes` (16 MiB)": "the default of that option",
    },
    "docs/memory.md": {
        "It gets at most 32,768, because": "the largest of BUDGETS in example_trainer/training/memory_plan.py",
        "16 bytes for each parameter at 50 GB/s": "BUS_BYTES_PER_SECOND in example_trainer/training/memory_choice.py",
        "leaves 8 % of the memory free": "_PLANNED_SHARE in example_trainer/training/memory_plan.py",
    },
    "docs/operations.md": {
        "128 MiB; bodies up to 64 KiB never wait": "SMALL_BUDGET and TINY_BODY in atroposlib/web/middleware.py",
        "20 × `--max-body-bytes` + 256 MiB": "MEMORY_PER_BYTE and MEMORY_BESIDES in atroposlib/service/group_reader.py",
        "of more than 1 MiB in work at the managed-server proxy | 256 MiB": "MAX_BODIES in atroposlib/inference/proxy.py",
        "64 MiB for each file": "MAX_KEPT_BYTES in atroposlib/utils/files.py",
        "1 MiB for each file": "MAX_WAITING_BYTES in atroposlib/dashboard/live/monitor.py",
        "64 MiB, and 16 MiB more that no post may use up": "RESERVE_BYTES and SLACK_BYTES in atroposlib/service",
        "body of a request without the key, such as a sign-in | 64 KiB": "TINY_BODY in atroposlib/web/middleware.py",
        "body of a request with the key that holds no groups | 1 MiB": "MAX_SMALL_BODY in atroposlib/web/middleware.py",
        "vLLM server or the parameter server | 256 MiB": "MOST_BODY in vllm_api_server.py and parameter_server/receiving.py",
        "process that reads bodies from 1 MiB on": "IN_A_PROCESS_FROM in atroposlib/service/group_reader.py",
        "gzip bodies of more than 1 MiB as they arrive": "SMALL_BODY in atroposlib/web/middleware.py",
        "of more than 1 MiB after decompression | 2 × `--max-body-bytes` (512 MiB)": "Budgets, atroposlib/web/middleware.py",
    },
    "docs/sandbox.md": {
        "512 MiB of addresses for each process, and 512 MiB for all together": "a default of atroposlib/sandbox/contract.py",
        "temporary folder: 16 MiB (`disk`)": "a default of atroposlib/sandbox/contract.py",
        "pipes: 64 KiB for each descriptor, at most 72 MiB": "Linux's size of a pipe, times the descriptors",
        "10 ms on an idle machine": "LOOK_SECONDS in atroposlib/sandbox/inside/supervisor.py",
        "an empty `/tmp` of 16 MiB and 256 files": "likewise",
        "above 4 MiB the program is ended; what its functions return has 1 MiB": "likewise",
    },
    "docs/several-gpus.md": {
        "gives vLLM 45 % of each GPU": "a flag of Stack in example_trainer/launcher/stack.py",
    },
    "docs/timelines.md": {
        "A file grows to 64 MiB at most": "a limit of vllm_patching/protocol/timeline.py",
    },
    "docs/your-model.md": {
        "which gets 45 % of the card": "a flag of Stack in example_trainer/launcher/stack.py",
    },
    "docs/trainer.md": {
        "packs of 16,384 tokens in sequences of the length that is named": "what bench/trainer_speed.py is asked for",
    },
    "docs/rollout-service.md": {
        "holds 64 MiB of the disk": "RESERVE_BYTES in atroposlib/service/sqlite_store.py",
        "its size and 2 MiB are free": "FIXED_BYTES in atroposlib/service/sqlite_store.py",
        "or falls 256 messages or 8 MiB behind": "limits of atroposlib/dashboard/live/hub.py",
    },
}
"""Document -> passage that is written there word for word -> where its figure comes from, if not
from bench/results/."""
