"""Each trainer command of the pages, the configurations and the guide is planned on cards of 80,
141 and 183 GB.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from example_trainer.training.memory_choice import MemoryChoice
from example_trainer.training.memory_plan import (
    MemoryRequest,
    MemoryShortage,
    host_bytes,
    parameter_count,
)
from tests.example_trainer.training.documented_commands import (
    CARDS,
    GIB,
    ROOT,
    Documented,
    documented,
    guide,
    outcome,
    pages,
    plan,
    read_page,
    table,
    written_table,
)
from tests.example_trainer.training.documented_sizes import sizes_table, written_sizes
from tests.example_trainer.training.memory_cases import request
from tests.example_trainer.training.model_configs import MODEL_CONFIGS, PARAMETERS
from vllm_patching.weights.families import Geometry

pytestmark = pytest.mark.nightly

HEADLINE = "Qwen/Qwen2.5-14B-Instruct"


@pytest.fixture(scope="module")
def commands() -> list[Documented]:
    return documented()


def on_page(commands: list[Documented], page: str) -> list[Documented]:
    return [
        command
        for command in commands
        if command.page == page and command.config.model_name == HEADLINE
    ]


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_the_sizes_are_those_of_the_published_models(name: str) -> None:
    found = parameter_count(Geometry.from_config(MODEL_CONFIGS[name], name))
    assert found == pytest.approx(PARAMETERS[name], rel=0.01)


def test_every_command_of_the_pages_is_found(commands: list[Documented]) -> None:
    """A page that is added, or a command that the reader of pages no longer sees, changes these
    numbers.
    """
    assert Counter(command.page for command in commands) == {
        "README.md": 2,
        "example_trainer/README.md": 5,
        "docs/algorithms.md": 2,
        "docs/async.md": 1,
        "docs/determinism.md": 1,
        "docs/fleet.md": 1,
        "docs/lora.md": 1,
        "docs/mixtures.md": 1,
        "docs/operations.md": 2,
        "docs/parameter-server.md": 1,
        "docs/restarts.md": 1,
        "docs/several-gpus.md": 5,
        "docs/several-machines.md": 3,
        "docs/start.md": 2,
        "docs/weight-bridge.md": 1,
        "docs/your-environment.md": 1,
        "docs/your-loss.md": 1,
        "docs/your-model.md": 1,
        "grpo_sync.yaml": 1,
        "gsm8k_shared_vllm.yaml": 1,
        "qwen3b_async_grpo.yaml": 1,
    }
    every = [command for name, path in pages().items() for command in read_page(path, name)]
    others = {command.config.model_name for command in every} - set(MODEL_CONFIGS)
    made_here = {"assets/starter_model", "runs/mixture"}
    assert others == made_here, "give the sizes of a new model in model_configs.py"


def test_the_page_says_what_the_plan_does(commands: list[Documented]) -> None:
    """`python -m tests.example_trainer.training.documented_commands` prints the table that belongs
    there.
    """
    assert written_table() == table(commands)


def test_the_page_of_models_has_the_plans_answer_for_every_size() -> None:
    """`python -m tests.example_trainer.training.documented_sizes` prints the table that belongs
    there.
    """
    assert written_sizes() == sizes_table()


@pytest.mark.parametrize("card", ["141 GB", "183 GB"])
def test_every_command_runs_on_cards_of_141_gb_and_more(
    commands: list[Documented], card: str
) -> None:
    assert {
        command.page: outcome(command, card)
        for command in commands
        if isinstance(plan(command, card), MemoryShortage)
    } == {}


def test_the_headline_run_fits_on_one_gpu_and_says_so_where_it_does_not(
    commands: list[Documented],
) -> None:
    """Step 8 of the launch sequence, start.sh and the configuration: one trainer process, one GPU,
    no further flag.
    """
    headline = [
        *on_page(commands, "example_trainer/README.md")[:1],
        *on_page(commands, "docs/operations.md"),
    ]
    headline += on_page(commands, "gsm8k_shared_vllm.yaml")
    assert len(headline) == 3
    for command in headline:
        assert (command.ranks, command.server_ranks, command.way) == (
            1,
            2,
            "broadcast",
        ) or command.page.endswith(".yaml")
        for card in ("141 GB", "183 GB"):
            choice = plan(command, card)
            assert isinstance(choice, MemoryChoice)
            assert (choice.offload, choice.gradient_checkpointing) == (True, False)
        # The page: more host memory than that, or 8-bit moments; with cards of 80 GB two or more of
        # them.
        refusal = str(plan(command, "141 GB", host=120))
        assert "need 165.07 GiB, and 120.00 are free" in refusal
        assert "what helps: --optimizer adamw-8bit (" in refusal
        small = with_options(command, optimizer="adamw-8bit")
        assert isinstance(plan(small, "141 GB", host=120), MemoryChoice)
        assert "2 GPUs (" in str(plan(command, "80 GB"))
        for ranks in (2, 4):
            assert isinstance(plan(replace(command, ranks=ranks), "80 GB"), MemoryChoice)


def test_the_sizes_in_the_text_are_those_of_the_plan(commands: list[Documented]) -> None:
    text = {
        page: (ROOT / page).read_text(encoding="utf-8")
        for page in ("example_trainer/README.md", "docs/your-model.md")
    }
    host = {
        (name, optimizer): round(host_bytes(offloaded(name, optimizer)) / GIB)
        for name in ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-3B-Instruct")
        for optimizer in ("adamw", "adamw-8bit")
    }
    large = host[HEADLINE, "adamw"], host[HEADLINE, "adamw-8bit"]
    sizes = large[0], host["Qwen/Qwen3-8B", "adamw"], host["Qwen/Qwen2.5-3B-Instruct", "adamw"]
    expected = "{} GiB for Qwen2.5-14B, {} GiB for Qwen3-8B, {} GiB for Qwen2.5-3B".format(*sizes)
    assert expected in " ".join(text["docs/your-model.md"].split())
    assert f"half of that: {large[1]} GiB for Qwen2.5-14B" in text["docs/your-model.md"]
    assert f"It needs {large[0]} GiB there" in " ".join(text["example_trainer/README.md"].split())
    launch = " ".join(text["example_trainer/README.md"].split())
    assert f"`--optimizer adamw-8bit`, which needs {large[1]} GiB" in launch
    whole = str(
        plan(
            with_options(
                on_page(commands, "example_trainer/README.md")[0],
                optimizer_offload=False,
                gradient_checkpointing=False,
            ),
            "141 GB",
        )
    )
    needed = float(whole.partition("needs about ")[2].split()[0])
    assert f"need {int(needed)} GiB on one GPU" in text["example_trainer/README.md"]


def with_options(command: Documented, **options: object) -> Documented:
    return replace(command, config=command.config.model_copy(update=options))


def offloaded(name: str, optimizer: str) -> MemoryRequest:
    shape = Geometry.from_config(MODEL_CONFIGS[name], name)
    return request(geometry=shape, optimizer=optimizer, offload=True)


def test_the_commands_of_several_ranks_fit_on_every_card(commands: list[Documented]) -> None:
    found = on_page(commands, "docs/several-gpus.md")
    assert [(command.way, command.ranks, command.server_ranks) for command in found] == [
        ("broadcast", 2, 2), ("single copy", 4, 4), ("broadcast", 2, 1), ("single copy", 2, 2),
    ]  # fmt: skip
    assert all(isinstance(plan(command, card), MemoryChoice) for command in found for card in CARDS)


def test_the_commands_of_the_readme_fit_on_one_card_and_on_four(commands: list[Documented]) -> None:
    one, four = (command for command in commands if command.page == "README.md")
    assert (one.way, one.ranks, one.own_gpus) == ("single copy", 1, False)
    assert (four.way, four.ranks + four.server_ranks, four.own_gpus) == ("broadcast", 4, True)
    assert all(
        isinstance(plan(command, card), MemoryChoice) for command in (one, four) for card in CARDS
    )


@pytest.fixture(scope="module")
def guided() -> list[Documented]:
    path = guide()
    if path is None:
        pytest.skip("the users' guide is not beside this repository")
    return read_page(path, "guide")


def test_every_command_of_the_guide_is_found(guided: list[Documented]) -> None:
    assert Counter(
        (command.config.model_name.partition("/")[2], command.way) for command in guided
    ) == {
        ("Qwen2.5-14B-Instruct", "broadcast"): 3,
        ("Qwen2.5-14B-Instruct", "single copy"): 1,
        ("Qwen2.5-3B-Instruct", "broadcast"): 1,
        ("Qwen2.5-3B-Instruct", "restarts"): 1,
        ("Qwen2.5-3B-Instruct", "LoRA"): 2,
        ("Qwen2.5-72B-Instruct", "broadcast"): 1,
    }


def test_72b_fits_on_eight_gpus_of_141_gb(guided: list[Documented]) -> None:
    """Four of them cannot hold its float32 masters and gradients; six can, beside two of vLLM."""
    (guide,) = [command for command in guided if "72B" in command.config.model_name]
    config = guide.config.model_copy(update={"optimizer": "adamw-8bit"})
    assert outcome(replace(guide, config=config, ranks=4), "141 GB") == "no: 8 GPUs"
    assert outcome(replace(guide, config=config, ranks=6), "141 GB") == "offloaded and recomputed"


def test_each_command_of_the_guide_runs_or_is_refused_with_what_makes_it_run(
    guided: list[Documented],
) -> None:
    """A single copy beside a vLLM that has 92 % of the GPU, and 72B on two GPUs, cannot fit on any
    of the cards.
    """
    for command in guided:
        for card in CARDS:
            found = outcome(command, card)
            if command.way == "single copy":
                share = float(
                    found.removeprefix("no: start vLLM with --gpu-memory-utilization ").split()[0]
                )
                assert isinstance(plan(replace(command, share=share), card), MemoryChoice)
            elif "72B" in command.config.model_name:
                ranks = int(found.removeprefix("no: ").removesuffix(" GPUs"))
                assert isinstance(plan(replace(command, ranks=ranks), card), MemoryChoice)
            elif "14B" in command.config.model_name:
                assert found == ("no: 2 GPUs" if card == "80 GB" else "offloaded")
            else:
                assert not found.startswith("no")
