"""Tables of the trainer's speed and of what sampling costs, as documents show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.bridge_figures import markdown, sources
from bench.gpu.shapes import SHAPES
from bench.results_book import Book

SPEED, SAMPLING, WHOLE = "trainer_speed", "generate_cost", "whole_run"
FEWER = "ours, fewer ahead"
"""Our part of a whole run with fewer groups on their way."""
SAVED = "1.7B, 512, with a checkpoint"
UNCOMPILED = ", plain PyTorch"
"""End of the names of plain PyTorch's cases without compiled layers, which are slower than those
with them."""


def trainer_speed(book: Book) -> str:
    """Return the measured cases of bench/trainer_speed.py, without those that only other figures
    use.
    """
    head = [
        "", "tokens/s, forward and backward", "of sequences", "share of 790 TFLOP/s", "with the optimizer, tokens/s",
        "GPU memory",
    ]  # fmt: skip
    rows, places = [], {}
    for name in book.get(SPEED, "cases"):
        if name == SAVED or name.endswith(UNCOMPILED):
            continue
        place = f"cases/{name}"
        rate, share = (
            book.number(SPEED, f"{place}/pass/{key}")
            for key in ("forwarded_tokens_per_second", "mfu")
        )
        sequences = book.number(SPEED, f"{place}/pass/sequence_tokens_per_second")
        whole = book.maybe(SPEED, f"{place}/step/forwarded_tokens_per_second")
        peak = book.number(SPEED, f"{place}/pass/peak_bytes")
        step = "" if whole is None else f"{whole:,.0f}"
        rows.append(
            [
                name,
                f"{rate:,.0f}",
                f"{sequences:,.0f}",
                f"{share:.2f}",
                step,
                f"{peak / 1e9:.0f} GB",
            ]
        )
        places[name] = (SPEED, place)
    return f"{markdown(head, rows)}\n\n{_measured(book, places)}"


def _measured(book: Book, places: Mapping[str, tuple[str, str]]) -> str:
    """Return one line with the dates of a table's rows, and the file that has each row's commit."""
    dates = sorted(book.measured(file, path)["date"].split()[0] for file, path in places.values())
    ((file, _), *_) = places.values()
    return f"Measured from {dates[0]} to {dates[-1]}; `bench/results/{file}.json` has each row's commit."


def longest_sequence(book: Book) -> str:
    """Return the longest sequence that trained, its time and its memory."""
    *_, (name, _) = [
        (name, found) for name, found in book.get(SPEED, "longest").items() if "pass" in found
    ]
    book.measured(SPEED, f"longest/{name}")
    seconds, peak = (
        book.number(SPEED, f"longest/{name}/pass/{key}") for key in ("seconds", "peak_bytes")
    )
    return f"{name.split()[-1]} tokens forward and backward in {seconds:.1f} s, with {peak / 1e9:.0f} GB"


def whole_run(book: Book) -> str:
    """Every part of bench/whole_run.py that was measured."""
    head = [
        "",
        "longest gap of a client",
        "trained tokens/s",
        "trainer waits",
        "samples thrown away",
        "of so many trained",
    ]
    head += ["seconds a step"]
    names = {
        "ours": "ours",
        FEWER: "ours",
        "deterministic": "ours, deterministic",
        "trl": "TRL, asynchronous GRPO",
    }
    settings = book.get(WHOLE, "settings")
    rows, places = [], {}
    for part, found in book.get(WHOLE, "parts").items():
        place, gap, name = f"parts/{part}", found["longest_gap_seconds"], names[part]
        if "ahead" in found:
            name += f", {found['ahead'] * settings['sequences'] // settings['group']} groups on their way"
        rate, waits = (
            book.number(WHOLE, f"{place}/{key}")
            for key in ("trained_tokens_per_second", "waiting_share")
        )
        phases = ", ".join(
            f"{phase} {seconds / found['steps']:.1f}"
            for phase, seconds in found["seconds_by_phase"].items()
        )
        rows.append(
            [name, f"{gap:.2f} s", f"{rate:,.0f}", f"{waits:.0%}",
             f"{found['samples_thrown_away']:,}", f"{found['sequences']:,}", phases]
        )  # fmt: skip
        places[name] = (WHOLE, place)
    return f"{markdown(head, rows)}\n\n{_measured(book, places)}"


def whole_run_bound(book: Book) -> str:
    """Why the trainer of our part of a whole run waits: what its server gives at best, and how many
    answers it works on.
    """
    place, settings = f"parts/{FEWER}", book.get(WHOLE, "settings")
    phases, rate = (
        book.get(WHOLE, f"{place}/seconds_by_phase"),
        book.number(WHOLE, f"{place}/trained_tokens_per_second"),
    )
    takes = book.number(WHOLE, f"{place}/trained_tokens") / (phases["train"] + phases["sync"])
    gives = max(
        book.number(SAMPLING, f"ways/{way}/tokens_per_second")
        for way in ("numbers", "text and tables")
    )
    mean, longest = lengths(settings)
    return (
        f"The server limits the run: the trainer takes {takes:,.0f} tokens in each second that it does not wait, and "
        f"`/generate` gives {gives:,.0f} at best. Here it gave {rate:,.0f}. The server samples "
        f"{settings['in_flight'] * mean / longest:,.0f} of {settings['in_flight']} answers in open groups at a time, because "
        "finished answers wait for the longest of their group"
    )


def lengths(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Mean tokens of an answer that may end at each of its tokens, and of the longest of a group,
    under a cap.

    Args:
        settings: of whole_run.json.
    """
    stay = 1 - settings["end_tokens"] / SHAPES[settings["shape"]]["vocab_size"]
    ends = [
        1 - stay**tokens for tokens in range(settings["cap"])
    ]  # the share of answers that are no longer
    return sum(1 - share for share in ends), sum(1 - share ** settings["group"] for share in ends)


def checkpoint_cost(book: Book) -> str:
    """What a checkpoint costs the steps beside it."""
    place = f"cases/{SAVED}/checkpoint"
    book.number(SPEED, f"{place}/bytes")
    found = book.get(SPEED, place)
    before, after = (max(found[f"step_seconds_{when}"]) for when in ("before", "after"))
    return (
        f"{found['bytes'] / 1e9:.0f} GB took {found['complete_seconds']:.0f} s. The slowest step took {after:.2f} s while the "
        f"thread wrote, and {before:.2f} s before"
    )


def sampling_cost(book: Book) -> str:
    """Every way of bench/generate_cost.py."""
    ways = book.get(SAMPLING, "ways")
    head = ["", "tokens/s", "front end, µs a token", "engine process, µs a token"]
    names = {
        "numbers": "`/generate`, numbers alone (what environments ask for)",
        "text and tables": "`/generate`, text and tables of logprobs",
        "vLLM completions": "vLLM's `/v1/completions` with token ids",
        "numbers, worker apart": "`/generate`, numbers alone, the worker in a process of its own",
        "engine alone": "vLLM's engine without a server",
    }
    rows, places = [], {}
    for way in ways:
        place = f"ways/{way}"
        spent = [
            book.maybe(SAMPLING, f"{place}/{key}_us_per_token") for key in ("front_end", "engine")
        ]
        told = ["" if value is None else f"{value:.1f}" for value in spent]
        rows.append(
            [names[way], f"{book.number(SAMPLING, f'{place}/tokens_per_second'):,.0f}", *told]
        )
        places[way] = (SAMPLING, place)
    return f"{markdown(head, rows)}\n\n{sources(book, places)}"


NAMED: dict[str, Callable[[Book], str]] = {
    "trainer_speed": trainer_speed,
    "checkpoint_cost": checkpoint_cost,
    "longest_sequence": longest_sequence,
    "whole_run": whole_run,
    "whole_run_bound": whole_run_bound,
    "sampling_cost": sampling_cost,
}
"""By the name that stands in the documents."""
