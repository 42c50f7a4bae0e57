"""Which items are sampled, what is kept of their difficulty, and groups that are made again because
all scores are equal.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.graded import Attempt, Curriculum, Difficulty, GradedEnv, chance, item_key
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.wire import ScoredDataGroup
from tests.atroposlib.envs.scripted_env import ScriptedEnv

SHARE = st.floats(0, 1)
GROUPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=8)


@given(one=SHARE, other=SHARE, floor=SHARE)
def test_the_nearer_to_one_half_the_likelier_an_item_is_taken(
    one: float, other: float, floor: float
) -> None:
    assert floor - 1e-9 <= chance(one, floor) <= 1 + 1e-9
    assert chance(one, floor) == pytest.approx(chance(1 - one, floor))
    if abs(one - 0.5) < abs(other - 0.5):
        assert chance(one, floor) >= chance(other, floor) - 1e-9
    assert chance(0.5, floor) == pytest.approx(1.0)
    assert chance(1.0, floor) == pytest.approx(floor)


@given(
    groups=st.lists(st.tuples(st.integers(0, 8), st.just(8)), max_size=20), last=st.integers(0, 8)
)
def test_the_last_groups_say_most_and_no_item_is_ever_certain(
    groups: list[tuple[int, int]], last: int
) -> None:
    difficulty = Difficulty()
    for right, answers in groups:
        difficulty = difficulty.after(right, answers)
        assert 0 < difficulty.success < 1
    for _ in range(20):
        difficulty = difficulty.after(last, 8)
    assert difficulty.success == pytest.approx((2 * last + 0.5) / 17, abs=1e-4), (
        "whatever was before"
    )
    assert Difficulty().success == 0.5


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=GROUPS, after=GROUPS, cut=st.integers(0, 60))
def test_what_was_measured_outlives_a_kill_and_a_line_that_a_disk_cut_off(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, int]],
    after: list[tuple[str, int]],
    cut: int,
) -> None:
    path = tmp_path_factory.mktemp("run") / "env_checkpoints" / "c.jsonl"

    def noted(*groups: tuple[str, int]) -> dict[str, Difficulty]:
        curriculum = Curriculum(0.1, path)
        for key, right in groups:
            curriculum.note(key, right, 4)
        return dict(curriculum.known)

    assert noted() == {}
    assert noted(*before) == noted(), "another process reads what the first one noted"
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    rest = path.read_bytes()
    left = rest.count(b"\n") + rest.endswith(b"}")  # a line that lacks nothing but its end is read
    assert noted(*after) == noted()
    expected = Curriculum(0.1)
    for key, right in [*before[:left], *after]:
        expected.note(key, right, 4)
    assert noted() == expected.known


def test_lines_of_other_programs_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.jsonl"
    rows = [
        '{"item": "a", "right": 1, "answers": 4}',
        "[]",
        '{"item": "a", "right": 5, "answers": 4}',
        '{"right": 1e999}',
        "{",
    ]
    path.write_text("\n".join(rows) + "\n")
    with caplog.at_level("INFO"):
        assert Curriculum(0.1, path).known == {"a": Difficulty(1, 4)}
    assert "curriculum: 1 items are known" in caplog.text
    assert "4 lines could not be read" in caplog.text
    with pytest.raises(EnvironmentFailure, match="cannot read"):
        Curriculum(0.1, tmp_path)


def test_an_item_has_one_name_in_every_run() -> None:
    assert item_key(("word", 3)) == item_key(("word", 3)) != item_key(("word", 4))
    with pytest.raises(EnvironmentFailure, match=r"Define item_key\(item\)"):
        item_key(object())


class Graded(GradedEnv):
    """Items 0, 1, 2, … in turn; of item 0 every answer is right, of item 1 each other one, of item
    2 none.
    """

    name = "graded / test"

    def __init__(self, folder: Path | None = None, **config: Any):
        super().__init__(
            BaseEnvConfig(group_size=4, **config), [APIServerConfig(base_url="http://x")]
        )
        self.checkpoint_dir = "" if folder is None else str(folder)
        self.asked = -1
        self.seeds: list[int | None] = []

    async def setup(self) -> None:
        """Nothing to load."""

    async def get_next_item(self) -> int:
        self.asked += 1
        return self.asked % 3

    def eval_problems(self) -> Sequence[int]:
        return [0]

    async def attempt(self, problem: Any, samples: int, temperature: float) -> list[Attempt]:
        return []

    async def collect_group(self, item: int) -> ScoredDataGroup:
        self.seeds.append(self.sampling_seed(1))
        right = [[True] * 4, [True, False] * 2, [False] * 4][item]
        self.note_success(item, right)
        return ScoredDataGroup(
            tokens=[[1]] * 4, masks=[[1]] * 4, scores=[float(one) for one in right]
        )


async def rounds(environment: Graded, count: int) -> list[int]:
    items = []
    for _ in range(count):
        items.append(await environment.next_item())
        await environment._runner.rollouts.roll_out(items[-1])
    return items


def test_items_that_teach_are_sampled_most_and_a_restart_knows_them(tmp_path: Path) -> None:
    environment = Graded(tmp_path, curriculum=True, curriculum_floor=0.05)
    items = asyncio.run(rounds(environment, 300))
    assert items.count(1) > 3 * max(items.count(0), items.count(2))
    assert min(items.count(0), items.count(2)) > 0, "none is lost for ever"
    path = tmp_path / "env_checkpoints" / "graded___test.curriculum.jsonl"
    assert len(path.read_text().splitlines()) == 300
    again = Graded(tmp_path, curriculum=True, curriculum_floor=0.05)
    assert again.curriculum.known == environment.curriculum.known
    assert again.curriculum.metrics() == {
        "train/curriculum_items": 3.0,
        **{f"train/curriculum_{kind}": pytest.approx(1 / 3) for kind in ("easy", "hard")},
    }


def test_without_it_every_item_comes_and_nothing_is_kept(tmp_path: Path) -> None:
    assert asyncio.run(rounds(Graded(tmp_path), 6)) == [0, 1, 2, 0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_the_group_says_which_answers_are_right(tmp_path: Path) -> None:
    async def group_of(environment: GradedEnv, item: int) -> ScoredDataGroup:
        group, backlog = await environment.collect_trajectories(item)
        assert backlog == []
        return group

    environment = Graded(tmp_path)
    for item, right in enumerate([[True] * 4, [True, False] * 2, [False] * 4]):
        assert asyncio.run(group_of(environment, item))["successes"] == right

    class Silent(Graded):
        def note_success(self, item: int, right: Sequence[bool]) -> None:
            """Log nothing."""

    async def one_after_the_other() -> list[bool]:
        groups = [await group_of(environment, 1), await group_of(Silent(tmp_path), 1)]
        return ["successes" in group for group in groups]

    assert asyncio.run(one_after_the_other()) == [True, False], (
        "nothing remains of the group before"
    )


def test_it_and_an_exact_resume_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exact_resume could not give them again"):
        BaseEnvConfig(curriculum=True, exact_resume=True)


async def test_workers_begin_what_it_takes(tmp_path: Path) -> None:
    environment = Graded(tmp_path, curriculum=True, curriculum_floor=0.0)
    for item in (0, 2):
        for _ in range(20):
            environment.curriculum.note(environment.item_key(item), 4 * (item == 0), 4)
    begun = [(await environment._runner.workers._next_of_stream())[1] for _ in range(20)]
    assert begun.count(1) > 10
    assert environment.asked > 40, "others were passed over"
    other = ScriptedEnv([], curriculum=True)
    with pytest.raises(UsageError, match="ScriptedEnv does not mark right answers"):
        await other._runner.workers._next_of_stream()


def test_an_environment_ends_where_nothing_exact_can_come_of_it() -> None:
    workers = Graded(exact_resume=True)._runner.workers
    stream = {"life": "1.0", "begin": 0, "settled": [], "version": 0}
    workers.heed_position({"max_staleness": 0, "stream": stream})
    with pytest.raises(
        EnvironmentFailure, match=r"--env\.exact_resume: b fills batches too, or leave the flag out"
    ):
        workers.heed_position(
            {"max_staleness": 0, "stream": stream | {"inexact": "b fills batches too"}}
        )


@pytest.mark.parametrize(("item", "made"), [(0, 3), (1, 1)])
def test_a_group_whose_scores_are_equal_is_made_again_with_other_seeds(
    item: int, made: int
) -> None:
    environment = Graded(resample_equal_scores=2, seed_rollouts=True)
    asyncio.run(environment._runner.rollouts.roll_out(item))
    assert len(set(environment.seeds)) == len(environment.seeds) == made
    assert environment.drops.by_reason["equal_scores_resampled"] == made - 1
    without = Graded(seed_rollouts=True)
    asyncio.run(without._runner.rollouts.roll_out(item))
    assert without.seeds == environment.seeds[:1]
