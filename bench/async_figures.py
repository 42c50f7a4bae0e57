"""Tables of asynchronous training as documents show them: regimes side by side, and what one
rollout service holds.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.bridge_figures import markdown, sources
from bench.results_book import Book, FigureError

FILE = "async"
NAMES = {
    "turns": "in turns",
    "overlapped": "overlapped",
    **{f"off_policy_{n}": f"off-policy by {n}" for n in (1, 2, 4)},
}


TIMES_SLOWER = {"1.7B": 1.0, "32B": 32.8 / 1.72}
"""Generation time relative to the simulated model. The ratio of parameters is assumed."""


def modes_gpu(book: Book) -> str:
    """Every regime of bench/async_modes.py, with vLLM on one GPU and the trainer on another."""
    part = "modes_gpu"
    head = [
        "",
        "seconds a step",
        "sampled tokens/s",
        "trainer trains",
        "waits",
        "hands over",
        "vLLM generates",
        "stands still",
    ]
    head += ["age, mean and most", "reward at the end"]
    rows, places = [], {}
    for name, found in book.get(FILE, f"{part}/regimes").items():
        place = f"{part}/regimes/{name}"
        seconds, rate, reward = (
            book.number(FILE, f"{place}/{key}")
            for key in ("seconds_a_step", "sampled_tokens_per_second", "reward_last")
        )
        work = found["share_of_time"]
        shares = [work["trainer"].get(what, 0.0) for what in ("train", "wait", "sync")]
        shares += [work["generator"].get(what, 0.0) for what in ("generating", "halted")]
        age = f"{found['age_mean']:.1f}, {found['age_max']}"
        rows.append(
            [
                NAMES[name],
                f"{seconds:.2f}",
                f"{rate:,.0f}",
                *(f"{share:.0%}" for share in shares),
                age,
                f"{reward:.2f}",
            ]
        )
        places[NAMES[name]] = (FILE, place)
    settings = book.get(FILE, f"{part}/settings")
    counted = settings["steps"] - settings["leave_out"]
    told = f"Means over {counted} steps of {settings['sequences']} answers; the reward of the last fifth, between -1 and 1."
    return f"{markdown(head, rows)}\n\n{told} {sources(book, places)} {_load(book, f'{part}/load_average_before/0')}"


def _load(book: Book, place: str) -> str:
    """What else the machine had to do."""
    load = book.maybe(FILE, place)
    return (
        "The machine's load before it was not noted."
        if load is None
        else f"The machine's load before it: {load:.1f}."
    )


def exact(book: Book) -> str:
    """What a run on Ray that was killed whole had in common with the one that nobody killed.

    Raises FigureError unless all.
    """
    told = set()
    for kind, found in book.get(FILE, "exact").items():
        whole, killed = found["runs"]["whole"], found["runs"]["killed"]
        if any(whole[key] != killed[key] for key in ("steps", "weights")):
            raise FigureError(f"{FILE}.json, exact, {kind}: the run that was killed is another one")
        compared, differ = (sum(step[place] for step in whole["steps"]) for place in (3, 4))
        if differ:
            raise FigureError(f"{FILE}.json, exact, {kind}: {differ} tokens differ")
        told.add((killed["killed_after_step"], len(whole["steps"]), compared))
    ((after, steps, tokens),) = told
    return f"with one copy and with a broadcast, killed after step {after} of {steps}. None of {tokens:,} tokens differs"


def full_at(book: Book) -> str:
    """Return how many generators fill one service, as in `70 of 1.7B, 1,300 of 32B`."""
    one = book.get(FILE, "scaling/settings/simulated")
    counted = book.get(FILE, "scaling/generators")
    rates = [book.number(FILE, "scaling/saturation/service/trained_groups_per_second")]
    rates += [
        book.number(FILE, f"scaling/generators/{number}/groups_per_second") for number in counted
    ]
    full = max(rates) * one["group"] * one["tokens"] / one["tokens_per_second"]
    return ", ".join(f"{full * slower:,.0f} of {size}" for size, slower in TIMES_SLOWER.items())


NAMED: dict[str, Callable[[Book], str]] = {
    "async_modes_gpu": modes_gpu,
    "async_full_at": full_at,
    "async_exact": exact,
}
"""By the name that stands in the documents."""
