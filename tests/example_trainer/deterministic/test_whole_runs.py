"""Whole runs in deterministic mode on a CPU. No token of the present weights differs, with several
servers, with older rollouts and with a parameter server. A trainer that is killed by SIGKILL in the
middle of a step ends with the weights of a trainer that was not.

Trainer, rollout service, environment and bridge are the real ones. The servers are light ones, which
sample with the trainer's own forward pass on a CPU (tests/exact_sampler.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.launcher import roles
from tests.conftest import Processes
from tests.example_trainer.deterministic.asking import GROUP, LENGTH, environment
from tests.light_servers import SOON, LightServer, Starter, until
from tests.still_running import json_rows
from tests.tiny_models import make_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

STEPS, GROUPS = 3, 2
Deaths = tuple[tuple[str, int], ...]
"""Places where a trainer dies, one after the other, and how often it comes there first."""
BROADCAST, SINGLE_COPY, IN_TURNS = "--use-shared-memory", "--single-copy", "--colocate"
DEATHS: dict[str, Deaths] = {
    BROADCAST: (("comparing", 4), ("sending", 2), ("saving", 1)),
    SINGLE_COPY: (("comparing", 4), ("committing", 2), ("saving", 1)),
    # "committing" 1 is the update before the first turn.
    IN_TURNS: (("resting", 2), ("comparing", 3), ("committing", 2), ("waking", 1), ("saving", 1)),
}


class Run:
    """A rollout service, light servers, and the trainers of one run, one after the other."""

    def __init__(
        self,
        processes: Processes,
        starter: Starter,
        model: Path,
        free_port: Callable[[], int],
        name: str,
        servers: list[LightServer],
    ) -> None:
        self.processes, self.starter, self.model, self.servers = processes, starter, model, servers
        self.folder = starter.folder / name
        self.folder.mkdir()
        for server in servers:
            server.start()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = roles.service("127.0.0.1", port, store=self.folder / "rollouts.db")
        self.service = processes.start("service", command)
        processes.wait_for_http(self.url, 180)

    @property
    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    def end(self) -> None:
        self.processes.stop(self.service)
        for server in self.servers:
            server.kill()

    def train(self, *flags: str, options: Mapping[str, Any], **death: Any) -> int:
        """Run one trainer. Returns its exit status."""
        common = {
            "model-name": self.model, "atropos-url": self.url, "training-steps": STEPS, "lr": 1e-2, "seq-len": 64,
            "batch-size": GROUP * GROUPS, "gradient-accumulation-steps": 1, "num-threads": 1, "device": "cpu",
            "save-path": self.folder / "checkpoints", "log-dir": self.folder / "logs", "checkpoint-interval": 1,
            "batch-timeout": 60, "tokens-per-microbatch": 24,
        }  # fmt: skip
        words = [
            word for name, value in (common | options).items() for word in (f"--{name}", str(value))
        ]
        message = {"do": "grpo", "arguments": [*words, "--deterministic", *flags]}
        pid = self.starter.tell(**message, folder=str(self.folder), **death)["pid"]
        return int(self.starter.tell(do="wait", pid=pid)["status"])

    def to_servers(self) -> dict[str, Any]:
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return {"weight-bridge-mode": "shared_vllm", "vllm-servers": addresses}

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each step. No token of the present weights differs."""
        rows = {
            row["weight_version"]: row for row in json_rows(self.folder / "logs" / "metrics.jsonl")
        }
        ordered = [rows[step] for step in sorted(rows)]
        assert [(row["mismatched_tokens"], row["max_logprob_difference"]) for row in ordered] == [
            (0, 0)
        ] * len(ordered)
        return ordered

    def learned(self) -> str:
        """The figures of each step, and the digest of the last weights."""
        figures = ("weight_version", "weights_sha", "reward_mean", "compared_tokens")
        steps = [[row[name] for name in figures] for row in self.rows()]
        assert [version for version, *_ in steps] == list(range(1, STEPS + 1))
        assert all(compared for *_, compared in steps)
        assert len({sha for _, sha, *_ in steps}) == STEPS
        weights = self.folder / "checkpoints" / f"step_{STEPS}" / "model.safetensors"
        return f"{steps} {hashlib.sha256(weights.read_bytes()).hexdigest()}"


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    one = Starter(tmp_path_factory.mktemp("exact"))
    yield one
    one.close()


@pytest.fixture
def new_run(
    processes: Processes, starter: Starter, model: Path, free_port: Callable[[], int]
) -> Iterator[Callable[..., Run]]:
    runs = []

    def make(
        name: str,
        *kernels: dict[str, Any] | None,
        colocate: bool = False,
        trained: Path = model,
    ) -> Run:
        """A run with one server for each of the kernels' changes."""
        kind: dict[str, Any] = {"model": trained, "samples": True, "colocate": colocate}
        servers = [
            LightServer(starter, free_port(), deterministic=changed, **kind)
            for changed in kernels or (None,)
        ]
        runs.append(Run(processes, starter, trained, free_port, name, servers))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def whole() -> dict[str, str]:
    """The result of an undisturbed run, which the first test puts here."""
    return {}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture of an odd number of experts."""
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
    make_model("Qwen3Moe", tmp_path / "mixture", vocab_size=64, head_dim=16, **sizes)
    (tmp_path / "mixture" / "tokenizer.json").write_text("{}")
    return tmp_path / "mixture"


@pytest.mark.parametrize("bridge", DEATHS)
def test_a_trainer_that_is_killed_in_a_step_ends_with_the_same_weights(
    new_run: Callable[..., Run], whole: dict[str, str], bridge: str
) -> None:
    if not whole:
        run = new_run("whole")
        with environment(run.url, run.servers, 0):
            assert run.train(BROADCAST, options=run.to_servers()) == 0, run.log[-3000:]
        whole["learned"] = run.learned()
    killed = new_run(f"killed{bridge}", colocate=bridge == IN_TURNS)
    resume: tuple[str, ...] = ()
    with environment(killed.url, killed.servers, 0):
        for place, passes in DEATHS[bridge]:
            status = killed.train(
                bridge, *resume, options=killed.to_servers(), dies=place, passes=passes
            )
            assert status == -9, killed.log[-3000:]
            resume = ("--resume", "auto")
        assert killed.train(bridge, *resume, options=killed.to_servers()) == 0, killed.log[-3000:]
    seen = killed.servers[0].get("/test")
    assert seen is not None
    assert not [one for one in seen["mixtures"] if "no memory" in one]
    assert killed.learned() == whole["learned"]


def test_answers_that_share_a_prompt_have_the_samplers_bits_and_resume_exactly(
    new_run: Callable[..., Run],
) -> None:
    """The sampler forwards whole sequences. The prompts of a batch are forwarded once each."""
    prompt, learned = 24, []
    for name, deaths in {"shared": (), "shared and killed": (("comparing", 3),)}.items():
        run = new_run(name)
        options = run.to_servers() | {"tokens-per-microbatch": 80}
        resume: tuple[str, ...] = ()
        with environment(run.url, run.servers, 0, prompt):
            for place, passes in deaths:
                death = {"dies": place, "passes": passes}
                assert run.train(BROADCAST, "--share-prefixes", options=options, **death) == -9
                resume = ("--resume", "auto")
            status = run.train(BROADCAST, "--share-prefixes", *resume, options=options)
            assert status == 0, run.log[-3000:]
        once = (prompt + GROUP * LENGTH) / (GROUP * (prompt + LENGTH))
        assert [row["packing_ratio"] for row in run.rows()] == pytest.approx([once] * STEPS)
        learned.append(run.learned())
    assert learned[0] == learned[1]


def test_a_killed_trainer_of_a_mixture_ends_with_the_same_weights(
    new_run: Callable[..., Run], mixture: Path
) -> None:
    whole, killed = (new_run(name, trained=mixture) for name in ("mixture", "killed mixture"))
    resume: tuple[str, ...] = ()
    for run, deaths in ((whole, ()), (killed, DEATHS[BROADCAST])):
        with environment(run.url, run.servers, 0):
            for place, passes in deaths:
                options = run.to_servers()
                status = run.train(BROADCAST, *resume, options=options, dies=place, passes=passes)
                assert status == -9, run.log[-3000:]
                resume = ("--resume", "auto")
            assert run.train(BROADCAST, *resume, options=run.to_servers()) == 0, run.log[-3000:]
    assert killed.learned() == whole.learned()
    assert all(row["expert_load"] > 1 for row in whole.rows())


def test_two_servers_give_the_weights_of_one_and_a_third_with_another_plan_is_left_out(
    new_run: Callable[..., Run], whole: dict[str, str]
) -> None:
    run = new_run("fleet", None, None, {"sum_plan": "parts=2"})
    other = run.servers[2]
    with environment(run.url, run.servers[:2], 0):
        status = run.train(BROADCAST, "--min-servers", "2", options=run.to_servers())
        assert status == 0, run.log[-3000:]
    assert f"[Fleet] {other.url} quarantined: the vLLM server at {other.url} does not" in run.log
    assert "sum_plan: 'parts=1' here, 'parts=2' there; start all vLLM servers of a run" in run.log
    served = [server.get("/weights") for server in run.servers]
    assert [row and row["weight_version"] for row in served] == [STEPS, STEPS, 0]
    if whole:  # alone, this test has nothing to compare with
        assert run.learned() == whole["learned"]


def test_of_older_rollouts_only_tokens_of_the_present_weights_are_compared(
    new_run: Callable[..., Run],
) -> None:
    run = new_run("older")
    options = run.to_servers() | {"max-staleness": 3, "training-steps": 8}
    with environment(run.url, run.servers, 2):
        assert run.train(BROADCAST, options=options) == 0, run.log[-3000:]
    rows = run.rows()
    for row in rows:
        assert row["compared_tokens"] + row["older_tokens"] == row["tokens"]
    assert sum(row["older_tokens"] for row in rows) > 0
    assert sum(row["compared_tokens"] for row in rows) > 0


@pytest.mark.parametrize("parts", [1, 2])
def test_through_a_parameter_server_no_token_differs(
    new_run: Callable[..., Run],
    starter: Starter,
    model: Path,
    free_port: Callable[[], int],
    parts: int,
) -> None:
    """The trainer takes the plan of the vLLM servers from the parameter server's answer."""
    plan = f"parts={parts}"
    run = new_run(f"held{parts}", {"sum_plan": plan})
    holder = LightServer(starter, free_port())
    arguments = [
        "--model-name", str(model), "--port", str(holder.port), "--device", "cpu", "--vllm-servers",
        f"127.0.0.1:{run.servers[0].port}", "--log-dir", str(run.folder),
    ]  # fmt: skip
    message = {"arguments": arguments, "folder": str(run.folder), "environment": {}}
    holder.pid = starter.tell(do="parameter server", **message)["pid"]
    report: dict[str, Any] = {}

    def names_a_server() -> bool:  # the answer is 503 while its vLLM server is slow to answer
        report.update(holder.get("/deterministic") or {})
        return "server" in report

    until(names_a_server)
    assert (report["server"], report["provenance"]["sum_plan"]) == (run.servers[0].url, plan)
    options = {
        "weight-bridge-mode": "parameter_server",
        "parameter-servers": f"127.0.0.1:{holder.port}",
        "max-staleness": 2,
    }
    with environment(run.url, run.servers, 1):
        assert run.train(options=options) == 0, run.log[-3000:]
    assert sum(row["compared_tokens"] for row in run.rows()) > 0
    holder.kill()


def test_a_server_whose_kernel_is_not_the_one_that_it_names_stops_the_run(
    new_run: Callable[..., Run],
) -> None:
    """The last bit of a small logit is rarely one of the logprob, so that some steps may pass."""
    run = new_run("swapped")
    url = f"{run.servers[0].url}/test/swap"
    httpx.post(url, json={"kernel": "linear"}, timeout=SOON, trust_env=False).raise_for_status()
    with environment(run.url, run.servers, 0):
        options = run.to_servers() | {"training-steps": 30, "keep-checkpoints": 1}
        assert run.train(BROADCAST, options=options) == 1
    assert "tokens of a microbatch differ between vLLM and the trainer" in run.log
    assert "both sides name the same kernels" in run.log
    assert len(run.rows()) < 30
