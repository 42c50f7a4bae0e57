"""Fenced blocks by a grammar of answers, and which block is the program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.code_server import CodeBlock, code_blocks, program_in

SOLUTION = "def inc(n: int) -> int:\n    # adds one\n\n    return n + 1"

python_infos = st.sampled_from(
    [
        "python",
        "py",
        "Python",
        "python3",
        "Python 3",
        "python3.11",
        'python title="a.py"',
        "{.python}",
        "{python}",
        "py3",
        "",
        "inc.py",
        "src/inc.py",
        "text/x-python",
        "language-python",
        "{code-cell} python",
        "python#L1",
        "tool_code",
        "solution",
    ]
)
other_infos = st.sampled_from(
    ["text", "bash", "json", "math", "console", "cpp", "c++", "output", "diff", "pycon"]
)
fences = st.builds(
    lambda character, length: character * length, st.sampled_from("`~"), st.integers(3, 5)
)
prose = st.sampled_from(
    [
        "So:",
        "",
        "1. First",
        "It adds one.",
        "Use ``` for code.",
        "`inc(1)` is 2",
        "Output:",
        "- a",
        "x = 1",
    ]
)
usages = st.sampled_from(["print(inc(1))", "assert inc(1) == 2", "2", "inc(1)\ninc(2)"])
indents = st.sampled_from(["", " ", "   ", "      "])


@st.composite
def blocks(draw: st.DrawFn, infos: st.SearchStrategy[str], code: st.SearchStrategy[str]) -> str:
    fence, indent, info = draw(fences), draw(indents), draw(infos)
    inside = "\n".join(f"{indent}{line}" if line else "" for line in draw(code).split("\n"))
    return f"{indent}{fence}{info}\n{inside}\n{indent}{fence}"


@given(
    before=st.lists(prose | blocks(other_infos, usages) | blocks(python_infos, usages), max_size=3),
    solution=blocks(python_infos, st.just(SOLUTION)),
    after=st.lists(
        prose | blocks(other_infos, usages | st.just(SOLUTION)) | blocks(python_infos, usages),
        max_size=3,
    ),
    name=st.sampled_from(["inc", None]),
)
def test_the_block_that_defines_the_function_is_found(
    before: list[str], solution: str, after: list[str], name: str | None
) -> None:
    assert program_in("\n".join([*before, solution, *after]), name) == SOLUTION


@given(text=st.text(alphabet="`~\\n pyx1", max_size=80))
def test_no_text_raises_and_no_line_is_invented(text: str) -> None:
    found, outside = code_blocks(text)
    program_in(text)
    assert sum(len(block.code) for block in found) + len(outside) <= len(text)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("def inc(n): pass", "def inc(n): pass"),
        ("```python\ncut off", "cut off"),
        ("```python\ndef inc(n): return n```\nIt is done.", "def inc(n): return n"),
        ("Here: ```python\nx = 1\n```", "x = 1"),
        ("Here: ```python x = 1``` it is", "x = 1"),
        ("```\r\nx = 1\r\n```\r\n", "x = 1\r"),
        ("```python\nclass inc: pass\n```\n```python\ninc()\n```", "class inc: pass"),
        ("```python\ninc = lambda n: n\n```\n```python\nprint(inc == 1)\n```", "inc = lambda n: n"),
        (
            "```python\ndef inc(n): return 1\n```\nno:\n```python\ndef inc(n): return 2\n```",
            "def inc(n): return 2",
        ),
        ("```text\nnothing\n```\ndef inc(n): pass", "def inc(n): pass"),
        ("````python\n```\n````", "```"),
        ("1. ```python\n   def inc(n): pass\n   ```", "def inc(n): pass"),
        ("- ```python\n  def inc(n): pass\n  ```\n- ```\n  2\n  ```", "def inc(n): pass"),
        ("<answer>```python\ndef inc(n): pass\n```</answer>", "def inc(n): pass"),
        ("```python\ndef inc(n): pass\n```<|im_end|>", "def inc(n): pass"),
        ("\\boxed{```python\ndef inc(n): pass\n```}", "def inc(n): pass"),
        ("```python def inc(n):\n    return n\n```", "def inc(n):\n    return n"),
        ("````markdown\n```python\ndef inc(n): pass\n```\n````", "def inc(n): pass"),
        ("    def inc(n):\n        return n", "def inc(n):\n    return n"),
        (
            "```python\nif 1:\n    def inc(n): pass\n```\n```python\ninc(1)\n```",
            "if 1:\n    def inc(n): pass",
        ),
    ],
)
def test_odd_answers(text: str, program: str) -> None:
    assert program_in(text, "inc").rstrip("\n").strip(" ") == program


def test_a_fence_in_a_docstring_does_not_end_the_block() -> None:
    code = 'def inc(n):\n    """\n    ```python\n    inc(1)\n    ```\n    """\n    return n + 1'
    assert program_in(f"```python\n{code}\n```\nIt adds one.", "inc") == code


def test_blocks_keep_their_order_and_language() -> None:
    found, outside = code_blocks("a\n~~~json\n[1]\n~~~\nb\n```\nx\n```")
    assert found == [CodeBlock("json", "[1]"), CodeBlock("", "x")]
    assert outside == "a\nb"


@pytest.mark.parametrize(
    "piece", ["```\n", "~~~~python\n", "```md\n", "a ```python\n", "``` ", "a ", "\n"]
)
def test_megabytes_are_read_once(piece: str) -> None:
    """The time limit of a test ends a reading that starts again at each fence."""
    program_in(piece * (1_000_000 // len(piece)), "inc")
