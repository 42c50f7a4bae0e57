"""Every trainer command of the project's pages, and the memory plan's answer to each of them on
cards of three sizes.

python -m tests.example_trainer.training.documented_commands     prints the table of docs/your-model.md
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from example_trainer import command_line
from example_trainer.async_grpo.settings import check_trainer, read_settings
from example_trainer.config import TrainerConfig
from example_trainer.launcher import options as stack_options
from example_trainer.launcher.stack import Stack
from example_trainer.training import memory_choice
from example_trainer.training.memory_choice import MemoryChoice, choose_memory
from example_trainer.training.memory_plan import MemoryShortage
from example_trainer.weight_bridge.base import NoBridge, WeightBridge
from example_trainer.weight_bridge.server import BridgeServer
from example_trainer.weight_bridge.server_gpus import ServerGpus
from example_trainer.weight_bridge.single_copy import SingleCopyBridge
from tests.example_trainer.training.model_configs import MODEL_CONFIGS
from vllm_patching.protocol.manifest import Manifest, ManifestEntry, dtype_name
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards

ROOT = Path(__file__).resolve().parents[3]
GPU, GIB = torch.device("cuda", 0), 2**30
CARDS = {"80 GB": (79.2, 78.6), "141 GB": (139.8, 139.2), "183 GB": (178.4, 177.8)}
"""GiB in all and free, as an H100, an H200 and a B200 report them before a training."""
DEFAULT_SHARE = memory_choice.DEFAULT_SHARE
START, END = "<!-- what fits -->", "<!-- end of what fits -->"
"""Around the table in docs/your-model.md."""


@dataclass(frozen=True)
class Documented:
    """A command that starts a trainer.

    Attributes:
        page: the file that it stands in.
        config: the trainer's options.
        ranks: the trainer's processes, one for each of its GPUs.
        server_ranks: vLLM's tensor-parallel degree.
        share: of its GPU that vLLM has.
        own_gpus: whether trainer and vLLM have different GPUs.
    """

    page: str
    config: TrainerConfig
    ranks: int = 1
    server_ranks: int = 1
    share: float = DEFAULT_SHARE
    own_gpus: bool = True

    @property
    def single_copy(self) -> bool:
        """Return whether the trainer's weights are vLLM's memory. Without a flag, GPUs decide."""
        config = self.config
        alone = (
            config.weight_bridge_mode == "shared_vllm"
            and not self.own_gpus
            and not config.use_shared_memory
        )
        return config.single_copy or (alone and self.ranks == 1)

    @property
    def way(self) -> str:
        """The mode, in a word or two."""
        config = self.config
        if config.colocate:
            return "in turns"
        if config.weight_bridge_mode == "shared_vllm":
            return "single copy" if self.single_copy else "broadcast"
        if config.weight_bridge_mode == "none":
            return "restarts" if config.starts_vllm else "checkpoints alone"
        return {"lora_only": "LoRA", "parameter_server": "parameter server"}[
            config.weight_bridge_mode
        ]


def logical_lines(text: str) -> Iterator[str]:
    """Return the lines of a page without comment signs and prompts, lines joined that end with a
    backslash; and the text `in backticks`.
    """
    joined = re.sub(r"\\\n\s*#?\s*", " ", text)
    for line in joined.splitlines():
        whole = line.strip().removeprefix("#").strip()
        spans = re.findall(r"`([^`]+)`", line)
        yield from spans or [
            whole.removeprefix('echo "').removesuffix('"') if whole.startswith('echo "') else whole
        ]


def command_words(line: str) -> list[str]:
    """The words of a command without what follows it: redirections, pipes, comments."""
    line = re.split(r"\s(?:>|2>|\||&|#)", line + " ")[0]
    try:
        return shlex.split(line)
    except ValueError:
        return []


def is_placeholder(words: Sequence[str]) -> bool:
    """Return whether a command is the pattern of one, such as `grpo.py …`."""
    return (
        any(
            word in ("…", "...", "FILE", "N", "--help") or word.startswith("host:")
            for word in words
        )
        or len(words) < 3
    )


def read_page(path: Path, name: str) -> list[Documented]:
    """The trainer commands of a page, in their order."""
    found: list[Documented] = []
    server: dict[str, Any] = {}
    for line in logical_lines(path.read_text(encoding="utf-8")):
        words = command_words(line)
        if any(word.endswith("vllm_api_server.py") for word in words):
            flags = dict(pairwise(words))
            server = {"server_ranks": int(flags.get("--tensor-parallel-size", 1))}
            server["share"] = float(flags.get("--gpu-memory-utilization", DEFAULT_SHARE))
        found += one_command(words, name, server)
    return found


def one_command(words: Sequence[str], page: str, server: Mapping[str, Any]) -> list[Documented]:
    """The trainer command that the words are; nothing if they are something else."""
    program = next(
        (
            n
            for n, word in enumerate(words)
            if word.endswith(("example_trainer/grpo.py", "scripts/start.sh"))
        ),
        None,
    )
    if program is None:
        driver = (
            "example_trainer.async_grpo" in words
            and "--config" in words
            and not is_placeholder(words)
        )
        return [asynchronous(ROOT / words[words.index("--config") + 1], page)] if driver else []
    before, arguments = words[:program], list(words[program + 1 :])
    if words[program].endswith("start.sh"):
        return [started(arguments, page)] if "--model" in arguments else []
    if not {"python", "python3", "torchrun"} & set(before) or is_placeholder(
        arguments if "--config" not in arguments else ["", "", *arguments]
    ):
        return []
    gpus = next(
        (
            word.partition("=")[2].split(",")
            for word in before
            if word.startswith("CUDA_VISIBLE_DEVICES=")
        ),
        [],
    )
    # A page's example of a function of the user's own is not on this machine.
    with at_root(), mock.patch.object(command_line, "find_advantages"):
        config = command_line.parse_config(arguments)
    one_process = config.weight_bridge_mode in ("none", "lora_only")
    ranks = int(before[before.index("--nproc-per-node") + 1]) if "torchrun" in before else len(gpus)
    return [
        Documented(page, config, 1 if one_process else max(1, ranks), own_gpus=bool(gpus), **server)
    ]


def started(arguments: Sequence[str], page: str) -> Documented:
    """The trainer that start.sh starts on a machine of eight GPUs."""
    with (
        mock.patch.object(stack_options, "visible_gpus", return_value=tuple(range(8))),
        mock.patch.object(stack_options, "check_model", side_effect=str),
        mock.patch.object(
            Path, "is_file", return_value=True
        ),  # an environment that the page has the reader write
    ):
        options = stack_options.parse(arguments)
    stack = Stack(options)
    words = stack.trainer().arguments
    config = command_line.parse_config(words[words.index("example_trainer/grpo.py") + 1 :])
    share = float(
        dict(pairwise(stack.vllm().arguments)).get("--gpu-memory-utilization", DEFAULT_SHARE)
    )
    own_gpus = not set(options.vllm_gpus) & set(options.trainer_gpus)
    return Documented(
        page,
        config,
        len(options.trainer_gpus),
        len(options.vllm_gpus) // options.servers,
        share,
        own_gpus,
    )


def asynchronous(file: Path, page: str) -> Documented:
    """The trainer of a configuration for Ray."""
    settings = read_settings(file)
    flags = settings.inference.server_args
    words = shlex.split(flags) if isinstance(flags, str) else list(flags)
    share = float(dict(pairwise(words)).get("--gpu-memory-utilization", DEFAULT_SHARE))
    config, asked = check_trainer(settings, file), settings.orchestration
    return Documented(
        page,
        config,
        asked.trainer_ranks,
        settings.inference.tensor_parallel_size,
        share,
        not settings.shares_gpus,
    )


@contextmanager
def at_root() -> Iterator[None]:
    """Commands are typed in the repository."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def pages() -> dict[str, Path]:
    """The project's pages and configurations, by the name that the table shows."""
    files = [
        ROOT / "README.md",
        ROOT / "example_trainer/README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "example_trainer/configs").glob("*.yaml")),
    ]
    return {
        str(path.relative_to(ROOT)).removeprefix("example_trainer/configs/"): path for path in files
    }


def guide() -> Path | None:
    """The users' guide, where it lies beside the repository."""
    return next(iter(sorted((ROOT.parent / "shared" / "seeds").glob("002*.txt"))), None)


def documented() -> list[Documented]:
    """Every trainer command of the pages that names a model of the hub."""
    found = [command for name, path in pages().items() for command in read_page(path, name)]
    return [command for command in found if command.config.model_name in MODEL_CONFIGS]


class _Broadcast(NoBridge):
    """Sends to servers of these ranks, or starts one on the trainer's GPU."""

    def __init__(self, manifests: tuple[Manifest, ...], starts_server: bool) -> None:
        super().__init__()
        self._manifests, self._starts = manifests, starts_server

    def layouts(self) -> tuple[tuple[Manifest, ...], ...]:
        return (self._manifests,) if self._manifests else ()

    def place_server(self, device: torch.device, geometry: Geometry) -> ServerGpus | None:
        return ServerGpus(("0",), 1, "0") if self._starts else None


def bridge_of(command: Documented, total: float) -> WeightBridge:
    """As the trainer would make it for this command, beside a server that is not there."""
    config, model = command.config, MODEL_CONFIGS[command.config.model_name]
    if command.single_copy:
        bridge = SingleCopyBridge(cast(BridgeServer, None))
        if config.colocate:
            weights = 2 * sum(p.numel() for p in _parameters(model))
            bridge.lent_bytes = int(command.share * total * GIB) - weights - memory_choice.WORKSPACE
        return bridge
    manifests: list[Manifest] = []
    if config.weight_bridge_mode in ("shared_vllm", "parameter_server"):
        shape, ranks = Geometry.from_config(model), command.server_ranks
        if config.weight_bridge_mode == "parameter_server":
            ranks = 1
        for rank in range(ranks):
            entries = (
                ManifestEntry(spec, dtype_name(torch.bfloat16), "cuda")
                for spec in plan_shards(shape, rank, ranks)
            )
            manifests.append(Manifest(rank, ranks, tuple(entries)))
    return _Broadcast(tuple(manifests), config.weight_bridge_mode == "none" and config.starts_vllm)


def _parameters(model: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    shape = Geometry.from_config(dict(model))
    return (torch.empty(spec.full_shape, device="meta") for spec in plan_shards(shape, 0, 1))


def plan(
    command: Documented,
    card: str,
    host: float = 10**6,
    cards: Mapping[str, tuple[float, float]] = CARDS,
) -> MemoryChoice | MemoryShortage:
    """The trainer's own choice, or its refusal, for a command on a card.

    Args:
        host: GiB of free host memory.
        cards: the sizes of cards, by their names.
    """
    total, free = cards[card]
    # A server with the default share leaves a trainer no memory: such a page means another GPU.
    if command.single_copy or (not command.own_gpus and command.share < DEFAULT_SHARE):
        free -= command.share * total
    model = MODEL_CONFIGS[command.config.model_name]
    sizes = (int(free * GIB), int(total * GIB))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "config.json").write_text(json.dumps(model))
        ranks = {"WORLD_SIZE": str(command.ranks), "LOCAL_WORLD_SIZE": str(command.ranks)}
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        stack.enter_context(mock.patch.object(memory_choice, "free_memory", return_value=sizes))
        stack.enter_context(
            mock.patch.object(memory_choice, "free_host_memory", return_value=(int(host * GIB), 0))
        )
        stack.enter_context(mock.patch.object(memory_choice, "memory_of_gpus", return_value={}))
        config = command.config.model_copy(update={"model_name": folder})
        try:
            return choose_memory(config, bridge_of(command, total), torch.bfloat16, GPU)
        except MemoryShortage as shortage:
            return shortage


def outcome(
    command: Documented, card: str, cards: Mapping[str, tuple[float, float]] = CARDS
) -> str:
    """The plan's answer in a few words."""
    answer = plan(command, card, cards=cards)
    if isinstance(answer, MemoryShortage):
        remedy = re.search(
            r"what helps: (start vLLM with --gpu-memory-utilization [\d.]+ or less|.*?(?= \())",
            str(answer),
        )
        return f"no: {remedy[1]}" if remedy else "no"
    ways = ["offloaded"] * answer.offload + ["recomputed"] * answer.gradient_checkpointing
    given = command.config.gradient_checkpointing
    if given and not answer.offload:
        ways = []
    return " and ".join(ways) or "as it is"


def shown(answer: str) -> str:
    """A cell of the page's tables: short words for a plan's answer."""
    return {"as it is": "yes", "offloaded and recomputed": "both"}.get(answer, answer)


def table(commands: Sequence[Documented]) -> str:
    """One row for each different command that does not fit as it is on every card; equal ones of
    several pages share it.
    """
    pages: dict[tuple[str, ...], dict[str, None]] = {}
    for command in commands:
        name = command.config.model_name.partition("/")[2].removesuffix("-Instruct")
        gpus = f"{command.ranks} GPU" + "s" * (command.ranks > 1)
        outcomes = [outcome(command, card) for card in CARDS]
        if any(answer != "as it is" for answer in outcomes):
            pages.setdefault((name, f"{command.way}, {gpus}", *map(shown, outcomes)), {})[
                command.page
            ] = None
    heads = ["pages", "model", "trainer", *CARDS]
    lines = [
        heads,
        ["---"] * len(heads),
        *([", ".join(names), *row] for row, names in pages.items()),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written_table() -> str:
    """The table as docs/your-model.md has it."""
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    return text.partition(START)[2].partition(END)[0].strip()


if __name__ == "__main__":
    print(table(documented()))
