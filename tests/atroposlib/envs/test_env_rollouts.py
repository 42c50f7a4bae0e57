"""One item's way: retries, drops by reason, the backlog, versions; without any process."""

import asyncio
import resource
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted_env import ScriptedEnv, response

from atroposlib.envs.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.envs.jsonl import JsonLinesWriter
from atroposlib.envs.processing import ProcessingMixin
from atroposlib.envs.server_handling.generation import current_versions
from atroposlib.envs.serving import crossed


def run(env: ScriptedEnv) -> Any:
    async def whole() -> Any:
        groups = await env.roll_out("item")
        if groups is not None:
            await env.handle_send_to_api(groups, "item")
        return groups

    return asyncio.run(whole())


def test_responses_become_a_group_and_their_items_the_backlog() -> None:
    env = ScriptedEnv([response(1.0), response(-1.0, length=5)])
    run(env)
    (group,) = env.posted
    assert group["scores"] == [1.0, -1.0]
    assert env.backlog == ["after item", "after item"]
    assert env.completion_lengths == [2, 4]
    assert env.drops.total == 0


def test_a_response_that_fails_once_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    env = ScriptedEnv([RuntimeError("now and then"), response(1.0), response(-1.0)])
    run(env)
    assert len(env.posted) == 1
    assert env.drops.by_reason == {"errors_retried": 1}
    assert "RuntimeError: now and then" in caplog.text
    assert "Traceback" in caplog.text


def test_a_response_that_always_fails_gives_the_item_up_and_is_never_scored() -> None:
    env = ScriptedEnv([RuntimeError("broken")] * 6)
    with pytest.raises(RolloutFailure, match="RuntimeError: broken"):
        run(env)
    assert env.posted == []
    assert env.drops.by_reason["errors"] >= 1


def test_none_drops_the_item_and_is_counted() -> None:
    env = ScriptedEnv([response(), None])
    assert run(env) is None
    assert env.drops.by_reason == {"trajectory_is_none": 1}


def test_something_else_than_a_response_is_an_error() -> None:
    env = ScriptedEnv(["text", "text"], rollout_retries=0)
    with pytest.raises(RolloutFailure, match="must return a ScoredDataItem, not str"):
        run(env)


@pytest.mark.parametrize(
    ("script", "settings", "reason"),
    [
        ([response(1.0), response(1.0)], {}, "equal_scores"),
        ([response(1.0), response(float("nan"))], {}, "malformed"),
        ([response(1.0), response(-1.0, masks=[1])], {}, "malformed"),
        ([response(1.0), response(-1.0, length=10)], {}, "too_long"),
    ],
)
def test_what_is_dropped_is_counted_by_reason(script: list[Any], settings: dict[str, Any], reason: str) -> None:
    env = ScriptedEnv(script, **settings)
    env.max_token_len = 10
    run(env)
    assert env.posted == []
    assert env.drops.by_reason == {reason: 1}


def test_equal_scores_may_be_wanted_and_one_response_alone_is_not_equal() -> None:
    env = ScriptedEnv([response(1.0), response(1.0)], ensure_scores_are_not_same=False)
    run(env)
    single = ScriptedEnv([response(1.0)], group_size=1)
    run(single)
    assert len(env.posted) == len(single.posted) == 1


def test_versions_that_the_environment_does_not_carry_are_the_oldest_it_met() -> None:
    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record = current_versions.get()
            assert record is not None
            record.note([7, 5])
            return await super().collect_trajectory(item)

    env = Meets([response(1.0), response(-1.0)])
    run(env)
    assert env.posted[0]["weight_versions"] == [5, 5]
    own = Meets([response(1.0, weight_version=9), response(-1.0, weight_version=8)])
    run(own)
    assert own.posted[0]["weight_versions"] == [9, 8]
    assert "weight_epochs" not in env.posted[0] | own.posted[0], "no server told any"


def test_epochs_go_with_the_versions_and_the_oldest_weights_are_those_served_first() -> None:
    class Meets(ScriptedEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            record = current_versions.get()
            assert record is not None
            record.note([17, 11], [1000, 2000])
            return await super().collect_trajectory(item)

    def posted(*script: dict[str, Any]) -> tuple[Any, Any]:
        env = Meets(list(script))
        run(env)
        return env.posted[0]["weight_versions"], env.posted[0]["weight_epochs"]

    assert posted(response(1.0), response(-1.0)) == ([17, 17], [1000, 1000]), "by the record: 17 was served before 11"
    own = [response(1.0, weight_version=17, weight_epoch=1000), response(-1.0, weight_version=11, weight_epoch=2000)]
    assert posted(*own) == ([17, 11], [1000, 2000])
    without = [response(1.0, weight_version=11), response(-1.0, weight_version=12)]
    assert posted(*without) == ([11, 12], [1000, 1000]), "an epoch that is not told is the oldest that it may be"
    one = [response(1.0, weight_version=11, weight_epoch=2000), response(-1.0, weight_version=11)]
    assert posted(*one) == ([11, 11], [2000, 0])


@pytest.mark.parametrize("empty", [{"advantages": [], "ref_logprobs": []}, {"inference_logprobs": [], "distill_logprobs": []}])
def test_what_is_empty_counts_as_not_given(empty: dict[str, Any]) -> None:
    """Environments written for Atropos post `[]` where they have nothing, for a group or for each response."""
    env = ScriptedEnv([response(1.0, **empty), response(-1.0, **empty)])
    run(env)
    asyncio.run(env.handle_send_to_api({"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]} | empty))
    assert len(env.posted) == 2
    assert env.drops.total == 0
    for group in env.posted:
        assert not set(empty) & set(group), "a service may refuse a list that does not line up"


def test_a_list_of_groups_is_sent_as_a_list_without_what_is_dropped() -> None:
    env = ScriptedEnv([])
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    equal = good | {"scores": [1.0, 1.0]}
    asyncio.run(env.handle_send_to_api([dict(good), None, equal, dict(good)]))
    assert [len(posted) for posted in env.posted] == [2]
    assert env.drops.by_reason == {"equal_scores": 1}


def test_groups_are_kept_in_the_file_that_is_named(tmp_path: Path) -> None:
    env = ScriptedEnv([response(1.0), response(-1.0)], data_path_to_save_groups=str(tmp_path / "deep" / "groups.jsonl"))
    run(env)
    (line,) = (tmp_path / "deep" / "groups.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["scores"] == [1.0, -1.0]


def test_earlier_groups_are_never_overwritten(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("earlier")
    (tmp_path / "groups_1.jsonl").write_text("too")
    env = ScriptedEnv([], data_path_to_save_groups=str(groups))
    assert env.config.data_path_to_save_groups == str(tmp_path / "groups_2.jsonl")
    assert groups.read_text() == "earlier"


def test_metrics_go_to_the_file_and_are_counted_anew(tmp_path: Path) -> None:
    env = ScriptedEnv([response(1.0), response(-1.0)], metrics_path=str(tmp_path / "metrics.jsonl"))
    run(env)

    async def log_twice() -> None:
        await env.wandb_log({"own": 1.5})
        await env.wandb_log()

    asyncio.run(log_twice())
    first, second = (orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert (first["own"], first["train/completion_lengths"]) == (1.5, 2.0)
    assert "train/completion_lengths" not in second


class RecordingWandb:
    """Has W&B's interface and keeps what it is given: the real one is optional, and needs an account."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []

    class Table:
        def __init__(self, columns: list[str]):
            self.rows: list[tuple[Any, ...]] = []

        def add_data(self, *row: Any) -> None:
            self.rows.append(row)

    def init(self, **settings: Any) -> None:
        self.runs.append(settings)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((step, metrics))


def test_wandb_gets_each_environments_metrics_under_its_name(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    import sys

    wandb = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    env = ScriptedEnv([response(1.0), response(-1.0)], use_wandb=True, wandb_name="mine")
    env.tokenizer = tokenizer
    env.start_wandb("project", "group")
    env.wandb_prepend, env.curr_step = "mine_0", 12
    run(env)
    asyncio.run(env.wandb_log({"train/percent_correct": 0.5}))
    ((step, metrics),) = wandb.logged
    assert (wandb.runs[0]["project"], wandb.runs[0]["group"]) == ("project", "group")
    assert wandb.runs[0]["name"].startswith("mine-")
    assert step == 12
    assert metrics["mine_0_train/percent_correct"] == 0.5
    (table,) = [value for value in metrics.values() if isinstance(value, RecordingWandb.Table)]
    assert [score for _, score in table.rows] == [1.0]


def test_wandb_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    env = ScriptedEnv([], use_wandb=True)
    with pytest.raises(UsageError, match="pip install wandb"):
        env.start_wandb("project", "group")


def test_checkpoints_keep_the_environments_own_state(tmp_path: Path) -> None:
    env = ScriptedEnv([])
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "scripted_0"
    env.save_checkpoint(5, {"position": 17})
    later = ScriptedEnv([])
    later.checkpoint_dir, later.wandb_prepend, later.curr_step = str(tmp_path), "scripted_0", 5
    later.load_checkpoint()
    assert later.position == 17  # type: ignore[attr-defined]


def test_a_multiple_is_crossed_once_however_far_the_trainer_moves() -> None:
    steps = [0, 1, 4, 5, 9, 10, 21, 22]
    assert [now for before, now in pairwise(steps) if crossed(before, now, 5)] == [5, 10, 21]


def test_process_stops_when_items_run_out() -> None:
    class Runs(ScriptedEnv):
        items = 2

        async def get_next_item(self) -> Any:
            self.items -= 1
            return "item" if self.items >= 0 else None

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            return response(), []

    env = Runs([], ensure_scores_are_not_same=False)
    env.n_groups_to_process = 5
    asyncio.run(ProcessingMixin._make_groups(env))
    assert env.curr_step == 2


def test_process_counts_the_drops_of_each_item_alone() -> None:
    """Two items at once, one of them dropped while the other is under way: the other's group counts."""

    class Runs(ScriptedEnv):
        items: list[int]

        async def get_next_item(self) -> Any:
            return self.items.pop(0) if self.items else None

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            if item == 0:  # all its neighbours are dropped before it is done
                await neighbours.wait()
            scores = [1.0, -1.0] if item == 0 else [1.0, 1.0]
            return {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": scores}, []

        async def cleanup(self) -> None:
            if self.drops.total == 2:
                neighbours.set()

    async def whole() -> Runs:
        env = Runs([], max_num_workers=3)
        env.items = [0, 1, 2]
        env.n_groups_to_process = 3
        await ProcessingMixin._make_groups(env)
        return env

    neighbours = asyncio.Event()
    env = asyncio.run(whole())
    assert (env.curr_step, env.drops.by_reason) == (1, {"equal_scores": 2})


class Unwritable:
    """What no JSON can hold."""


@pytest.mark.parametrize("as_list", [False, True])
def test_a_group_that_cannot_be_written_is_dropped_alone(as_list: bool, tmp_path: Path, caplog: Any) -> None:
    env = ScriptedEnv([], data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    bad = good | {"messages": [[{"role": "user", "content": Unwritable()}], []]}
    if as_list:
        asyncio.run(env.handle_send_to_api([dict(good), bad, dict(good)]))
        assert [len(posted) for posted in env.posted] == [2]
    else:
        assert asyncio.run(env.handle_send_to_api(bad)) == 0
        assert env.posted == []
    assert env.drops.by_reason == {"malformed": 1}
    assert "'messages': Unwritable cannot be written as JSON" in caplog.text


def test_metrics_that_cannot_be_written_are_left_out_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = ScriptedEnv([], metrics_path=str(tmp_path / "metrics.jsonl"))
    asyncio.run(env.wandb_log({"train/table": Unwritable(), "train/x": 1.5}))
    (row,) = map(orjson.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert row["train/x"] == 1.5
    assert "train/table" not in row
    assert "metric 'train/table' is left out" in caplog.text


def test_a_full_disk_loses_no_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = ScriptedEnv([], metrics_path="/dev/full")
    env.jsonl_writer = JsonLinesWriter("/dev/full")
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    asyncio.run(env.handle_send_to_api(dict(good)))
    asyncio.run(env.wandb_log({"train/x": 1.5}))
    assert len(env.posted) == 1
    for what in ("a group is posted but not kept", "the metrics of step 0 are lost, the rollouts go on"):
        assert f"{what}: cannot write to /dev/full: No space left on device; make room" in caplog.text
    with pytest.raises(EnvironmentFailure, match="cannot write to /dev/full"):
        asyncio.run(env.handle_send_to_api(dict(good), do_send_to_api=False))  # the file is all that is wanted


def test_a_file_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailure, match=r"cannot write to .*rows\.jsonl: (Not a directory|File exists); name another"):
        JsonLinesWriter(tmp_path / "file" / "rows.jsonl")


def test_a_row_of_which_the_disk_took_a_part_is_taken_back(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = JsonLinesWriter(tmp_path / "rows.jsonl")
    writer.write({"a": 1})
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(EnvironmentFailure, match="File too large"):
            writer.write({"b": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.write({"c": 3})
    assert (tmp_path / "rows.jsonl").read_text() == '{"a":1}\n{"c":3}\n'


def seeds_of(items: int, **settings: Any) -> list[list[int | None]]:
    """What sampling_seed gives for two requests of each of a few items that are in work at the same time."""
    found: list[list[int | None]] = [[] for _ in range(items)]

    class SeededEnv(ScriptedEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            found[item].append(self.sampling_seed())
            await asyncio.sleep(0.01 * (items - item))  # the first to begin is the last to end
            found[item].append(self.sampling_seed(1))
            return None, []

    async def whole() -> None:
        env = SeededEnv([], **settings)
        await asyncio.gather(*(env.roll_out(item) for item in range(items)))

    asyncio.run(whole())
    return found


def test_each_request_of_each_item_has_a_seed_that_only_the_settings_decide() -> None:
    first = seeds_of(3, seed_rollouts=True, seed=1)
    assert first == seeds_of(3, seed_rollouts=True, seed=1)
    flat = {seed for row in first for seed in row}
    assert len(flat) == 6
    assert not flat & {seed for row in seeds_of(3, seed_rollouts=True, seed=2) for seed in row}
    assert seeds_of(2) == [[None, None], [None, None]]
    with pytest.raises(RuntimeError, match="the item in work"):
        ScriptedEnv([], seed_rollouts=True).sampling_seed()
