"""The archive of rollouts: every list against a sorted one, bounds, the search, and the trainer's
reports.
"""

from __future__ import annotations

import base64
import math
import sqlite3
import struct
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.dashboard.rollouts import archive as archive_module
from atroposlib.dashboard.rollouts.archive import (
    ORDERS,
    Archive,
    ArchiveError,
    NoSuchError,
    Position,
    PostedGroup,
)
from atroposlib.dashboard.rollouts.rollout_stats import Parity, TrainerReport

PLACES = st.sampled_from(["", "sums", "code"])
SCORES = st.sampled_from([-1.0, 0.0, 0.1, 1.0])
GROUPS = st.lists(
    st.tuples(PLACES, st.lists(st.tuples(SCORES, st.integers(1, 4)), min_size=1, max_size=4)),
    max_size=12,
)


KERNELS = {
    "trainer": {"plan": "parts 1"},
    "servers": {"http://a:9001": {"kernels": {"plan": "parts 1"}, "checks": 30, "seconds": 2.5}},
}


def body(*rollouts: tuple[float, int], **more: Any) -> bytes:
    """A group of rollouts: score and number of sampled tokens each, behind a prompt of two."""
    rows = [[5, 6, *range(10, 10 + length)] for _, length in rollouts]
    group = {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": [score for score, _ in rollouts],
        "inference_logprobs": [[1.0, 1.0, *[-0.5] * length] for _, length in rollouts],
    }
    return orjson.dumps(group | more)


def encoded(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def reported(sequence: int, *logprobs: float, trained: int | None = None, version: int = 3) -> Any:
    told = {
        "group": 0,
        "sequence": sequence,
        "trained": len(logprobs) if trained is None else trained,
        "logprobs": encoded(*logprobs),
        "entropies": encoded(*[0.25] * len(logprobs)),
        "advantages": 1.5,
    }
    report = TrainerReport.model_validate({"weight_version": version, "sequences": [told]})
    return next(report.trained_tokens())[2]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "rollouts.db")


def all_of(source: Archive, limit: int, **asked: Any) -> list[dict[str, Any]]:
    """A whole list, a page at a time."""
    found, position = [], None
    while True:
        page = source.listed(after=position, limit=limit, **asked)
        assert len(page.rollouts) <= limit
        found += page.rollouts
        if page.next is None:
            return found
        position = Position.parse(str(page.next))


@settings(max_examples=25, deadline=None)
@given(
    groups=GROUPS,
    limit=st.integers(1, 7),
    environment=st.none() | PLACES,
    drifts=st.lists(st.integers(0, 3), max_size=12),
)
def test_every_list_is_whole_and_in_order_whatever_its_pages(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[Any],
    limit: int,
    environment: str | None,
    drifts: list[int],
) -> None:
    archive = Archive(tmp_path_factory.mktemp("a") / "rollouts.db")
    expected: list[dict[str, Any]] = []
    with archive.transaction():
        for seq, (place, rollouts) in enumerate(groups):
            group = archive.add(PostedGroup(seq, float(seq), place, body(*rollouts)))
            rows = [
                {
                    "score": score,
                    "sampled": length,
                    "environment": place,
                    "group": group,
                    "rollout": index,
                    "drift": None,
                }
                for index, (score, length) in enumerate(rollouts)
            ]
            if seq < len(drifts):
                archive.add_trained(
                    group, [(0, reported(0, *[-0.5 - drifts[seq]] * rollouts[0][1]))]
                )
                rows[0]["drift"] = float(drifts[seq])
            expected += rows
    newest = [
        row
        for row in reversed(expected)
        if environment is None or row["environment"] == environment
    ]
    wanted = {
        "newest": newest,
        "best": sorted(newest, key=lambda row: -row["score"]),
        "worst": sorted(newest, key=lambda row: row["score"]),
        "longest": sorted(newest, key=lambda row: -row["sampled"]),
        "drifted": sorted(
            (row for row in newest if row["drift"] is not None), key=lambda row: -row["drift"]
        ),
    }
    source = Archive(archive.path, read_only=True)
    for order in ORDERS:
        found = all_of(source, limit, order=order, environment=environment)
        assert [
            {name: head[name] for name in row}
            for head, row in zip(found, wanted[order], strict=True)
        ] == wanted[order]
    assert source.total() == len(expected)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30), most=st.integers(1, 20))
def test_the_newest_groups_stay_within_the_bounds(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int
) -> None:
    path = tmp_path_factory.mktemp("a") / "rollouts.db"
    archive = Archive(path, most_rollouts=most)
    for seq, size in enumerate(sizes):
        if seq % 7 == 3:  # as when the service is started again
            archive.close()
            archive = Archive(path, most_rollouts=most)
        with archive.transaction():
            archive.add(PostedGroup(seq, 0.0, "", body(*[(0.0, 1)] * size)))
    kept: list[int] = []
    while len(kept) < len(sizes) and (not kept or sum(sizes[len(sizes) - 1 - len(kept) :]) <= most):
        kept.append(len(sizes) - 1 - len(kept))
    source = Archive(path, read_only=True)
    assert source.total() == sum(sizes[seq] for seq in kept)
    with sqlite3.connect(path) as connection:
        assert [
            seq for (seq,) in connection.execute("SELECT seq FROM groups ORDER BY id DESC")
        ] == kept
        for table in ("rollouts", "texts", "trained"):
            (low,) = connection.execute(f"SELECT min(id) FROM {table}").fetchone()
            assert low is None or low > sum(sizes) - sum(sizes[seq] for seq in kept)


def test_bytes_are_bounded_too_with_what_the_trainer_told(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "rollouts.db", most_bytes=20_000)
    for seq in range(60):
        with archive.transaction():
            group = archive.add(PostedGroup(seq, 0.0, "", body((0.0, 40))))
            archive.add_trained(group, [(0, reported(0, *[-0.5] * 40))])
    with sqlite3.connect(archive.path) as connection:
        (held,) = connection.execute("SELECT sum(n_bytes) FROM groups").fetchone()
    assert 15_000 < held <= 20_000
    assert (tmp_path / "rollouts.db").stat().st_size < 400_000


def test_names_without_end_are_told_apart_up_to_a_bound(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "MAX_ENVIRONMENTS", 3)
    with archive.transaction():
        for seq in range(10):
            archive.add(PostedGroup(seq, 0.0, f"env {seq}", body((0.0, 1))))
    source = Archive(archive.path, read_only=True)
    assert source.environments() == ["env 0", "env 1", "env 2", "others"]
    assert len(source.listed(environment="others").rollouts) == 7


def test_a_text_is_found_in_any_case_and_a_search_goes_on_where_its_time_ended(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    with archive.transaction():
        for seq in range(30):
            talk = [
                [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": f"Answer {seq} % of_all"},
                ]
            ]
            archive.add(
                PostedGroup(
                    seq, 0.0, "", orjson.dumps({"messages": talk, "scores": [float(seq % 3)]})
                )
            )
    monkeypatch.setattr(archive_module, "SEARCHED_AT_ONCE", 7)
    source = Archive(archive.path, read_only=True, seconds=0.0)
    first = source.listed(text="answer 1 ")
    assert (first.rollouts, first.searched, first.next is None) == ([], 7, False)
    for order in "newest", "best":
        assert [head["group"] for head in all_of(source, 50, text="ANSWER 1 ", order=order)] == [2]
        assert [
            head["group"]
            for head in all_of(source, 50, text="answer 1 ", order=order, environment="")
        ] == [2]
    for limit in 1, 3, 7, 50:
        assert [head["group"] for head in all_of(source, limit, text="of_all")] == list(
            range(30, 0, -1)
        )
    assert len(all_of(source, 4, text="% OF_ALL", order="best")) == 30, (
        "signs of a pattern are letters like others"
    )
    assert all_of(source, 50, text="_1_") == []
    assert (
        Archive(archive.path, read_only=True)
        .listed(text="answer 7 ")
        .rollouts[0]["preview"]
        .startswith("Answer 7 %")
    )


@pytest.mark.parametrize("text", ["", "x~1", "nan~1", "1~-1", "1", "1~" + "9" * 30])
def test_a_text_that_is_not_a_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        Position.parse(text)


def test_a_group_comes_back_as_it_was_with_what_the_trainer_told(archive: Archive) -> None:
    posted = body((1.0, 3), (0.0, 2), weight_versions=[4, 5], finish_reasons=["stop", None])
    with archive.transaction():
        group = archive.add(PostedGroup(7, 123.5, "sums", posted))
        archive.add_trained(
            group, [(0, reported(0, -0.5, -1.5, trained=3)), (9, reported(9, -1.0))]
        )
    source = Archive(archive.path, read_only=True)
    kept = source.group(group)
    assert (kept.seq, kept.time, kept.environment, kept.content) == (
        7,
        123.5,
        "sums",
        orjson.loads(posted),
    )
    told = [
        (head["oldest"], head["finish_reason"], head["drift"], head["trained_version"])
        for head in kept.heads
    ]
    assert told == [(4, "stop", 0.5, 3), (5, "", None, None)]
    assert archive.group_of(7) == group
    trained = source.trained(kept.first)
    assert trained is not None
    assert (trained.trained, trained.logprobs.tolist(), trained.advantages.tolist()) == (
        3,
        [-0.5, -1.5],
        [1.5, 1.5],
    )
    assert source.trained(kept.first + 1) is None
    with pytest.raises(NoSuchError, match="group 99 is not kept: groups 1 to 1 are"):
        source.group(99)


def test_what_was_compared_bit_for_bit_is_kept_and_the_first_difference_leads_to_its_group(
    archive: Archive,
) -> None:
    assert Archive(archive.path, read_only=True).parity() is None
    first = {
        "weight_version": 2,
        "group": 1,
        "sequence": 0,
        "position": 3,
        "token": 12,
        "sampled": -0.5,
        "recomputed": -0.6,
    }
    with archive.transaction():
        groups = [archive.add(PostedGroup(seq, 0.0, "", body((0.0, 2)))) for seq in (40, 41)]
        for version, mismatched, found in ((1, 0, None), (2, 1, first), (3, 0, first)):
            told = {
                "weight_version": version,
                "compared": 10,
                "mismatched": mismatched,
                "compared_in_all": 10 * version,
            }
            told |= {"mismatched_in_all": int(version > 1), "first": found}
            told |= {"older": 2, "older_in_all": 2 * version}
            if version == 1:  # the later reports have the same ones, and leave them out
                told["kernels"] = KERNELS
            archive.add_parity(Parity.model_validate(told), [40, 41])
    parity = Archive(archive.path, read_only=True).parity()
    assert parity is not None
    assert (parity["compared"], parity["mismatched"], parity["older"]) == (30, 1, 6)
    assert parity["kernels"] == KERNELS
    assert (parity["first"]["group"], parity["first"]["batch_group"], parity["first"]["text"]) == (
        groups[1],
        1,
        "12",
    )


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "rollouts.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
    before = other.read_bytes()
    for read_only in (False, True):
        with pytest.raises(
            ArchiveError, match=r"rollouts\.db is not an archive of rollouts of format 2"
        ):
            Archive(other, read_only=read_only)
    assert other.read_bytes() == before


@settings(max_examples=40)
@given(
    st.recursive(
        st.none()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.just(encoded(-1.0, math.nan)),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "weight_version",
                        "sequences",
                        "group",
                        "sequence",
                        "trained",
                        "logprobs",
                        "entropies",
                    ]
                ),
                inner,
            )
        ),
        max_leaves=20,
    )
)
def test_a_report_of_any_kind_is_read_or_refused(report: Any) -> None:
    try:
        found = list(TrainerReport.model_validate(report).trained_tokens())
    except (ValueError, OverflowError):
        return
    assert all(
        len(trained.logprobs) == len(trained.advantages) <= trained.trained
        for _, _, trained in found
    )
