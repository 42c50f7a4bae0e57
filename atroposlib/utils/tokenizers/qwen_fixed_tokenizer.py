"""A Qwen tokenizer whose chat template leaves earlier turns as they were.

Qwen3's own template removes the `<think>` blocks of earlier assistant turns, so a conversation rendered after its second turn
does not begin with the tokens that were sampled in its first.
"""

from typing import Any

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n\nYou may call one or more of these functions:\n<tools>"
    "{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n\n"
    "For each call, write a JSON object with name and arguments:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n{% endif %}'
    "{%- for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}"
    "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content or '' }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set called = call.function or call %}"
    '\n<tool_call>\n{"name": {{ called.name | tojson }}, "arguments": '
    "{{ called.arguments if called.arguments is string else called.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class QwenFixedTokenizer:
    """The tokenizer of a Qwen model with that template; everything else is the tokenizer's own."""

    def __init__(self, model_name_or_path: str, **kwargs: Any):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        self.tokenizer.chat_template = TEMPLATE

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet: the constructor failed
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """As the tokenizer's own; token ids are a plain list unless `return_dict` asks for more."""
        return self.tokenizer.apply_chat_template(conversation, **({"return_dict": False} | kwargs))
