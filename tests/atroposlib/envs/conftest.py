"""A byte-level tokenizer with a chat template, and processes that tests start and stop."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[3]
READY_SECONDS = 90.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per byte: every text can be encoded, nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
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
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """Starts processes in the repository and stops exactly those at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def stop_all(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

    def service(self, port: int) -> subprocess.Popen[bytes]:
        """The real rollout service, in memory."""
        process = self.start("-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port), log="api.log")
        self.until_answers(f"http://127.0.0.1:{port}/", process, "api.log")
        return process

    def standin(self, port: int, tokenizer_dir: Path, *extra: str) -> subprocess.Popen[bytes]:
        """The stand-in inference server."""
        script = str(Path(__file__).with_name("standin_server.py"))
        process = self.start(script, "--port", str(port), "--tokenizer", str(tokenizer_dir), *extra, log="standin.log")
        self.until_answers(f"http://127.0.0.1:{port}/health", process, "standin.log")
        return process

    def until_answers(self, url: str, process: subprocess.Popen[bytes], log: str) -> None:
        def answers() -> bool:
            assert process.poll() is None, f"{log}:\n{self.log(log)}"
            try:
                return httpx.get(url, timeout=5.0).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, f"{url} to answer")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = READY_SECONDS) -> Any:
    """Poll until the condition holds; fail with what was waited for when it never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s for {what}")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.stop_all()
