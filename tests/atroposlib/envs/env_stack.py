"""Shared parts of tests of environments: a tokenizer that needs no download, and the processes
around an environment.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from example_trainer.child_processes.processes import wait_until
from tests import inference_standin

OFFLINE = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per byte: every text can be encoded, nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)


class Stack:
    """The real rollout service, the stand-in for the inference server, and environments, each its
    own process.
    """

    def __init__(
        self, processes: Any, free_port: Callable[[], int], tokenizer_dir: Path, folder: Path
    ):
        self.processes, self.tokenizer_dir, self.folder = processes, tokenizer_dir, folder
        self.service_port, self.inference_port = free_port(), free_port()
        self.service_url = f"http://127.0.0.1:{self.service_port}"
        self.inference_url = f"http://127.0.0.1:{self.inference_port}"
        self.trainer_uuid = -1

    def start_service(self, store: str | Path = "memory", *flags: str) -> Any:
        command = [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.service_port),
        ]
        process = self.processes.start(
            "service", [*command, "--store", str(store), *flags], OFFLINE
        )
        self.processes.wait_for_http(self.service_url, 120)
        return process

    def start_inference(self, **behaviour: Any) -> Any:
        """A stand-in of this test's own, to be killed or configured."""
        command = inference_standin.command(self.inference_port, self.tokenizer_dir, **behaviour)
        process = self.processes.start("inference", command, OFFLINE)
        self.processes.wait_for_http(f"{self.inference_url}/health", 120)
        return process

    def use_inference(self, url: str, **behaviour: Any) -> None:
        """The stand-in that tests share, set to answer in this way."""
        self.inference_url = url
        self.control(**(inference_standin.CONTROLLED | behaviour))

    def start_environment(self, script: str | Path, *flags: str, name: str = "environment") -> Any:
        command = [
            *(sys.executable, str(script), *flags),
            *(
                "--env.rollout_server_url",
                self.service_url,
                "--openai.base_url",
                f"{self.inference_url}/v1",
            ),
        ]
        return self.processes.start(name, command, OFFLINE)

    def control(self, **change: Any) -> None:
        """Change how the stand-in answers."""
        httpx.post(f"{self.inference_url}/control", json=change, timeout=60).raise_for_status()

    def register_trainer(self, num_steps: int, batch_size: int = 32, **more: Any) -> None:
        fields = {
            **{
                "wandb_group": "g",
                "wandb_project": "p",
                "batch_size": batch_size,
                "max_token_len": 512,
            },
            **{
                "checkpoint_dir": str(self.folder),
                "save_checkpoint_interval": 0,
                "starting_step": 0,
                "num_steps": num_steps,
            },
        }
        answer = httpx.post(
            f"{self.service_url}/register", json=fields | more, timeout=60
        ).raise_for_status()
        self.trainer_uuid = answer.json()["uuid"]

    def end_run(self) -> None:
        """Report, as the trainer does after its last step, that the run has ended."""
        body = {"uuid": self.trainer_uuid}
        httpx.post(f"{self.service_url}/run/end", json=body, timeout=60).raise_for_status()

    def next_batch(self) -> list[dict[str, Any]] | None:
        return httpx.get(f"{self.service_url}/batch", timeout=60).json()["batch"] or None

    def take_batches(self, count: int) -> list[list[dict[str, Any]]]:
        """Be the trainer: take that many batches, waiting for them."""
        taken: list[list[dict[str, Any]]] = []

        def probe() -> str | None:
            while len(taken) < count and (batch := self.next_batch()):
                taken.append(batch)
            return None if len(taken) == count else f"{len(taken)} of {count} batches came"

        # Not through the fixture, which takes an environment that has finished for one that has
        # died.
        wait_until(f"{count} batches", probe, 120)
        return taken


@pytest.fixture(scope="session")
def shared_inference(
    session_processes: Any, free_port: Callable[[], int], tokenizer_dir: Path
) -> str:
    """The address of a stand-in that tests share, since it takes seconds to start.

    Tests set its behaviour, none kills it.
    """
    port = free_port()
    command = inference_standin.command(port, tokenizer_dir)
    session_processes.start("inference", command, OFFLINE)
    session_processes.wait_for_http(f"http://127.0.0.1:{port}/health", 120)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def stack(
    processes: Any, free_port: Callable[[], int], tokenizer_dir: Path, tmp_path: Path
) -> Stack:
    return Stack(processes, free_port, tokenizer_dir, tmp_path)
