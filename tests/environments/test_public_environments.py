"""Environment files of the public repository run unchanged on our SDK, and what they post is what
the public SDK posts.

The files are never part of this repository: LOCKSTEP_PUBLIC_ENVIRONMENTS names the folder of a
clone, and without it the tests skip. The first run installs the public SDK and what the files
import, which takes minutes. The results of the last whole run are in
bench/results/their_environments.json and in docs/environments.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments.public.cases import CASES, NOT_RUN, Case
from tests.environments.public.run import RESULTS, Bench, judged, started

pytestmark = pytest.mark.nightly

VARIABLE = "LOCKSTEP_PUBLIC_ENVIRONMENTS"
CLONE = os.environ.get(VARIABLE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The clone, the packages and a stand-in model for each SDK."""
    if CLONE is None:
        pytest.skip(f"{VARIABLE} names no clone of the public repository")
    with started(Path(CLONE), tmp_path_factory.mktemp("theirs")) as made:
        yield made


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_public_environment_posts_the_same_with_both_sdks(case: Case, bench: Bench) -> None:
    public, ours = bench.run(case)
    found = judged(case, public, ours)
    told = "\n".join(
        [*found["differences"], *map(str, ours.refused), *map(str, public.refused), ours.log]
    )
    assert found["verdict"] == case.expected, told
    assert not public.refused, "the public SDK's posts reach our service"
    if case.command == "serve" and found["verdict"] == "same":
        assert public.drained, "what the public SDK posted comes out in batches"
        assert ours.drained


def test_the_table_holds_what_was_run() -> None:
    rows = json.loads(RESULTS.read_text())["cases"]
    assert {name: row["verdict"] for name, row in rows.items()} == {
        case.name: case.expected for case in CASES
    }
    assert {name: row["why"] for name, row in rows.items()} == {
        case.name: case.why for case in CASES
    }
    assert len({row["file"] for row in rows.values() if row["verdict"] != "nothing"}) >= 20
    unexplained = [case.name for case in CASES if case.expected != "same" and not case.why]
    assert unexplained == []
    assert not {case.file for case in CASES} & set(NOT_RUN)
