"""One list of a group's fields: environments and the rollout service check each of them."""

import json
from typing import Any

import pytest

from atroposlib.service.group_reader import RETURNED, read_groups
from atroposlib.service.schemas import InvalidRequestError
from atroposlib.wire import (
    GROUP_FIELDS,
    NUMBERS,
    PER_SEQUENCE,
    PER_TOKEN,
    PLURALS,
    ScoredDataItem,
    group_from_items,
    wrong_shape,
)

ITEM: dict[str, Any] = {"tokens": [4, 5, 6], "masks": [-100, 5, 6], "scores": 1.0}
NESTED = ("distill_token_ids", "distill_logprobs")


def row(name: str, value: float, length: int = 3) -> list[Any]:
    return [[value]] * length if name in NESTED else [value] * length


def refusal(group: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_groups(json.dumps(group).encode(), many=False)
    return str(caught.value)


def test_each_field_of_a_sequence_is_a_field_of_an_item() -> None:
    of_items = {PLURALS.get(name, name) for name in ScoredDataItem.__annotations__}
    assert PER_SEQUENCE.keys() < of_items < GROUP_FIELDS.keys()
    assert set(RETURNED) == GROUP_FIELDS.keys() - {"idempotency_key"}


@pytest.mark.parametrize("name", [name for name in PER_TOKEN if name != "masks"])
def test_a_per_token_field_goes_from_items_to_the_service_and_is_checked_on_both_sides(
    name: str,
) -> None:
    group: dict[str, Any] = dict(group_from_items([ITEM | {name: row(name, 1)}] * 2))
    assert wrong_shape(group, 2) is None
    (validated,) = read_groups(json.dumps(group).encode(), many=False)
    assert json.loads(validated.body)[name] == [row(name, 1)] * 2

    short = group | {name: [row(name, 1), row(name, 1, 2)]}
    assert wrong_shape(short, 2) == f"{name}[1] has 2 entries for 3 tokens"
    assert f"{name}[1] has 2 entries for the 3 tokens" in refusal(short)

    bound = NUMBERS[name].largest
    assert bound is not None
    number = int(2 * bound) if name == "distill_token_ids" else 1e300
    beyond = group | {name: [row(name, 1), [*row(name, 1, 2), *row(name, number, 1)]]}
    for message in (wrong_shape(beyond, 2) or "", refusal(beyond)):
        assert message.startswith(f"{name}[1][2]")
        assert message.endswith(f"its magnitude must be at most {bound:g}")


@pytest.mark.parametrize("value", [3, ["x"] * 3, [None] * 3])
def test_what_is_not_made_of_numbers_is_named(value: Any) -> None:
    group: dict[str, Any] = dict(group_from_items([ITEM, ITEM]))
    assert "advantages" in (wrong_shape(group | {"advantages": [value] * 2}, 2) or "")
    assert "is not a list" in (wrong_shape(group | {"advantages": 3}, 2) or "")
