"""Chat templates made of parts, each from some family of models, and a server that answers with
given tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.inference.generation import Generation
from atroposlib.inference.managed_server import ManagedServer

STARTER = Path(__file__).resolve().parents[3] / "assets" / "starter_model"
END, START, OTHER_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
REASONING = (
    "{% set r = '' %}{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
HISTORY = {
    "as it is": "{{ c }}",
    "trimmed": "{{ c | trim }}",
    "reasoning removed": "{{ c.split('</think>')[-1] | trim }}",
    "reasoning rebuilt": REASONING + "<think>\n{{ r }}\n</think>\n\n{{ c }}",
    "reasoning rebuilt after the last question": REASONING
    + "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}",
    "empty reasoning unless it is the last": REASONING
    + "<think>{{ r if loop.last else '' }}</think>{{ c | trim }}",
    "reasoning from a field": "<think>{{ m.reasoning_content or '' }}</think>{{ c }}",
    "in capitals": "{{ c | upper }}",
    "reasoning must be in a field": "<think>{{ '\n' + m.reasoning_content + '\n' }}</think>{{ c }}",
    "reasoning must be in tags": "{% if '</think>' not in c %}{{ raise_exception('no reasoning') }}{% endif %}{{ c }}",
}
"""Return the template's text of the answer `c` of an earlier turn."""
OPENED = ("", "<think>\n", "<think>", "<think>\n\n</think>\n\n", "</think>", "[THINK]")
ROLES = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('role') }}"
    "{% endif %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('twice') }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Shape:
    """A template of these parts.

    Attributes:
        opened: what the generation prompt ends with.
        history: one of HISTORY.
        turn_end: what the template writes behind an answer.
        strict: it refuses unknown roles, and two messages of a role one after the other.
    """

    opened: str = ""
    history: str = "as it is"
    turn_end: str = f"{END}\n"
    strict: bool = True

    @property
    def template(self) -> str:
        loop = (
            "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
            "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content or '' %}"
            f"{START}{{{{ m.role }}}}\n{{% if m.role == 'assistant' %}}{HISTORY[self.history]}{self.turn_end}"
            f"{{% else %}}{{{{ c }}}}{END}\n{{% endif %}}{{% endfor %}}"
        )
        opening = f"{{% if add_generation_prompt %}}{START}assistant\n{self.opened}{{% endif %}}"
        return (ROLES if self.strict else "") + loop + opening

    def tail(self, sampled_end: str, *messages: dict[str, Any]) -> str:
        """Return the text after an answer whose end the model sampled: written without the
        template.
        """
        stripped = self.turn_end.lstrip()
        end = (
            stripped.removeprefix(sampled_end)
            if sampled_end and stripped.startswith(sampled_end)
            else self.turn_end
        )
        rest = "".join(
            f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages
        )
        return f"{end}{rest}{START}assistant\n{self.opened}"


class Sampler:
    """A server that answers with the given tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.next: list[tuple[list[int], str]] = []
        self.prompts: list[list[int]] = []

    async def generate(self, input_ids: list[int], n: int = 1, **_: Any) -> Generation:
        self.prompts.append(input_ids)
        answers, self.next = self.next[:n], self.next[n:]
        tokens = [list(row) for row, _ in answers]
        return Generation(
            input_ids,
            tokens,
            [[-token / 1000 for token in row] for row in tokens],
            [r for _, r in answers],
        )


def managed_with(sampler: Sampler, template: str, **options: Any) -> ManagedServer:
    """A managed server whose tokenizer has this template."""
    sampler.prompts = []
    sampler.tokenizer.chat_template = template
    return ManagedServer(sampler, tokenizer=sampler.tokenizer, **options)
