"""Whole chat templates, each with the structure of one family of models. Over turns with users and
tools, every sampled token is trained and none of the template's.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.atroposlib.inference.template_shapes import STARTER, Sampler, managed_with

WITHOUT_REASONING = "{% set c = c.split('</think>')[-1] %}"


@dataclass(frozen=True)
class Family:
    """A template and the answers of its model.

    Attributes:
        special: its special tokens.
        template: with `m` for a message and `c` for its content.
        answers: texts that the model samples in turn, with the token that ends each.
        next_role: role of the messages after the answers.
        between: what stands between the first answer and the second, written by the template.
    """

    special: tuple[str, ...]
    template: str
    answers: tuple[str, str]
    between: str
    next_role: str = "user"


def each_message(body: str, prompt: str, before: str = "") -> str:
    loop = f"{{% for m in messages %}}{{% set c = m.content %}}{body}{{% endfor %}}"
    return f"{before}{loop}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


QWEN = each_message(
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    + WITHOUT_REASONING
    + "{{ c.lstrip() }}{% else %}{{ c }}{% endif %}<|im_end|>\n",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
GLM = each_message(
    "{% if m.role == 'assistant' %}" + WITHOUT_REASONING + "<|assistant|>\n<think></think>\n{{ c.strip() }}"
    "{% else %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ c }}{% endif %}",
    "<|assistant|>\n",
    "[gMASK]<sop>",
)  # fmt: skip
GLM_SPECIAL = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
)  # fmt: skip
FAMILIES = {
    "Qwen3, thinking": Family(
        ("<think>", "</think>"), QWEN,
        ("<think>\nhm\n</think>\n\nHi<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"),
        "\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen3, tool": Family(
        ("<think>", "</think>"), QWEN,
        ("<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>", "Bye<|im_end|>"),
        "\n<|im_start|>tool\nQ2<|im_end|>\n<|im_start|>assistant\n", "tool",
    ),
    "Llama 3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        each_message(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ c | trim }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|begin_of_text|>",
        ),
        (" Hi <|eot_id|>", "Bye<|eot_id|>"),
        "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]"),
        each_message(
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
            "{% if m.role == 'user' %}[INST] {{ c }}[/INST]{% else %} {{ c | trim }}</s>{% endif %}", "", "<s>",
        ),
        (" Hi</s>", " Bye</s>"), "[INST] Q2[/INST]",
    ),
    "Gemma": Family(
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        each_message(
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ c | trim }}<end_of_turn>\n",
            "<start_of_turn>model\n", "<bos>",
        ),
        ("Hi\n<end_of_turn>", "Bye<end_of_turn>"),
        "\n<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n",
    ),
    "GLM: the next turn's first token ends the answer": Family(
        GLM_SPECIAL, GLM, ("<think>hm</think>\nHi<|user|>", "<think></think>\nBye<|user|>"), "\nQ2<|assistant|>\n",
    ),
    "GLM, tool": Family(
        GLM_SPECIAL, GLM, ("<think>hm</think>\nlook<|observation|>", "Bye<|user|>"), "\nQ2<|assistant|>\n", "tool",
    ),
    "Phi": Family(
        ("<|user|>", "<|assistant|>", "<|end|>"),
        each_message("<|{{ m.role }}|>{{ c }}<|end|>", "<|assistant|>{% else %}<|endoftext|>"),
        ("Hi<|end|>", "Bye<|end|>"), "<|user|>Q2<|end|><|assistant|>",
    ),
    "DeepSeek: the prompt opens the reasoning": Family(
        ("<bos>", "<eos>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        each_message(
            "{% if m.role == 'user' %}<｜User｜>{{ c }}{% else %}" + WITHOUT_REASONING
            + "<｜Assistant｜>{{ c }}<eos>{% endif %}",
            "<｜Assistant｜><think>\n", "<bos>",
        ),
        ("hm</think>\n\nHi<eos>", "so</think>Bye<eos>"), "<｜User｜>Q2<｜Assistant｜><think>\n",
    ),
    "gpt-oss: another token ends the last answer than the history has": Family(
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        each_message(
            "<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ c }}<|end|>",
            "<|start|>assistant", "<|start|>system<|message|>You are a model.<|end|>",
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            "<|channel|>final<|message|>Bye<|return|>",
        ),
        "<|end|><|start|>user<|message|>Q2<|end|><|start|>assistant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_all_that_is_sampled_is_trained_and_nothing_else(family: Family) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(STARTER)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    sampler = Sampler(tokenizer)
    managed = managed_with(sampler, family.template)
    messages: list[Any] = [{"role": "user", "content": "Q1"}]
    sampled = [tokenizer.encode(text, add_special_tokens=False) for text in family.answers]
    for tokens in sampled:
        sampler.next = [(tokens, "stop")]
        answer = await managed.chat_completion(messages=messages, n=1, max_tokens=99)
        content = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": family.next_role, "content": "Q2"})
    (node,) = managed.get_state()["nodes"]
    opening = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, tokenize=False
    )
    first, second = family.answers
    assert tokenizer.decode(node.tokens) == f"{opening}{first}{family.between}{second}"
    assert [token for token in node.masked_tokens if token != -100] == [*sampled[0], *sampled[1]]
    assert node.tokens[: len(sampler.prompts[1])] == sampler.prompts[1], "as the model was shown it"
