"""Commands and examples of README and the guides: each is parsed, planned, or typed by a test."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from example_trainer.launcher import options as stack_options
from example_trainer.launcher.quickstart import options as quickstart_options
from tests.language import GUIDES, ROOT, documents
from tests.pages import section_of, sections, shell_lines

PAGES = [ROOT / "README.md", ROOT / "example_trainer/README.md"]
PAGES += [path for name in GUIDES if (path := ROOT / "docs" / f"{name}.md").exists()]
TYPED_SECTIONS = {
    (
        "example_trainer/README.md",
        "launch-sequence-step-by-step",
    ): "tests/e2e/test_guide.py",
    (
        "docs/several-machines.md",
        "trainer-and-servers-on-different-hosts",
    ): "tests/e2e/test_hosts.py",
    ("docs/several-machines.md", "on-two-machines"): "tests/e2e/test_ray_hosts.py",
    ("docs/your-loss.md", "your-own-loss"): "tests/e2e/test_your_loss_page.py",
    (
        "docs/your-environment.md",
        "your-own-environment-in-ten-minutes",
    ): "tests/e2e/test_your_environment_page.py",
}
"""Page and heading -> the test that reads the commands below it and types them."""
PLANNED = "tests/example_trainer/training/test_documented_commands.py"
PROVEN = {
    r"\./scripts/(start|quickstart)\.sh( |$)": "tests/test_guide_commands.py",
    r"\./scripts/(status|logs|stop)\.sh$": "tests/e2e/test_operations.py",
    r"\./scripts/test\.sh$": "tests/scripts/test_test_command.py",
    r"\.venv/bin/view-run runs/quickstart$": "tests/atroposlib/cli/test_commands.py",
    r"([A-Z_]+=\S+ )*python (-u )?example_trainer/(vllm_api_server|grpo)\.py ": PLANNED,
    r"pkill -9 -u \"\$\(id -u\)\" -f ": "tests/test_guide_commands.py",
    r"for p in /proc/|tr '\\0' ' ' .*\$p/cmdline|done$": "tests/test_guide_commands.py",
}
"""Pattern of a command -> the test that parses, plans or runs it."""
STARTED = {
    "python -u example_trainer/grpo.py --model-name x": True,
    "python -m atroposlib.cli.run_api": True,
    "/home/me/.venv/bin/run-api --port 8000": True,
    "python environments/gsm8k_server.py serve": True,
    "python -m environments.gsm8k_server": True,
    "python -u example_trainer/vllm_api_server.py": True,
    "python notebook.py": False,
    "vim example_trainer/grpo.py": True,
    "vim notes.txt": False,
}
"""Command lines -> whether the patterns of the page match them."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_the_guides_has_a_test(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    typed = [section for section in sections(page) if (name, section.anchor) in TYPED_SECTIONS]
    text = page.read_text(encoding="utf-8")
    for section in typed:
        test = (ROOT / TYPED_SECTIONS[name, section.anchor]).read_text(encoding="utf-8")
        assert page.name in test, f"{TYPED_SECTIONS[name, section.anchor]} does not read {name}"
        text = text.replace(section.text, "")
    assert len(typed) == sum(of == name for of, _ in TYPED_SECTIONS)
    proofs = {
        line: [test for looks, test in PROVEN.items() if re.match(looks, bare(line))]
        for line in shell_lines(text)
    }
    assert [line for line, tests in proofs.items() if not tests] == []
    assert [
        test for tests in proofs.values() for test in tests if not (ROOT / test).is_file()
    ] == []


def bare(line: str) -> str:
    """Return a command without the comment behind it."""
    return re.sub(r"\s+#\s.*$", "", line)


def script_lines(script: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line of a page's shell blocks that runs a script: the page, and the words behind
    the script.
    """
    for path in documents():
        for line in shell_lines(path.read_text(encoding="utf-8")):
            words = (
                shlex.split(line, comments=True) if line.startswith(f"./scripts/{script}") else []
            )
            if words and not {"--ray", "--help", "--resume"} & set(words):
                yield str(path.relative_to(ROOT)), words[1:]


@pytest.mark.parametrize(
    ("page", "words"), list(script_lines("start.sh")), ids=lambda value: str(value)[:60]
)
def test_every_start_of_the_pages_is_understood(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of eight GPUs, or without any if the line asks for that."""
    monkeypatch.chdir(ROOT)
    with (
        mock.patch.object(stack_options, "visible_gpus", return_value=tuple(range(8))),
        mock.patch.object(stack_options, "check_model", side_effect=str),
        mock.patch.object(
            Path, "is_file", return_value=True
        ),  # an environment that the page has the reader write
    ):
        assert stack_options.parse(words).parts


@pytest.mark.parametrize(
    ("page", "words"), list(script_lines("quickstart.sh")), ids=lambda value: str(value)[:60]
)
def test_every_quick_start_of_the_pages_is_understood(page: str, words: list[str]) -> None:
    with (
        mock.patch.object(quickstart_options, "visible_gpus", return_value=tuple(range(8))),
        mock.patch.object(quickstart_options, "check_model", side_effect=str),
    ):
        assert quickstart_options.parse(words)


def block(page: str, anchor: str, language: str, number: int = 0) -> str:
    """Return a code block of a section, the first one if no number is given."""
    blocks = re.findall(
        rf"```{language}\n(.*?)```", section_of(ROOT / page, anchor).text, re.DOTALL
    )
    assert len(blocks) > number, f"{page}#{anchor} has {len(blocks)} blocks of {language}"
    return str(blocks[number])


def patterns() -> list[str]:
    """The patterns by which the page of failures ends this project's processes, of pkill and of the
    loop over /proc.
    """
    text = section_of(ROOT / "docs/troubleshooting.md", "stop-everything").text
    return [
        *re.findall(r'pkill .* -f "(example_trainer.*?)"', text),
        *re.findall(r'grep -qE "(.*?)"', text),
    ]


def test_the_patterns_match_the_processes_of_this_project() -> None:
    assert len(patterns()) == 2
    for pattern in patterns():
        assert {line: bool(re.search(pattern, line)) for line in STARTED} == STARTED


def test_the_loop_over_processes_finds_one_of_this_project(tmp_path: Path) -> None:
    """Typed as it stands, but that it prints the ids: other processes of this project may run here."""
    loop = block("docs/troubleshooting.md", "stop-everything", "bash", 2)
    assert loop.count("kill -9 ") == 1
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]  # until its input is closed
    with (
        subprocess.Popen([*waiting, "environments/none_server.py"], stdin=subprocess.PIPE) as ours,
        subprocess.Popen(waiting, stdin=subprocess.PIPE) as other,
    ):
        printing = ["bash", "-c", loop.replace("kill -9 ", "echo ")]
        listed = subprocess.run(
            printing, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        for process in (ours, other):
            assert process.stdin is not None
            process.stdin.close()
    found = {int(pid) for pid in listed.stdout.split()}
    assert (ours.pid in found, other.pid in found) == (True, False)
