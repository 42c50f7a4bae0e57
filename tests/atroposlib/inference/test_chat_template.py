"""Conversations under chat templates of every shape: what was sampled is never rendered again.

The templates are made of parts from families of models. These are tags of reasoning in the
generation prompt, answers that are stripped, trimmed or rebuilt in the history. Others are ends of
turns that the model does not sample, and roles that are refused.
"""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from atroposlib.inference.managed_server import ManagedServer, say_that_history_changed
from atroposlib.inference.responses import read_reasoning
from tests.atroposlib.inference.template_shapes import (
    END,
    HISTORY,
    OPENED,
    OTHER_END,
    START,
    STARTER,
    Sampler,
    Shape,
    managed_with,
)

SHAPES = st.builds(
    Shape,
    opened=st.sampled_from(OPENED),
    history=st.sampled_from(list(HISTORY)),
    turn_end=st.sampled_from([f"{END}\n", END, f" {END}", OTHER_END, "\n\n"]),
    strict=st.booleans(),
)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(PreTrainedTokenizerFast.from_pretrained(STARTER))


def returned(answer: Any, form: str, opened: str) -> dict[str, Any]:
    """An answer as a client puts it into the history of the next request."""
    content = answer.choices[0].message.content
    if form == "object":
        return answer.choices[0].message  # type: ignore[no-any-return]
    if form == "stripped":
        content = content.strip()
    if form == "with the tag":
        content = opened + content
    if form == "parts":
        content = [{"type": "text", "text": content}]
    if form == "reasoning apart":
        parts = read_reasoning(content, opened)
        return {"role": "assistant", "content": parts.answer, "reasoning_content": parts.reasoning}
    return {"role": "assistant", "content": content}


FORMS = ["object", "as it is", "stripped", "with the tag", "reasoning apart", "parts"]
QUESTIONS = st.text(alphabet="ab 1?\n", max_size=8).map(lambda text: f"q{text}")


@st.composite
def answers(draw: st.DrawFn, end: int) -> tuple[list[str | int], str]:
    """Text and single tokens of an answer, and its finish reason.

    Many texts have several tokenisations: any may be sampled.
    """
    pieces = draw(
        st.lists(
            st.one_of(
                st.sampled_from(["so 1 plus 1", "\n", "</think>\n\n2", " ", "<think>\nhm", "2"]),
                st.integers(3, 1000),
            )
        )
    )
    stops = draw(st.sampled_from(["stop", "stop", "stop", "length"]))
    return [*pieces, *([end] if stops == "stop" else [])], stops


def encoded(tokenizer: Any, pieces: list[str | int]) -> list[int]:
    ids = (
        [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        for piece in pieces
    )
    return [token for row in ids for token in row]


@settings(max_examples=150)
@given(
    shape=SHAPES,
    turns=st.lists(
        st.tuples(answers(2), QUESTIONS, st.sampled_from(FORMS)), min_size=2, max_size=4
    ),
    system=st.booleans(),
    preserve=st.booleans(),
)
def test_every_sampled_token_is_trained_once_and_every_prompt_begins_with_all_before_it(
    sampler: Sampler, shape: Shape, turns: list[Any], system: bool, preserve: bool
) -> None:
    tokenizer = sampler.tokenizer
    managed = managed_with(sampler, shape.template, preserve_think_blocks=preserve)
    messages: list[Any] = [{"role": "system", "content": "s"}] if system else []
    messages.append({"role": "user", "content": "q"})
    sampled, expected = [], []
    for (pieces, reason), question, form in turns:
        row = encoded(tokenizer, pieces)
        assume(row)
        sampler.next = [(row, reason)]
        answer = asyncio.run(managed.chat_completion(messages=messages, n=1))
        sampled.append(row)
        follow = {"role": "user", "content": question}
        expected.append(shape.tail(tokenizer.decode(row[-1:]) if row[-1] < 3 else "", follow))
        messages = [*messages, returned(answer, form, shape.opened), follow]
        assert managed.node_of(answer).metadata == {
            **(managed.node_of(answer).metadata or {}),
            **({"opened": shape.opened} if shape.opened else {}),
        }
    (node,) = managed.get_state()["nodes"]
    assert [token for token in node.masked_tokens if token != -100] == [
        token for row in sampled for token in row
    ]
    assert [value for value in node.logprobs if value != 1.0] == [
        -token / 1000 for row in sampled for token in row
    ]
    for (prompt, later), row, tail in zip(
        pairwise(sampler.prompts), sampled, expected, strict=False
    ):
        so_far = prompt + row
        assert later[: len(so_far)] == so_far
        assert tokenizer.decode(later[len(so_far) :]) == tail
    assert managed.prompt_tokens(messages)[: len(node.tokens)] == node.tokens
    assert managed.render(messages).endswith(expected[-1])


def trained(node: Any) -> list[int]:
    return [token for token in node.masked_tokens if token != -100]


@given(
    shape=SHAPES,
    firsts=st.lists(
        st.sampled_from(["a", "a", "b</think>c", "<think>b</think>c"]), min_size=2, max_size=4
    ),
    drawn=st.data(),
)
def test_members_of_a_group_that_go_different_ways_keep_their_own_tokens(
    sampler: Sampler, shape: Shape, firsts: list[str], drawn: st.DataObject
) -> None:
    """One request for all first answers, some of them equal; then each goes on by itself for two
    turns, in any order.
    """
    managed = managed_with(sampler, shape.template)
    ask = [{"role": "user", "content": "q"}]
    sampler.next = [(encoded(sampler.tokenizer, [text, 2]), "stop") for text in firsts]
    expected = [row for row, _ in sampler.next]
    answer = asyncio.run(managed.chat_completion(messages=ask, n=len(firsts)))
    talks = [
        [*ask, {"role": "assistant", "content": choice.message.content}]
        for choice in answer.choices
    ]
    order = drawn.draw(st.permutations([*range(len(firsts))] * 2))
    last: dict[int, Any] = {}
    for step, member in enumerate(order):
        talks[member].append({"role": "user", "content": f"more of {member}"})
        row = [100 + step, 2]
        sampler.next = [(row, "stop")]
        last[member] = asyncio.run(managed.chat_completion(messages=talks[member], n=1))
        talks[member].append(
            {"role": "assistant", "content": last[member].choices[0].message.content}
        )
        expected[member] = expected[member] + row
    for member in range(len(firsts)):
        assert trained(managed.node_of(last[member])) == expected[member]
    assert sorted(map(trained, managed.get_state()["nodes"])) == sorted(expected)


@pytest.mark.parametrize("shape", [Shape("<think>\n", history) for history in HISTORY])
def test_a_turn_that_is_continued_in_two_ways_is_in_both(sampler: Sampler, shape: Shape) -> None:
    managed = managed_with(sampler, shape.template)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    for row in ([90, 2], [91, 2]):
        sampler.next = [(row, "stop")]
        answer = asyncio.run(managed.chat_completion(messages=messages))
        messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
    sampler.next = [([92, 2], "stop")]
    other = [*messages[:2], {"role": "user", "content": "something else"}]
    asyncio.run(managed.chat_completion(messages=other))
    assert sorted(map(trained, managed.get_state()["nodes"])) == [[90, 2, 91, 2], [90, 2, 92, 2]]


def two_turns(
    managed: ManagedServer, sampler: Sampler, edit: Any = None, **second: Any
) -> list[list[int]]:
    """Return the trained tokens after two turns.

    `edit` changes the messages between them, `second` the second request.
    """
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    sampler.next = [
        (encoded(sampler.tokenizer, ["so 1 plus 1\n</think>\n\n2", 2]), "stop"),
        ([99, 2], "stop"),
    ]
    answer = asyncio.run(managed.chat_completion(messages=messages))
    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "?"},
    ]
    asyncio.run(managed.chat_completion(messages=edit(messages) if edit else messages, **second))
    return [trained(node) for node in managed.tracker.nodes]


def without_reasoning(messages: list[Any]) -> list[Any]:
    return [*messages[:2], {"role": "assistant", "content": "2"}, *messages[3:]]


def without_system(messages: list[Any]) -> list[Any]:
    return messages[1:]


@pytest.mark.parametrize(
    ("edit", "history", "shown"),
    [
        (without_reasoning, "as it is", "2"),
        (without_reasoning, "reasoning rebuilt", "<think>\n\n</think>\n\n2"),
        # The answer itself is as it was: the template gets it whole, with the tag that the prompt
        # had opened.
        (without_system, "as it is", "<think>\nso 1 plus 1\n</think>\n\n2"),
        (without_system, "reasoning rebuilt", "<think>\nso 1 plus 1\n</think>\n\n2"),
        (without_system, "reasoning removed", "2"),
        (without_system, "reasoning must be in a field", "<think>\nso 1 plus 1\n</think>2"),
    ],
)
def test_a_history_that_the_environment_changed_is_a_sequence_of_its_own(
    sampler: Sampler, caplog: pytest.LogCaptureFixture, edit: Any, history: str, shown: str
) -> None:
    say_that_history_changed.cache_clear()
    first, second = two_turns(
        managed_with(sampler, Shape("<think>\n", history).template), sampler, edit
    )
    assert second == [99, 2], (
        "what was sampled after another history is given text here, and not trained"
    )
    assert len(first) > 2
    prompt = sampler.tokenizer.decode(sampler.prompts[1])
    assert prompt.split(f"{START}assistant\n")[1].split(END)[0] == shown
    assert caplog.text.count("conversation becomes several nodes") == (edit is without_system)


def test_options_of_the_template_that_change_the_next_answer_alone_do_not_end_the_sequence(
    sampler: Sampler,
) -> None:
    switch = "{% if not thinks %}<think>\n\n</think>\n\n{% endif %}"
    shape = replace(Shape("", "reasoning removed"), opened=switch)
    assert (
        len(
            two_turns(
                managed_with(sampler, shape.template),
                sampler,
                chat_template_kwargs={"thinks": True},
            )
        )
        == 1
    )
    effort = "{{ 'Effort: ' + effort if effort is defined else '' }}"
    changed = managed_with(sampler, effort + Shape().template)
    assert len(two_turns(changed, sampler, chat_template_kwargs={"effort": "low"})) == 2, (
        "the system's words are others"
    )


@pytest.mark.parametrize("preserve", [False, True])
def test_an_answer_from_elsewhere_gets_the_tag_that_its_own_prompt_had(
    sampler: Sampler, preserve: bool
) -> None:
    """As in a session that was opened again: only a closing tag shows that some prompt had opened
    the reasoning.
    """
    managed = managed_with(sampler, Shape("<think>\n").template, preserve_think_blocks=preserve)
    answer = {"role": "assistant", "content": "hm\n</think>\n\n2"}
    text = managed.render(
        [{"role": "user", "content": "</think>"}, answer, {"role": "user", "content": "?"}]
    )
    assert text.split(f"{START}assistant\n")[1].split(END)[0] == "<think>\nhm\n</think>\n\n2"
    assert text.startswith(f"{START}user\n</think>{END}"), "the words of others stay as they are"


MUST = ("reasoning must be in a field", "reasoning must be in tags")
GIVEN = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
    {"role": "user", "content": "?"},
]


@pytest.mark.parametrize(
    "history", sorted(set(HISTORY) - {"in capitals", "reasoning from a field", *MUST})
)
def test_reasoning_from_elsewhere_is_kept_where_it_is_asked_for_and_stands_there_once(
    sampler: Sampler, history: str
) -> None:
    template = Shape("<think>\n", history).template
    text = managed_with(sampler, template, preserve_think_blocks=True).render(GIVEN)
    assert (
        text.split(f"{START}assistant\n")[1] == f"{GIVEN[1]['content']}{END}\n{START}user\n?{END}\n"
    )


CALLS = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
NAMED = "{% set ns = namespace(call=none) %}{% for m in messages %}"
FOLLOWS = (
    "{% if m.role == 'tool' and ns.call is none %}{{ raise_exception('no call') }}{% endif %}"
    "{% set ns.call = m.tool_calls[0].function.name if m.tool_calls else none %}"
)
SPOKEN = f"{START}{{{{ m.role }}}}\n{{{{ m.content or '' }}}}"
TOOL_TEMPLATES = {
    "as text": "{% for m in messages %}" + SPOKEN + END,
    "a tool must follow its call": NAMED
    + FOLLOWS
    + SPOKEN
    + CALLS
    + "<call>{{ f.name }}{{ f.arguments | tojson }}{% endfor %}"
    + END,
    "arguments are a table": NAMED
    + FOLLOWS
    + SPOKEN
    + CALLS
    + "{% for k, v in f.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    + END,
    "arguments are text": NAMED
    + FOLLOWS
    + SPOKEN
    + CALLS
    + "{{ '<' + f.name + '>' + f.arguments }}{% endfor %}"
    + END,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("form", ["object", "written anew"])
def test_an_answer_with_calls_is_continued_whatever_the_template_makes_of_calls(
    sampler: Sampler, name: str, form: str
) -> None:
    opening = (
        f"{{% endfor %}}{{% if add_generation_prompt %}}{START}assistant\n<think>\n{{% endif %}}"
    )
    managed = managed_with(sampler, TOOL_TEMPLATES[name] + opening)
    # Spacing that no serialiser would write.
    raw = 'hm</think>\nLet me see.\n<tool_call>\n{"name":"look_up",   "arguments": {"q":  "x"}}\n</tool_call>'
    sampler.next = [(encoded(sampler.tokenizer, [raw, 2]), "stop"), ([99, 2], "stop")]
    messages: list[Any] = [{"role": "user", "content": "q"}]
    answer = asyncio.run(managed.chat_completion(messages=messages, tools=TOOLS))
    message = answer.choices[0].message
    if form == "written anew":
        call = {
            "id": "other",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"q":"x"}'},
        }
        message = {"role": "assistant", "content": message.content, "tool_calls": [call]}
    messages += [message, {"role": "tool", "content": "x is 1"}]
    asyncio.run(managed.chat_completion(messages=messages, tools=TOOLS))
    (node,) = managed.get_state()["nodes"]
    assert trained(node) == [*encoded(sampler.tokenizer, [raw, 2]), 99, 2]
    assert node.full_text.endswith(
        f"</tool_call>{END}{START}tool\nx is 1{END}{START}assistant\n<think>\n"
        + sampler.tokenizer.decode([99])
    )


def test_a_tree_holds_every_turn(sampler: Sampler) -> None:
    managed = managed_with(
        sampler, Shape("<think>\n", "reasoning removed").template, track_tree=True
    )
    assert two_turns(managed, sampler)[-1][-2:] == [99, 2]
    assert len(managed.get_state()["sequences"]) == 2


def test_content_in_parts_is_continued(sampler: Sampler) -> None:
    parts = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
    managed = managed_with(sampler, parts)

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    sampler.next = [([90, 2], "stop"), ([91, 2], "stop")]
    answer = asyncio.run(managed.chat_completion(messages=[message("user", "q")]))
    said = message("assistant", answer.choices[0].message.content)
    asyncio.run(
        managed.chat_completion(messages=[message("user", "q"), said, message("user", "?")])
    )
    (node,) = managed.get_state()["nodes"]
    assert trained(node) == [90, 2, 91, 2]


def test_an_answer_of_no_tokens_and_a_prompt_that_nobody_answers(sampler: Sampler) -> None:
    managed = managed_with(sampler, Shape("<think>\n", "trimmed").template)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    sampler.next = [([], "stop")]
    answer = asyncio.run(managed.chat_completion(messages=messages))
    messages += [answer.choices[0].message, {"role": "user", "content": "?"}]
    sampler.next = [([99, 2], "stop")]
    asyncio.run(managed.chat_completion(messages=messages))
    assert [trained(node) for node in managed.get_state()["nodes"]] == [[99, 2]]
    assert sampler.tokenizer.decode(sampler.prompts[1]).count("<think>") == 2
