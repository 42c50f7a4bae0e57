"""What bench/figures.py cannot format from one value, and what it need not find in the results."""

from __future__ import annotations

from collections.abc import Callable

from bench import (
    async_figures,
    bridge_figures,
    determinism_figures,
    learning_figures,
    quick_start_figures,
    trainer_figures,
)
from bench import public_environment_figures as their_environments
from bench.bridge_figures import markdown, sources
from bench.results_book import Book


def service_rates(book: Book) -> str:
    """The rollout service beside the public server under the same load."""
    sides = {"Atropos' public server": "public", "ours": "ours"}
    rows = [
        [
            text,
            *(
                f"{book.number('rollout_api_load', f'load/medians/{side}/{key}'):.0f}{unit}"
                for side in sides.values()
            ),
        ]
        for text, key, unit in (
            ("groups posted per second", "posted", ""),
            ("groups drained per second", "drained", ""),
            ("a post, median", "p50", " ms"),
            ("a post, p99", "p99", " ms"),
        )
    ]
    rounds = len(book.get("rollout_api_load", "load/runs/ours"))
    told = f"Medians of {rounds} rounds, {book.number('rollout_api_load', 'load/clients')} clients, two cores."
    return f"{markdown(['', *sides], rows)}\n\n{told} {sources(book, {'all': ('rollout_api_load', 'load')})}"


def service_kills(book: Book) -> str:
    """Groups that came through kills of the service under load."""
    if not book.has("service_kills"):
        return "Not measured yet."
    clients, minutes, kills, groups, batches = (
        f"{book.number('service_kills', key):,.0f}"
        for key in ("clients", "minutes", "kills", "groups", "batches")
    )
    faults = [
        f"{book.number('service_kills', key):.0f} {key}" for key in ("lost", "doubled", "changed")
    ]
    return (
        f"{clients} clients for {minutes} minutes with {kills} `kill -9` and restarts: {groups} groups in {batches} batches, "
        f"{faults[0]}, {faults[1]}, {faults[2]}."
    )


NAMED: dict[str, Callable[[Book], str]] = {
    **async_figures.NAMED,
    **bridge_figures.NAMED,
    **determinism_figures.NAMED,
    **learning_figures.NAMED,
    **quick_start_figures.NAMED,
    **trainer_figures.NAMED,
    **their_environments.NAMED,
    "service_rates": service_rates,
    "service_kills": service_kills,
}
"""By the name that stands in the documents."""

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
        "1 MiB for each file": "MAX_WAITING_BYTES in atroposlib/dashboard/live/snapshots.py",
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
        "above 4 MiB it is ended; what its functions return has 1 MiB": "likewise",
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
