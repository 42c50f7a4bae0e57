"""Tables of docs/fleet.md: what an update of one server and of several makes a trainer and a client wait for."""

from __future__ import annotations

from collections.abc import Callable

from bench.bridge_figures import markdown, sources
from bench.gpu.shapes import PEAK_FLOPS
from bench.results_book import Book


def servers_on_gpus(book: Book) -> str:
    """Updates of 1, 2, … vLLM servers, each on a GPU of its own, ours and by vLLM's own engine."""
    file, load = "fleet_servers_gpu", "load_64"
    head = [
        "servers",
        "longest gap between two tokens at a client, median",
        "the trainer waits, median",
        "most",
        "times one server",
    ]
    head += ["idle: the trainer waits, median", "most", "times one server"]
    rows, places = [], {}
    ((shape, by_way),) = book.get(file, "servers").items()
    for way in (name for name in by_way if name != "trainer"):
        base = f"servers/{shape}/{way}"
        for count in sorted(book.get(file, base)):
            cells = [f"{book.number(file, f'{base}/{count}/{load}/largest_gap_per_update_ms/median'):.0f} ms"]
            for condition in (load, "idle"):
                waits = f"{condition}/whole_update_ms"
                median, most = (book.number(file, f"{base}/{count}/{waits}/{key}") for key in ("median", "max"))
                one = book.number(file, f"{base}/1/{waits}/median")
                cells += [f"{median:.0f} ms", f"{most:.0f} ms", f"{median / one:.1f}"]
            side = f"{way}, {count}"
            rows.append([side, *cells])
            places[side] = (file, f"{base}/{count}/idle")
    size = book.number(file, "model_bytes")
    told = f"A model of {size / 1e9:.2f} GB on each of up to four H200s of one host; 64 requests in flight at each server."
    return f"{markdown(head, rows)}\n\n{told} {sources(book, places)}"


def clients(book: Book) -> str:
    """What a client of a real server sees, what the trainer waits for first, and the same of vLLM's own engine."""
    file = "fleet_gpu"
    head = ["", "longest gap between two tokens at a client, median", "most", "gaps otherwise"]
    head += ["the trainer waits, median", "most"]
    parts = {
        f"{way}, {cache}": f"clients/{cache}/{way}"
        for cache, by_way in book.get(file, "clients").items()
        for way in by_way
        if way != "trainer"
    }
    parts["vLLM's own engine"] = "vllm_engine"
    columns = ["largest_gap_per_update_ms/median", "largest_gap_per_update_ms/max", "usual_gap_ms/median"]
    columns += ["whole_update_ms/median", "whole_update_ms/max"]
    rows, places = [], {}
    for side, part in parts.items():
        for condition in (name for name in book.get(file, part) if name.startswith("load_")):
            place = f"{part}/{condition}"
            name = f"{side}, {condition.removeprefix('load_')} requests"
            rows.append([name, *(f"{book.number(file, f'{place}/{key}'):.0f} ms" for key in columns)])
            places[name] = (file, place)
    size = book.number(file, "model_bytes") / 1e9
    return f"{markdown(head, rows)}\n\nA model of {size:.2f} GB. {sources(book, places)}"


def anew_share(book: Book) -> str:
    """How fast an engine computes keys and values again, against what its GPU could."""
    file, place = "fleet_gpu", "clients/recompute/direct/load_256/computed_anew"
    tokens, ms = book.number(file, f"{place}/tokens"), book.number(file, f"{place}/ms/median")
    flops = book.number(file, "model_bytes") * tokens / (ms / 1e3)  # two operations and two bytes for each parameter
    return f"That is {flops / PEAK_FLOPS:.0%} of the rate at which the card multiplies large matrices"


NAMED: dict[str, Callable[[Book], str]] = {
    "fleet_servers_gpu": servers_on_gpus,
    "fleet_clients_gpu": clients,
    "fleet_anew_share": anew_share,
}
"""By the name that stands in the documents."""
