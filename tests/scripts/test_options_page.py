"""scripts/options_page.py: the page of all options is what the programs print, and help
texts are read.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.options_page import HELP_SECONDS, Option, options_of, table
from tests.conftest import ROOT

pytestmark = pytest.mark.nightly

ARGPARSE = """usage: p [-h] [--port PORT]

Text: with a colon.

positional arguments:
  PART         which (default: all)

options:
  -h, --help   show this
  --port PORT  port (default: 8000)
  --kind {a,b}
               which | kind
               of thing (default: a (see b))

Model:
  --name TEXT  its name (required)
  --bare
"""


def test_options_of_argparse_are_read() -> None:
    assert list(options_of(ARGPARSE)) == [
        Option("positional arguments", "PART", "all", "which"),
        Option("options", "-h, --help", "", "show this"),
        Option("options", "--port PORT", "8000", "port"),
        Option("options", "--kind {a,b}", "a (see b)", "which | kind of thing"),
        Option("Model", "--name TEXT", "required", "its name"),
        Option("Model", "--bare", "", ""),
    ]


def test_a_bar_does_not_end_a_cell() -> None:
    assert (
        table([Option("", "--kind", "a|b", "one | two")]).splitlines()[-1]
        == r"| `--kind` | `a\|b` | one \| two |"
    )


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="argparse prints help in another form in later versions of Python",
)
@pytest.mark.timeout(HELP_SECONDS + 60)
def test_the_page_is_what_the_programs_print() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.options_page", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HELP_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
