"""The page that is made from messages alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atroposlib.compat.jsonl2html import create_html_for_group, generate_html, get_score_class


def test_groups_become_a_page_in_which_nothing_of_a_rollout_is_markup(tmp_path: Path) -> None:
    groups = [
        {"messages": ["plain <b>text</b>", "other"], "scores": [1.0, -0.5]},
        {"tokens": [[1]], "scores": [1.0]},
        {
            "messages": [
                [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
            ],
            "scores": [0],
        },
    ]
    source = tmp_path / "groups.jsonl"
    source.write_text("\n".join(json.dumps(group) for group in groups) + "\n\n")
    generate_html(source)
    page = source.with_suffix(".html").read_text()
    assert "plain &lt;b&gt;text&lt;/b&gt;" in page
    assert page.count("<details") == page.count("</details>") == 2, (
        "a group without messages is left out"
    )
    assert "Group 3: 1 rollouts, scores 0" in page
    assert "<b>assistant</b>\n4" in page
    generate_html(str(source), str(tmp_path / "other.html"))
    assert (tmp_path / "other.html").read_text() == page
    assert create_html_for_group(groups[1], 0) == ""


def test_a_line_that_is_no_group_is_named(tmp_path: Path) -> None:
    source = tmp_path / "groups.jsonl"
    source.write_text(
        '{"messages": ["a"], "scores": [1]}\n{"messages": ["a", "b"], "scores": [1]}\n'
    )
    with pytest.raises(ValueError, match=r"groups\.jsonl, line 2 is no group"):
        generate_html(source)
    source.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1 is no group"):
        generate_html(source)


def test_classes_of_scores() -> None:
    assert [get_score_class(score) for score in (-1, 0.0, 0.3, None)] == [
        "reward-negative",
        "reward-zero",
        "reward-positive",
        "",
    ]
