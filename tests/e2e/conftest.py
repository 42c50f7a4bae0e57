"""A tiny model on disk, and real servers that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import Processes
from tests.headless_browser import browser, visit

__all__ = ["browser", "visit"]

FORKED_ENGINES = {
    "PYTHONPATH": str(Path(__file__).with_name("forked_engines")),
    "TORCH_COMPILE_DISABLE": "1",
}
"""In the environment of a server that is executed: it forks its engine. Otherwise vLLM would
execute a second process that imports all of it again. The second variable is one that
vllm_api_server.py sets too late for PyTorch in a forked process. test_wheel.py leaves all that to
vLLM.
"""
CACHE = ("--num-gpu-blocks-override", "256")
"""For keys and values of 32,768 tokens. A worker writes zeros into its whole cache, which took half
of its start."""
NEEDS_RAY = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: scripts/setup.sh installs it"
)
SERVER_SECONDS = 240.0
BRIDGE_TIMEOUT = 20.0
"""Seconds; short, because a test waits for it to pass, and longer than a busy machine holds up a
step of an update."""


@pytest.fixture(autouse=True)
def own_master_port(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's trainer meets another test's at the default port."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


@dataclass
class VllmServer:
    """A running vllm_api_server.py."""

    url: str
    port: int
    model: Path
    process: ManagedProcess
    folder: Path

    def generate(self, prompt: list[int], **parameters: object) -> dict[str, list]:  # type: ignore[type-arg]
        response = httpx.post(
            f"{self.url}/generate",
            json={"prompt": {"prompt_token_ids": prompt}, **parameters},
            timeout=120,
        )
        assert response.status_code == 200, response.text
        answer: dict[str, list] = response.json()  # type: ignore[type-arg]
        return answer

    def state(self) -> dict[str, object]:
        answer: dict[str, object] = httpx.get(f"{self.url}/bridge/state", timeout=120).json()
        return answer

    @property
    def log(self) -> str:
        return self.process.log_path.read_text(errors="replace")


def make_tiny_model(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A random Qwen3 of 0.4 M parameters with a tokenizer of single bytes, saved as transformers
    saves it.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=301,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=257,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """Give a model of at least 258 tokens a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary | {"<|im_start|>": 256, "<|im_end|>": 257}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(
        folder
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")


def vllm_command(model: Path, port: int, *flags: str) -> list[str]:
    return roles.vllm_server(model, port, [*CACHE, *flags])


def trainer_command(
    model: Path,
    service_url: str,
    folder: Path,
    *flags: str,
    bridge: str | None = "single-copy",
    **options: roles.Value,
) -> list[str]:
    """The command of a trainer whose logs and checkpoints are in the folder; see roles.trainer."""
    options = {"save_path": folder / "checkpoints", "log_dir": folder / "trainer", **options}
    return [*roles.trainer(model, bridge, service_url, options), *flags]


def start_vllm(
    processes: Processes,
    free_port: Callable[[], int],
    model: Path,
    folder: Path,
    shared: bool = True,
    flags: tuple[str, ...] = (),
    ready: str = "/health_generate",
) -> VllmServer:
    """Start a server and wait until it generates, or until it answers `ready`."""
    port = free_port()
    environment = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1" if shared else None,
        "LOGDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    environment["LOCKSTEP_TIMELINE"] = str(folder)
    process = processes.start("vllm", vllm_command(model, port, *flags), environment=environment)
    url = f"http://localhost:{port}"
    processes.wait_for_http(f"{url}{ready}", SERVER_SECONDS)
    return VllmServer(url, port, model, process, folder)


@pytest.fixture(scope="module")
def module_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("module-logs"))
    with started.supervisor:
        yield started


@pytest.fixture(scope="module")
def server(
    module_processes: Processes,
    free_port: Callable[[], int],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmServer:
    """A server that shares its weights, tensor-parallel degree 1."""
    folder = tmp_path_factory.mktemp("vllm")
    return start_vllm(
        module_processes,
        free_port,
        tiny_model,
        folder,
        flags=("--bridge-timeout", str(BRIDGE_TIMEOUT)),
    )
