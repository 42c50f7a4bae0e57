"""A teacher scores what environments send: every group, through every outage, and nothing of
another vocabulary.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure, UsageError
from atroposlib.inference import teacher_client
from atroposlib.inference.chat_template import differing_ids, first_difference
from atroposlib.web.keys import TEACHER_KEY
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response
from tests.inference_standin import OURS, Standin, expected

SECONDS = 60


def teaching(tokenizer: Any, port: int, options: tuple[str, ...] | None = OURS) -> Standin:
    """A teacher, at a port that no other environment takes while it is away."""
    standin = Standin(tokenizer, "the-teacher", port=port)
    standin.control(generate_options=options, context=512)
    return standin


@pytest.fixture(params=[OURS, None], ids=["ours", "stock"])
def teacher(
    request: pytest.FixtureRequest, tokenizer: Any, free_port: Callable[[], int]
) -> Iterator[Standin]:
    with teaching(tokenizer, free_port(), request.param) as started:
        yield started


@pytest.fixture
def ours(tokenizer: Any, free_port: Callable[[], int]) -> Iterator[Standin]:
    with teaching(tokenizer, free_port()) as started:
        yield started


def environment(
    teacher: Standin, tokenizer: Any, script: list[Any] | None = None, **settings: Any
) -> ScriptedEnv:
    script = script if script is not None else [response(1.0), response(0.0)]
    env = ScriptedEnv(
        script, **({"teacher_url": f"{teacher.url}/v1", "teacher_timeout": SECONDS} | settings)
    )
    env.tokenizer = tokenizer
    return env


def run(env: ScriptedEnv, items: int = 1) -> None:
    """Wait for the teacher and work on so many items at once."""

    async def work() -> None:
        try:
            await env._runner.connections.wait_for_teacher()
            for done in await asyncio.gather(
                *(env._runner.rollouts.work_on("item") for _ in range(items)),
                return_exceptions=True,
            ):
                if isinstance(done, BaseException):
                    raise done
        finally:
            await env._runner.connections.close()

    asyncio.run(asyncio.wait_for(work(), SECONDS))


def refused(env: ScriptedEnv, kind: type[Exception] = EnvironmentFailure) -> str:
    """The one line with which it ends."""
    with pytest.raises(kind) as error:
        run(env)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_trained_token_gets_the_teachers_logprob(teacher: Standin, tokenizer: Any) -> None:
    # Scores are equal, and the teacher teaches all the same. The second sequence has a gap, and
    # trains its first token.
    gap = {
        "tokens": [9, 8, 7, 6, 5],
        "masks": [9, -100, 7, -100, 5],
        "scores": 1.0,
        "inference_logprobs": [-1.0] * 5,
    }
    env = environment(
        teacher, tokenizer, [response(1.0, 4, inference_logprobs=[1.0, -1.0, -1.0, -1.0]), gap]
    )
    run(env)
    (group,) = env.posted
    first, second = expected([1, 2, 3, 4]), expected([9, 8, 7, 6, 5])
    assert group["distill_token_ids"] == [[[], [2], [3], [4]], [[], [], [7], [], [5]]]
    assert group["distill_logprobs"] == [
        [[], [first[1]], [first[2]], [first[3]]],
        [[], [], [second[2]], [], [second[4]]],
    ]
    asked = "/generate" if teacher.generate_options else "/v1/completions"
    assert [path for path in teacher.paths if path in ("/generate", "/v1/completions")] == [
        asked
    ] * 3  # one to begin with
    taught = [value for row in group["distill_logprobs"] for entry in row for value in entry]
    delivery = env._runner.delivery
    assert delivery.kl_sum / delivery.kl_tokens == pytest.approx(
        sum(-1.0 - value for value in taught) / 5
    )


def test_a_model_that_is_named_is_asked_by_its_name(ours: Standin, tokenizer: Any) -> None:
    env = environment(ours, tokenizer, teacher_model_name="the-teacher")
    run(env)
    assert "/v1/completions" in ours.paths
    assert len(env.posted) == 1
    line = refused(environment(ours, tokenizer, teacher_model_name="another"), UsageError)
    assert "404" in line
    assert "--env.teacher_model_name another" in line


def test_an_environment_with_a_teacher_of_its_own_keeps_what_it_said(
    ours: Standin, tokenizer: Any
) -> None:
    own = {"distill_token_ids": [[], [2], [3]], "distill_logprobs": [[], [-0.5], [-0.5]]}
    env = environment(ours, tokenizer, [response(1.0, **own), response(0.0, **own)])
    run(env)
    assert env.posted[0]["distill_logprobs"] == [own["distill_logprobs"]] * 2


def test_groups_wait_for_a_teacher_that_died_and_none_is_lost(
    teacher: Standin, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    env = environment(
        teacher, tokenizer, [response(float(n % 2)) for n in range(8)], teacher_max_requests=3
    )

    async def work() -> None:
        await env._runner.connections.wait_for_teacher()
        await asyncio.to_thread(teacher.stop)
        working = [asyncio.create_task(env._runner.rollouts.work_on("item")) for _ in range(4)]
        while "Waiting for teacher at" not in caplog.text:
            await asyncio.sleep(0.01)
        assert env.posted == []
        teacher.most_at_once = 0
        await asyncio.to_thread(teacher.start)
        await asyncio.gather(*working)
        await env._runner.connections.close()

    asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert len(env.posted) == 4
    assert all("distill_logprobs" in group for group in env.posted)
    assert env.drops.total == 0
    assert 1 < teacher.most_at_once <= 3
    vocabulary = "/vocabulary" if teacher.generate_options else "/tokenize"
    back = len(teacher.paths) - teacher.paths[::-1].index("/health") - 1
    assert vocabulary in teacher.paths[back:], "another teacher may have come back"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_teacher_that_fails_for_a_while_is_asked_again(
    ours: Standin, tokenizer: Any, status: int
) -> None:
    env = environment(ours, tokenizer)
    ours.status = status

    def recover() -> None:
        ours.status = 200

    timer = threading.Timer(0.5, recover)
    timer.start()
    run(env)
    timer.join()
    assert len(env.posted) == 1


def test_a_teacher_that_never_comes_back_ends_it_with_one_line_and_the_group_is_counted(
    ours: Standin, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = environment(ours, tokenizer, teacher_timeout=0.3)

    async def work() -> None:
        await env._runner.connections.wait_for_teacher()
        await asyncio.to_thread(ours.stop)
        try:
            await env._runner.rollouts.work_on("item")
        finally:
            await env._runner.connections.close()

    with pytest.raises(
        InferenceUnavailable, match=rf"teacher at {ours.url}: .* giving up; .*--env\.teacher_url"
    ) as error:
        asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert "\n" not in str(error.value)
    assert str(env.drops) == "teacher_away=1"
    assert "a group of 2 sequences cannot be sent" in caplog.text
    assert env.posted == []
    ours.start()


def test_another_vocabulary_is_refused_by_its_first_difference(
    teacher: Standin, tokenizer: Any
) -> None:
    token = tokenizer.convert_ids_to_tokens(65)
    teacher.vocabulary = {
        **{t: i for t, i in teacher.vocabulary.items() if i != 65},
        "other": 65,
        "more": 9999,
    }
    teacher.shift = 1
    line = refused(environment(teacher, tokenizer), UsageError)
    assert f"--env.teacher_url {teacher.url}" in line
    assert "the teacher the-teacher has another vocabulary" in line
    assert str(tokenizer.name_or_path) in line
    size = len(tokenizer.get_vocab())
    if teacher.generate_options:
        assert f"id 65 is 'other' there and {token!r} here ({size + 1} and {size} entries)" in line
    else:
        assert "Hello, world!" in line
        assert "token 0 is " in line


def test_a_sequence_that_the_teacher_cannot_take_is_dropped_alone(
    ours: Standin, tokenizer: Any
) -> None:
    ours.context = 8
    env = environment(
        ours, tokenizer, [response(1.0, 8), response(0.0, 8), response(1.0, 7), response(0.0, 7)]
    )
    line = refused(env, RolloutFailure)
    assert "a sequence of 8 tokens does not fit into its 8" in line
    assert str(env.drops) == "teacher_refused=1"
    run(env)
    assert len(env.posted) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": "secret"}, f"refused with 401: set {TEACHER_KEY}"),
        ({"status": 400}, "will not score: 400"),
        ({"scores": [None]}, "does not score the tokens sent (1 logprobs of 2 tokens)"),
        ({"scores": [None, 0.5]}, "does not score the tokens sent (0.5 is not a logprob)"),
        ({"scores": [None, None]}, "does not score the tokens sent (None is not a logprob)"),
    ],
)
def test_what_a_person_must_mend_is_said_at_the_start(
    ours: Standin,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.delenv(TEACHER_KEY, raising=False)
    for name, value in change.items():
        setattr(ours, name, value)
    assert said in refused(environment(ours, tokenizer))


def test_a_token_that_the_teacher_has_no_logprob_of_costs_its_group_alone(
    teacher: Standin, tokenizer: Any
) -> None:
    scripts = [response(1.0, 8), response(0.0, 8), response(1.0, 3), response(0.0, 3)]
    env = environment(teacher, tokenizer, scripts)
    teacher.wrong_token = 8

    async def work() -> None:
        await env._runner.connections.wait_for_teacher()
        with pytest.raises(
            RolloutFailure, match=r"of a sequence of 8 tokens, 0\.5 is not a logprob"
        ):
            await env._runner.rollouts.work_on("item")
        await env._runner.rollouts.work_on("item")
        await env._runner.connections.close()

    asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert str(env.drops) == "teacher_refused=1"
    assert len(env.posted) == 1


def test_a_teacher_that_is_exchanged_while_nobody_asks_is_compared_again(
    teacher: Standin, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = "/vocabulary" if teacher.generate_options else "/tokenize"
    env = environment(teacher, tokenizer, [response(float(n % 2)) for n in range(6)])

    async def work() -> None:
        await env._runner.connections.wait_for_teacher()
        teacher.paths.clear()
        await env._runner.rollouts.work_on("item")
        assert "/v1/models" not in teacher.paths, "it was looked at a moment ago"
        monkeypatch.setattr(teacher_client, "MODEL_CHECK_SECONDS", 0.0)
        await env._runner.rollouts.work_on("item")
        assert "/v1/models" in teacher.paths
        assert compared not in teacher.paths, "it is the same"
        teacher.root = "/models/second"
        teacher.vocabulary, teacher.shift = {"other": 0}, 1
        try:
            with pytest.raises(UsageError, match="has another vocabulary"):
                await env._runner.rollouts.work_on("item")
        finally:
            await env._runner.connections.close()

    asyncio.run(asyncio.wait_for(work(), SECONDS))
    assert len(env.posted) == 2


def test_the_teachers_key_is_its_own(
    ours: Standin, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the student's")
    monkeypatch.setenv(TEACHER_KEY, "secret")
    ours.key = "secret"
    env = environment(ours, tokenizer)
    run(env)
    assert len(env.posted) == 1
    given = environment(ours, tokenizer, teacher_api_key="secret")
    assert "teacher_api_key" not in given.config.model_dump()


def test_images_cannot_be_sent_to_a_teacher(ours: Standin, tokenizer: Any) -> None:
    env = environment(ours, tokenizer, [response(1.0, images=["x"]), response(0.0, images=["y"])])
    assert "a group has images" in refused(env)


vocabularies = st.dictionaries(st.text(max_size=3), st.integers(0, 20), max_size=8)


@given(vocabularies, vocabularies)
def test_the_difference_that_is_named_is_the_lowest(
    there: dict[str, int], here: dict[str, int]
) -> None:
    said = first_difference(there, here)
    tables = [
        {i: {t for t, j in table.items() if j == i} for i in range(21)} for table in (there, here)
    ]
    differing = [i for i in range(21) if tables[0][i] != tables[1][i]]
    assert (said is None) == (there == here)
    assert said is None or said.startswith(f"id {differing[0]} is ")


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_where_two_tokenizations_part(there: list[int], here: list[int]) -> None:
    said = differing_ids("text", there, here)
    assert (said is None) == (there == here)
    if said is not None:
        at = int(said.split("token ")[1].split()[0])
        assert there[:at] == here[:at]
        assert there[at : at + 1] != here[at : at + 1]
