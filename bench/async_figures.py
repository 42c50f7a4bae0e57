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
    """`70 generators of 1.7B, 1,300 of 32B`."""
    sizes = book.get(FILE, "scaling/on_paper/full_at")
    return ", ".join(
        f"{book.number(FILE, f'scaling/on_paper/full_at/{size}'):,.0f} of {size}" for size in sizes
    )


NAMED: dict[str, Callable[[Book], str]] = {
    "async_modes_gpu": modes_gpu,
    "async_full_at": full_at,
    "async_exact": exact,
}
"""By the name that stands in the documents."""
