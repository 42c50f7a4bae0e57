"""Tables of asynchronous training as documents show them: regimes side by side, and what one rollout service holds."""

from __future__ import annotations

from collections.abc import Callable

from bench.bridge_figures import markdown, sources
from bench.results_book import Book, FigureError

FILE = "async"
NAMES = {"turns": "in turns", "overlapped": "overlapped", **{f"off_policy_{n}": f"off-policy by {n}" for n in (1, 2, 4)}}


def modes(book: Book) -> str:
    """Every regime of bench/async_modes.py on the processor."""
    return _regimes(book, "modes")


def modes_gpu(book: Book) -> str:
    """The same on a GPU that vLLM and trainer share."""
    return _regimes(book, "modes_gpu")


def _regimes(book: Book, part: str) -> str:
    head = ["", "seconds a step", "sampled tokens/s", "trainer trains", "waits", "hands over", "vLLM generates", "stands still"]
    head += ["age, mean and most", "reward at the end"]
    rows, places = [], {}
    for name, found in book.get(FILE, f"{part}/regimes").items():
        place = f"{part}/regimes/{name}"
        seconds, rate, reward = (
            book.number(FILE, f"{place}/{key}") for key in ("seconds_a_step", "sampled_tokens_per_second", "reward_last")
        )
        work = found["share_of_time"]
        shares = [work["trainer"].get(what, 0.0) for what in ("train", "wait", "sync")]
        shares += [work["generator"].get(what, 0.0) for what in ("generating", "halted")]
        age = f"{found['age_mean']:.1f}, {found['age_max']}"
        rows.append(
            [NAMES[name], f"{seconds:.2f}", f"{rate:,.0f}", *(f"{share:.0%}" for share in shares), age, f"{reward:.2f}"]
        )
        places[NAMES[name]] = (FILE, place)
    settings = book.get(FILE, f"{part}/settings")
    counted = settings["steps"] - settings["leave_out"]
    told = f"Means over {counted} steps of {settings['sequences']} answers; the reward of the last fifth, between -1 and 1."
    return f"{markdown(head, rows)}\n\n{told} {sources(book, places)} {_load(book, f'{part}/load_average_before/0')}"


def _load(book: Book, place: str) -> str:
    """What else the machine had to do."""
    load = book.maybe(FILE, place)
    return "The machine's load before it was not noted." if load is None else f"The machine's load before it: {load:.1f}."


def exact(book: Book) -> str:
    """What a run on Ray that was killed whole had in common with the one that nobody killed. Raises FigureError unless all."""
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


def scaling(book: Book) -> str:
    """Generators that sleep, and what arrives of theirs."""
    head = ["generators", "tokens/s offered", "tokens/s arrived", "groups/s", "of a core", "a post, median", "a post, p99"]
    rows, places = [], {}
    for number in book.get(FILE, "scaling/generators"):
        place = f"scaling/generators/{number}"
        offered, arrived, groups, share, p50, p99 = (
            book.number(FILE, f"{place}/{key}")
            for key in (
                "offered_tokens_per_second", "tokens_per_second", "groups_per_second", "service_core_share", "post_ms/p50",
                "post_ms/p99",
            )
        )  # fmt: skip
        posts = [f"{p50:.1f} ms", f"{p99:.1f} ms"]
        rows.append([number, f"{offered:,.0f}", f"{arrived:,.0f}", f"{groups:.1f}", f"{share:.0%}", *posts])
        places[number] = (FILE, place)
    load = _load(book, "scaling/machine/load_average_before/0")
    return f"{markdown(head, rows)}\n\n{sources(book, places)} {load}"


def saturation(book: Book) -> str:
    """Where service and trainer are full."""
    taken, posted = (book.number(FILE, f"scaling/saturation/service/{key}_per_second") for key in ("trained_groups", "groups"))
    drained = book.number(FILE, "scaling/saturation/drain/groups_per_second")
    return (
        f"with both at full speed, {posted:.0f} groups/s come in and {taken:.0f} groups/s go out. A trainer that only "
        f"acknowledges empties a full queue at {drained:.0f} groups/s"
    )


def on_paper(book: Book) -> str:
    """What many generators need."""
    head = ["model", "generators", "tokens/s", "groups/s", "rollout services", "wire", "trainer GPUs"]
    rows, places = [], {}
    for size, by_number in book.get(FILE, "scaling/on_paper/found").items():
        for number in by_number:
            place = f"scaling/on_paper/found/{size}/{number}"
            tokens, groups, services, wire, gpus = (
                book.number(FILE, f"{place}/{key}")
                for key in ("tokens_per_second", "groups_per_second", "services", "wire_mb_per_second", "trainer_gpus")
            )
            needed = [f"{services:.2f}", f"{wire:.1f} MB/s", f"{gpus:.0f}"]
            rows.append([size, f"{int(number):,}", f"{tokens:,.0f}", f"{groups:,.1f}", *needed])
            places[f"{size}, {number}"] = (FILE, place)
    return f"{markdown(head, rows)}\n\n{sources(book, places)}"


def parameter_server_gpu(book: Book) -> str:
    """The same by each route between GPUs and the host's memory."""
    if "parameter_server_gpu" not in book.page(FILE):
        return "Not measured yet."
    found, places = _handed(book, "parameter_server_gpu", "parameter server, vLLM servers")
    gpu = book.get(FILE, "parameter_server_gpu/machine/gpus/0")
    size = book.number(FILE, f"{next(iter(places.values()))[1]}/model_bytes") / 1e9
    return f"{found}\n\n{gpu}, {size:.2f} GB of bfloat16. {sources(book, places)}"


def _handed(book: Book, part: str, first: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """The table of bench/parameter_server.py, and where its rows are from."""
    head = [first, "a push", "a pull by all of them", "taken", "handed on, all together"]
    keys = ("push_ms", "pull_ms", "push_gb_per_second", "delivered_gb_per_second")
    rows, places = [], {}
    for name in book.get(FILE, f"{part}/servers"):
        place = f"{part}/servers/{name}"
        push, pull, taken, given = (book.number(FILE, f"{place}/{key}") for key in keys)
        rows.append([name, f"{push:,.0f} ms", f"{pull:,.0f} ms", f"{taken:.2f} GB/s", f"{given:.2f} GB/s"])
        places[name] = (FILE, place)
    return markdown(head, rows), places


def full_at(book: Book) -> str:
    """`70 generators of 1.7B, 1,300 of 32B`."""
    sizes = book.get(FILE, "scaling/on_paper/full_at")
    return ", ".join(f"{book.number(FILE, f'scaling/on_paper/full_at/{size}'):,.0f} of {size}" for size in sizes)


NAMED: dict[str, Callable[[Book], str]] = {
    "async_modes": modes,
    "async_modes_gpu": modes_gpu,
    "async_scaling": scaling,
    "async_saturation": saturation,
    "async_on_paper": on_paper,
    "async_full_at": full_at,
    "async_exact": exact,
    "parameter_server_gpu": parameter_server_gpu,
}
"""By the name that stands in the documents."""
