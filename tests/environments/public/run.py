#!/usr/bin/env python3
"""Environment files of the public repository, unchanged, on our SDK and on the public one, against
our rollout service.

    python tests/environments/public/run.py --clone FOLDER            # all, into bench/results/their_environments.json
    python tests/environments/public/run.py --clone FOLDER --only gsm8k_server mcqa_thinking_env --keep

FOLDER is a clone of the public repository. Each file runs twice at the same time, in processes of
its own: once with the public SDK from the package registry, once with ours. Nothing else differs. A
stand-in for the inference server gives both the same answers. A proxy in front of a real rollout
service records the requests, and a trainer's loop takes the batches. The posts of the two are
compared, number for number.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run by path: import from the repository

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from bench.gpu.processes import free_port
from bench.measured import measured
from example_trainer.launcher import roles
from tests.environments.public import processes
from tests.environments.public.cases import CASES, Case
from tests.environments.public.compare import asked_differently, differences, first_differences
from tests.environments.public.processes import Launcher, Side
from tests.environments.public.recorder import Recorder

RESULTS = ROOT / "bench" / "results" / "their_environments.json"
LONGEST = 60_000
"""Tokens that the trainer takes: bytes, with this tokenizer."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Run:
    """One side's outcome with one file.

    Attributes:
        groups: posted and accepted, in order.
        registered: what it registered with, if it did.
        refused: what the service refused.
        drained: sequences that came out of the service's batches.
        asked: requests that the stand-in got.
        files: for `process` and `evaluate`, what they wrote.
        ended: exit status, None where it was stopped because enough had come.
        log: the end of its output.
        seconds: wall time.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    registered: list[dict[str, Any]] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    drained: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    ended: int | None = None
    log: str = ""
    seconds: float = 0.0


def make_tokenizer(folder: Path) -> Path:
    """One token per byte, with a start token that encoding adds and the chat template writes, as
    Llama's has it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "<|im_end|>", "<|im_start|>"]
    inner = Tokenizer(
        models.BPE(vocab={text: i for i, text in enumerate([*alphabet, *specials])}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    # By hand: two major versions of transformers read it, and neither reads what the other writes.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


@dataclass
class Seat:
    """One side's parts for all files: its SDK's launcher, a stand-in model and a rollout
    service.
    """

    side: Side
    launcher: Launcher
    model: str
    service_port: int


class Bench:
    """The clone, the tokenizer and both sides."""

    def __init__(self, clone: Path, work: Path, tokenizer: Path, seats: list[Seat]):
        self.clone, self.work, self.tokenizer, self.seats = clone, work, tokenizer, seats

    def run(self, case: Case) -> tuple[Run, Run]:
        """Both sides at the same time."""
        with ThreadPoolExecutor(2) as pool:
            public, ours = pool.map(lambda seat: self.one(case, seat), self.seats)
        return public, ours

    def one(self, case: Case, seat: Seat) -> Run:
        folder = self.work / case.name / seat.side.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        httpx.post(
            f"{seat.model}/control", json={"rules": case.rules}, timeout=60
        ).raise_for_status()
        began = time.monotonic()
        run = (self.serve if case.command == "serve" else self.once)(case, folder, seat)
        run.seconds = round(time.monotonic() - began, 1)
        run.asked = httpx.get(f"{seat.model}/asked", timeout=60).json()
        run.log = (folder / "environment.log").read_text(errors="replace")[-6000:]
        return run

    def start(self, case: Case, folder: Path, seat: Seat, service: str) -> processes.Started:
        environ = {"HOME": str(folder), **case.environ}
        more = {"rows": case.rows, "hub": dict(case.hub)}
        command = self.command(case, folder, seat.model, service)
        return seat.launcher.run(command, folder, folder / "environment.log", environ, more)

    def command(self, case: Case, folder: Path, model: str, service: str) -> list[str | Path]:
        """The environment file with its flags, or a YAML file in their place."""
        server = {"base_url": f"{model}/v1", "api_key": "x", "server_type": case.server_type}
        server |= {"model_name": str(self.tokenizer), "tokenizer_name": str(self.tokenizer)}
        env: dict[str, Any] = {
            "tokenizer_name": str(self.tokenizer),
            "use_wandb": False,
            "group_size": case.group_size,
        }
        if case.command == "serve":
            env |= {
                "rollout_server_url": service,
                "max_num_workers": 1,
                "max_batches_offpolicy": 8,
                "steps_per_eval": 0,
            }
            env |= {"total_steps": 100_000}
        elif case.command == "process":
            env |= {
                "total_steps": case.groups,
                "data_path_to_save_groups": str(folder / "groups.jsonl"),
                "max_num_workers": 1,
            }
        else:
            env |= {"data_dir_to_save_evals": str(folder / "evaluation")}
        env |= dict(case.env)
        start: list[str | Path] = [self.clone / "environments" / case.file, case.command]
        if case.yaml:
            start += ["--config", self.clone / "environments" / case.yaml]
        if case.servers > 1:
            path = folder / "servers.yaml"
            entries = [
                server,
                server | {"base_url": server["base_url"].replace("127.0.0.1", "localhost")},
            ]
            path.write_text(yaml.safe_dump({"env": env, "openai": entries[: case.servers]}))
            start += ["--config", path]
            env, server = {}, {}
        flags = [
            *((f"--env.{k}", v) for k, v in env.items()),
            *((f"--openai.{k}", v) for k, v in server.items()),
        ]
        places = {"{model}": model, "{tokenizer}": str(self.tokenizer)}
        more = [(flag, places.get(str(value), value)) for flag, value in case.flags]
        return [*start, *(part for flag, value in [*flags, *more] for part in (flag, str(value)))]

    def serve(self, case: Case, folder: Path, seat: Seat) -> Run:
        """Serve our rollout service until enough groups have arrived, taking batches as a trainer
        does.
        """
        run, url = Run(), f"http://127.0.0.1:{seat.service_port}"
        httpx.get(f"{url}/reset_data", timeout=60).raise_for_status()
        trainer = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": case.batch_size,
            "max_token_len": LONGEST,
        }
        trainer |= {
            "checkpoint_dir": str(folder),
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 100_000,
        }
        httpx.post(f"{url}/register", json=trainer, timeout=60).raise_for_status()
        with Recorder(seat.service_port) as door:
            started = self.start(case, folder, seat, door.url)

            def enough() -> bool:
                batch = httpx.get(f"{url}/batch", timeout=60).json()["batch"] or []
                run.drained += sum(len(group["tokens"]) for group in batch)
                return (
                    len(door.posted) >= case.groups
                    or len(door.refused) >= case.groups
                    or started.ended.is_set()
                )

            processes.wait_for(f"{case.name}: {case.groups} groups", enough, case.seconds)
            enough()
            run.ended = started.status
            started.stop()
            run.groups, run.registered, run.refused = (
                door.posted[: case.groups],
                door.registered[:1],
                door.refused[:3],
            )
        return run

    def once(self, case: Case, folder: Path, seat: Seat) -> Run:
        """Run `process` or `evaluate` to its end and read what it wrote."""
        run = Run()
        started = self.start(case, folder, seat, "http://127.0.0.1:1")
        if not started.ended.wait(case.seconds):
            print(f"  {case.name}: not within {case.seconds:g} s", flush=True)
        run.ended = started.status
        started.stop()
        groups = folder / "groups.jsonl"
        if groups.exists():
            run.groups = [json.loads(line) for line in groups.read_text().splitlines() if line]
            run.files["page"] = (folder / "groups.html").exists()
        run.files |= read_evaluation(folder / "evaluation")
        return run


BY_THE_CLOCK = ("time", "seconds", "date", "timestamp")
"""Parts of the names of metrics that no two runs have in common."""


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The files of an evaluation, without what the clock decides."""
    found: dict[str, Any] = {"evaluate_config.yaml": (folder / "evaluate_config.yaml").exists()}
    for path in sorted(folder.rglob("*.json")):
        found[path.name] = without_times(json.loads(path.read_text()))
    for path in sorted(folder.rglob("*.jsonl")):
        rows = [without_times(json.loads(line)) for line in path.read_text().splitlines() if line]
        found[path.name] = sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: without_times(held)
            for k, held in value.items()
            if not any(word in k for word in BY_THE_CLOCK)
        }
    return [without_times(held) for held in value] if isinstance(value, list) else value


def judged(case: Case, public: Run, ours: Run) -> dict[str, Any]:
    """One row of the results."""
    found = differences(public.groups, ours.groups)
    if case.command == "evaluate":
        places = first_differences(public.files, ours.files)
        found += [f"{place}: public {theirs}, ours {mine}" for place, theirs, mine in places]
    if public.registered != ours.registered and public.registered:
        found.append(f"registered: public {public.registered}, ours {ours.registered}")
    nothing = case.command == "serve" and not (public.groups or ours.groups)
    nothing = nothing or (case.command == "process" and not (public.groups or ours.groups))
    nothing = nothing or (
        case.command == "evaluate" and "metrics.json" not in (public.files | ours.files)
    )
    return {
        "file": f"environments/{case.file}",
        "kind": case.kind,
        "command": case.command,
        "verdict": "nothing" if nothing else "differs" if found else "same",
        "why": case.why,
        "groups": [len(public.groups), len(ours.groups)],
        "sequences": [sum(len(group["tokens"]) for group in run.groups) for run in (public, ours)],
        "turns": max(
            (
                answers_in(mask)
                for run in (public, ours)
                for group in run.groups
                for mask in group["masks"]
            ),
            default=0,
        ),
        "drained": [public.drained, ours.drained],
        "refused": [len(public.refused), len(ours.refused)],
        "differences": [text.replace(str(ROOT), "") for text in found[:8]],
        "asked_differently": asked_differently(public.asked, ours.asked)[:8],
        "measured": measured(),
    }


def answers_in(mask: list[int]) -> int:
    """Return the number of sampled stretches of a sequence."""
    return sum(a == -100 != b for a, b in zip([-100, *mask[:-1]], mask, strict=True))


@contextmanager
def started(clone: Path, work: Path) -> Iterator[Bench]:
    """Needs of every file, once for each side."""
    tokenizer = make_tokenizer(work / "tokenizer")
    processes.python()
    with ExitStack() as stack:
        seats = []
        for side in processes.sides(clone, work):
            launcher = Launcher(side, work / f"home-{side.name}")
            stack.callback(launcher.close)
            model, service = free_port(), free_port()
            for port, command, path in (
                (model, processes.model(model, tokenizer), "/health"),
                (service, roles.service("127.0.0.1", service, store="memory"), "/"),
            ):
                log = work / f"{side.name}-{port}.log"
                stack.enter_context(
                    processes.server(command, f"http://127.0.0.1:{port}{path}", log)
                )
            seats.append(Seat(side, launcher, f"http://127.0.0.1:{model}", service))
        yield Bench(clone, work, tokenizer, seats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--clone", type=Path, required=True, help="a clone of the public repository"
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--into", type=Path, default=RESULTS)
    parser.add_argument(
        "--keep", type=Path, help="folder for logs and what was written; by default a temporary one"
    )
    parser.add_argument("--verbose", action="store_true", help="print the end of each log")
    options = parser.parse_args()
    rows: dict[str, Any] = (
        json.loads(options.into.read_text())["cases"] if options.into.exists() else {}
    )
    with (
        tempfile.TemporaryDirectory() as temporary,
        started(options.clone, options.keep or Path(temporary)) as bench,
    ):
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            public, ours = bench.run(case)
            rows[case.name] = row = judged(case, public, ours)
            print(
                f"{case.name}: {row['verdict']} {row['groups']} groups, {public.seconds} s and {ours.seconds} s",
                flush=True,
            )
            for text in [*row["differences"], *row["asked_differently"]]:
                print(f"    {text}")
            for name, run in (("public", public), ("ours", ours)):
                if run.refused:
                    print(f"    {name} refused: {run.refused[0]}")
                if options.verbose or (row["verdict"] != "same" and not run.groups):
                    print(f"---- {name} (ended {run.ended})\n{run.log[-2500:]}")
            known = [case.name for case in CASES]
            options.into.write_text(
                json.dumps(
                    {"cases": {name: rows[name] for name in known if name in rows}}, indent=1
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
