"""Count the files of this project that a call passes through, by tracing real calls.

    python bench/code_trips.py --output bench/results/code_trips.json

Seven trips are traced. Two are a group posted to the rollout service, and a batch handed out. Two
are an arithmetic item (worker, sample, grade, post), and a conversation whose tool runs a program
in the sandbox. One is a batch in the trainer (fetched, scattered, packed, loss, optimizer), with a
tiny model on the CPU. Two are an update of two servers' weights, and an update in which a server
dies and comes back (weight_trips.py). The services that a trip talks to are real processes, except
the model: its stand-in gives fixed answers. The servers are connected before an item's trip begins.
A file counts once a Python function of it is called, unless an import calls it. The figure
`changes` counts how often a call goes from one file to another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.multi_turn import Conversation, Grade, MultiTurnConfig, MultiTurnEnv
from atroposlib.sandbox import LocalSandbox, Program
from atroposlib.service.app import make_app
from atroposlib.service.service import RolloutService
from atroposlib.service.sqlite_store import SqliteStore
from bench.call_trip import ROOT, Trip
from bench.gpu.summary import table
from bench.measured import measured
from bench.weight_trips import weight_trips
from environments.arithmetic_server import ArithmeticConfig, ArithmeticEnv
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import (
    ManagedProcess,
    Supervisor,
    http_probe,
    wait_until,
)
from example_trainer.launcher import roles
from tests import inference_standin

SECONDS = 60.0
ENVIRONMENT = {"max_token_length": 4096, "desired_name": "traced", "weight": 1.0, "group_size": 2}
TOKENIZER = ROOT / "assets" / "starter_model"
TRAINER = {
    "wandb_group": "", "wandb_project": "", "batch_size": 2, "max_token_len": 4096, "checkpoint_dir": "", "num_steps": 10,
    "save_checkpoint_interval": 0, "starting_step": 0,
}  # fmt: skip


def group(sequences: int = 2, length: int = 8) -> dict[str, Any]:
    """Return a valid group."""
    tokens = [list(range(1, length + 1)) for _ in range(sequences)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(index) for index in range(sequences)],
        "inference_logprobs": [[1.0] + [-0.5] * (length - 1) for _ in tokens],
    }


# The store measures its disk again once a second has passed. A slow machine's trip would be longer
# than others.
@patch("atroposlib.service.store.FRESH_SECONDS", math.inf)
async def service_trips(folder: Path) -> dict[str, Trip]:
    """Trace one group posted and one batch handed out, in a service of this process with its store
    on disk.
    """
    service = RolloutService(SqliteStore(folder / "traced.db"))
    app = make_app(service)
    post, fetch = Trip(), Trip()
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=SECONDS)
    async with client:
        session = (await client.post("/register", json=TRAINER)).raise_for_status().json()
        (await client.get("/batch")).raise_for_status()
        registered = await client.post("/register-env", json=ENVIRONMENT)
        env_id = registered.raise_for_status().json()["env_id"]
        with post.traced():
            (
                await client.post("/scored_data", json=group() | {"env_id": env_id})
            ).raise_for_status()
        with fetch.traced():
            answer = (
                (await client.get("/batch", params={"uuid": session["uuid"]}))
                .raise_for_status()
                .json()
            )
        assert answer["batch"], answer
    await service.close()
    return {"post_group": post, "get_batch": fetch}


async def run_program(program: str, talk: Conversation) -> str:
    """Run a Python program.

    Args:
        program: Python source that defines `main()`; its result is returned.
    """
    verdict = await talk.state.run(Program(program, "main", [()]))
    return str(verdict)


class ProgramEnv(MultiTurnEnv):
    """A conversation in which the model runs one program."""

    name = "program"
    tools = (run_program,)
    box = LocalSandbox()

    async def setup(self) -> None:
        await self.box.start()

    async def get_next_item(self) -> str:
        return "Run a program."

    def eval_problems(self) -> list[str]:
        return []

    async def reset(self, item: str) -> Conversation:
        return Conversation([{"role": "user", "content": item}], state=self.box)

    async def grade(self, talk: Conversation) -> Grade:
        return Grade(float(len(talk.text) % 2), correct=True, answer=talk.text)


async def one_item(
    kind: type[BaseEnv], config: BaseEnvConfig, servers: list[APIServerConfig]
) -> Trip:
    """Trace one item of an environment from its worker to the accepted post."""
    env, trip = kind(config, servers), Trip()
    await env.setup()
    await env.wait_for_servers()
    await env._runner.get_info()
    await env._runner.register()
    await env.get_status()
    env.max_num_workers = 1
    with trip.traced():
        await env.add_train_workers()
        posted = await asyncio.gather(*env.workers)
    assert len(posted) == 1, "no item was begun"
    assert env._runner.state.groups_sent == 1, f"the group was not accepted: {env.drops}"
    await env._runner.connections.close()
    return trip


class Processes:
    """The processes that a trip talks to, each with its log in a folder; the end stops them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.supervisor, self.ports = folder, Supervisor(), PortReservations()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.stop_all()

    def start(self, name: str, url: str, command: list[str]) -> None:
        """Start a program, and wait until it answers at a URL."""
        self.supervisor.add(
            ManagedProcess(name, command, self.folder / f"{name}.log", None, ROOT, 5.0, False)
        )
        wait_until(name, http_probe(url), SECONDS, check=self.supervisor.check)

    def start_service(self) -> str:
        """Start a rollout service that stores nothing on disk; return its URL."""
        port = self.ports.pick()
        url = f"http://127.0.0.1:{port}"
        self.start("service", url, roles.service("127.0.0.1", port, store="memory", no_ui=True))
        return url


class Surroundings(Processes):
    """A rollout service with a registered trainer, and a stand-in for the model."""

    def __enter__(self) -> Surroundings:
        self.service, port = self.start_service(), self.ports.pick()
        self.model = f"http://127.0.0.1:{port}"
        command = inference_standin.command(port, TOKENIZER, context=60_000)
        self.start("model", f"{self.model}/health", command)
        httpx.post(f"{self.service}/register", json=TRAINER, timeout=SECONDS).raise_for_status()
        httpx.get(f"{self.service}/batch", timeout=SECONDS).raise_for_status()
        return self

    def answer(self, rules: list[dict[str, Any]]) -> None:
        """Set the stand-in's rules: regular expressions of prompts, and the answers to them in
        turn.
        """
        httpx.post(
            f"{self.model}/control", json={"rules": rules}, timeout=SECONDS
        ).raise_for_status()

    def settings(self, config: type[BaseEnvConfig]) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        """Return the settings of an environment that talks to these processes."""
        common: dict[str, Any] = {
            "rollout_server_url": self.service,
            "tokenizer_name": str(TOKENIZER),
            "group_size": 2,
            "max_token_length": 512,
            # The stand-in does not know right answers, and groups of equal scores are not posted.
            "ensure_scores_are_not_same": False,
        }
        return config(**common), [
            APIServerConfig(base_url=f"{self.model}/v1", server_type="vllm", model_name="stand-in")
        ]


def environment_trips(around: Surroundings) -> dict[str, Trip]:
    """Trace an arithmetic item, and a conversation that runs a program in the sandbox."""
    around.answer([{"when": "", "answers": ["\\boxed{1}", "no answer"]}])
    arithmetic = asyncio.run(one_item(ArithmeticEnv, *around.settings(ArithmeticConfig)))
    call = json.dumps(
        {"name": "run_program", "arguments": {"program": "def main():\n    return 6 * 7"}}
    )
    after = {"when": "42", "answers": ["even", "odd"]}
    around.answer([after, {"when": "", "answers": [f"<tool_call>{call}</tool_call>"]}])
    conversation = asyncio.run(one_item(ProgramEnv, *around.settings(MultiTurnConfig)))
    return {"arithmetic_item": arithmetic, "tool_conversation": conversation}


TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "dtype": "float32",
}  # fmt: skip


def make_tiny_model(folder: Path) -> Path:
    """Write a checkpoint of random weights."""
    import torch

    from example_trainer.models import Decoder, save_model
    from example_trainer.models.hf_checkpoint import read_geometry

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_MODEL), encoding="utf-8")
    torch.manual_seed(0)
    model = Decoder(read_geometry(folder)[0], torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    save_model(model, folder)
    return folder


def train_trip(folder: Path) -> Trip:
    """Trace one batch from its fetch through the optimizer step of a trainer in this process."""
    import numpy.ma  # noqa: F401 - numpy imports it late, for percentiles, an import is not a call

    # Only this trip needs torch.
    from example_trainer.command_line import parse_config
    from example_trainer.process import StopSignal
    from example_trainer.training.assembly import make_trainer

    trip = Trip()
    with ExitStack() as stack:
        service = stack.enter_context(Processes(folder)).start_service()
        options = roles.flags(
            model_name=make_tiny_model(folder / "tiny"), atropos_url=service, device="cpu",
            training_steps=1, batch_size=2, gradient_accumulation_steps=1, seq_len=64,
            save_path=folder / "checkpoints", log_dir=folder / "logs", num_threads=1,
            vllm_restart_interval=0, batch_timeout=int(SECONDS),
        )  # fmt: skip
        trainer = make_trainer(parse_config(options), StopSignal(), stack)
        assert trainer is not None
        httpx.post(f"{service}/scored_data", json=group(), timeout=SECONDS).raise_for_status()
        with trip.traced():
            trainer.learn(trainer.next_batch(), 0.0, 0.0)
        assert trainer.steps == 1
        trainer.acknowledge()
    return trip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Surroundings(Path(name)) as around:
        trips = asyncio.run(service_trips(Path(name))) | environment_trips(around)
        trips["train_batch"] = train_trip(Path(name))
        trips |= weight_trips(Path(name))
    counts = [[name, len(trip.files), trip.changes] for name, trip in trips.items()]
    print(table(["trip", "files", "changes of file"], counts))
    if arguments.output is not None:
        rows = {name: trip.row() for name, trip in trips.items()}
        arguments.output.write_text(
            json.dumps({"measured": measured()} | rows, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
