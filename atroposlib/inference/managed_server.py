"""A server that remembers: chat and text completions, with the tokens, masks and logprobs of every sequence kept.

async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
    answer = await managed.chat_completion(messages=messages, n=8, max_tokens=512, temperature=1.0)
    nodes = managed.get_state()["nodes"]        # one SequenceNode per choice, in order; a later turn takes its place
"""

import logging
import time
import uuid
from functools import cache
from typing import Any, ClassVar

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from atroposlib.inference.generation import Generation
from atroposlib.inference.sampling import sampling_of
from atroposlib.inference.sequence_tracker import SequenceNode, SequenceTracker, node_of
from atroposlib.inference.server_baseline import MODEL_NOT_NAMED
from atroposlib.inference.server_baseline import APIServer as APIServer
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.inference.tool_call_translator import ToolCallTranslator, as_dict

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

# Fields of a chat request that the sampler must not see, because the prompt is rendered here.
CHAT_ONLY = ("messages", "tools", "tool_choice", "chat_template_kwargs", "extra_body", "model")


class ManagedServer:
    """Renders, asks for tokens, and keeps the sequences.

    Args:
        server: a server with token ids and logprobs (`APIServer.generate`).
        tokenizer: the tokenizer of the served model; by default the server's own, or else the one that its settings name.
        track_tree: keep every sequence by its text, rather than only those that nothing continues.
        tool_parser: format of tool calls in the model's text; see `ToolCallTranslator`.
        preserve_think_blocks: keep `<think>` blocks of earlier turns, which many chat templates remove.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ):
        self.server = server
        self.tokenizer: Any = tokenizer if tokenizer is not None else tokenizer_of(server)
        if self.tokenizer is None:
            raise ValueError("a managed server renders its prompts: pass tokenizer=self.tokenizer")
        self._tool_parser_name = tool_parser  # environments written for Atropos log it
        self.track_tree = track_tree
        self.translator = ToolCallTranslator(self.tokenizer, tool_parser or "hermes")
        self.preserve_think_blocks = preserve_think_blocks
        self.reset()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """As OpenAI's `chat.completions.create`: `messages`, `n`, `max_tokens`, `temperature`, `tools` …"""
        tools = kwargs.get("tools")
        prompt = self.render(kwargs["messages"], tools, kwargs.get("chat_template_kwargs"))
        sampling = {key: value for key, value in kwargs.items() if key not in CHAT_ONLY}
        earlier = sum(text is not None and text in self._said for text in map(said, kwargs["messages"]))
        answer_id, generation = await self._generate(prompt, sampling, rendered=True, earlier=earlier)
        choices = []
        for index, tokens in enumerate(generation.output_tokens):
            text = self.translator.decode_with_tool_awareness(tokens, has_tools=bool(tools))
            content, calls, reason = self.translator.parse_model_output(text, kwargs.get("tool_choice"), tools)
            self._said.add(content or "")
            # A response that was cut off stays one, whatever calls it had begun with.
            cut_off = generation.finish_reasons[index] == "length"
            message = ChatCompletionMessage.model_construct(role="assistant", content=content, tool_calls=None)
            message.tool_calls = calls  # type: ignore[assignment]  # after, for OpenAI's constructor makes objects of tables
            reason = reason if calls and not cut_off else generation.finish_reasons[index]
            choices.append(Choice.model_construct(index=index, finish_reason=reason, message=message))
        return ChatCompletion.model_construct(
            id=answer_id, choices=choices, created=int(time.time()), model=self._model(), object="chat.completion"
        )

    async def completion(self, **kwargs: Any) -> Completion:
        """As OpenAI's `completions.create`, for one `prompt` given as text."""
        sampling = {key: value for key, value in kwargs.items() if key not in ("prompt", *CHAT_ONLY)}
        answer_id, generation = await self._generate(kwargs["prompt"], sampling, rendered=False)
        choices = [
            CompletionChoice.model_construct(index=index, finish_reason=generation.finish_reasons[index], text=text)
            for index, text in enumerate(self._texts(generation))
        ]
        return Completion.model_construct(
            id=answer_id, choices=choices, created=int(time.time()), model=self._model(), object="text_completion"
        )

    def render(self, messages: list[Any], tools: list[dict] | None = None, template_kwargs: dict | None = None) -> str:
        """The prompt's text under the tokenizer's chat template. A turn of the assistant opens unless the last is one."""
        messages = self.translator.convert_messages_for_template(messages)
        opens = not messages or messages[-1].get("role") != "assistant"
        if self.preserve_think_blocks:
            messages = [hide_tags(message) for message in messages]
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opens, **(template_kwargs or {})
        )
        return show_tags(text) if self.preserve_think_blocks else text

    def get_state(self) -> dict[str, Any]:
        """`nodes`: the sequences in order; with `track_tree`, `sequences` (and its alias `tree`): text -> sequence."""
        if self.track_tree:
            sequences = {node.full_text: node for node in self.tracker.nodes}
            return {"sequences": sequences, "tree": sequences}
        return {"nodes": list(self.tracker.nodes)}

    def reset(self) -> None:
        """Forget all sequences."""
        self.tracker = SequenceTracker(self.tokenizer, keep_all=self.track_tree)
        self._said: set[str] = set()

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Logprobs of a prompt given as `prompt`, `messages` or `input_ids`."""
        rendered = "messages" in kwargs
        if rendered:
            kwargs["prompt"] = self.render(kwargs.pop("messages"), kwargs.pop("tools", None))
        if "input_ids" not in kwargs:
            kwargs["input_ids"] = self.tracker.encode(kwargs.pop("prompt"), rendered)
        return await self.server.get_logprobs(**kwargs)

    def node_of(self, answer: ChatCompletion | Completion, index: int = 0) -> SequenceNode:
        """The sequence that ends with an answer's choice, also where several sequences have the same text.

        Raises:
            KeyError: the answer was continued since, or is of another managed server, or of before `reset`.
        """
        return node_of(self.tracker.nodes, answer.id, index)

    async def _generate(self, text: str, sampling: dict[str, Any], rendered: bool, earlier: int = 0) -> tuple[str, Generation]:
        """Ask, and note the answer's sequences under an id that is new. `earlier`: answers that the prompt is to hold."""
        tracker = self.tracker  # what is reset meanwhile does not get this answer
        tokens, request = tracker.prompt(text, rendered)
        if request.continued < earlier:
            say_that_history_changed()
        try:
            if hasattr(self.server, "generate"):
                generation = await self.server.generate(input_ids=tokens, **sampling)
            else:
                answer = await self.server.tokens_and_logprobs_completion(prompt=text, **sampling)
                generation = Generation(*answer)
                generation.sampling = sampling_of(sampling, len(generation.output_tokens))
        except BaseException:
            tracker.abandon(request)
            raise
        answer_id = str(uuid.uuid4())
        tracker.add(text, request, generation, answer_id)
        return answer_id, generation

    def _texts(self, generation: Generation) -> list[str]:
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in generation.output_tokens]

    def _model(self) -> str:
        return getattr(getattr(self.server, "config", None), "model_name", "unknown")


def tokenizer_of(server: Any) -> Any:
    """The server's tokenizer; where it has none yet, that of its settings, which it then keeps. None if they name none."""
    known = getattr(server, "tokenizer", None)
    config = getattr(server, "config", None)
    if known is not None or config is None:
        return known
    names = (getattr(config, "tokenizer_name", None), getattr(config, "model_name", None))
    named = next((name for name in names if isinstance(name, str) and name not in MODEL_NOT_NAMED), None)
    if named is None:
        return None
    server.tokenizer = load_tokenizer(named)
    return server.tokenizer


def said(message: Any) -> str | None:
    """The text of an assistant's message; None for another, and for one without text."""
    fields = as_dict(message)
    content = fields.get("content") if fields.get("role") == "assistant" else None
    return content if isinstance(content, str) and content else None


@cache
def say_that_history_changed() -> None:
    """Once for each process: many chat templates do this at every later turn."""
    logger.warning(
        "the chat template writes an answer in a later turn's history otherwise than it was sampled, as when it removes the "
        "reasoning: that turn is a sequence of its own, in which the answer is given text, and the conversation is several "
        "nodes. managed_server(preserve_think_blocks=True) keeps reasoning. This is said once"
    )


# Chat templates look for these tags in earlier turns, to remove what is between them.
TAGS = {"<think>": "\ue000think\ue001", "</think>": "\ue000/think\ue001"}


def hide_tags(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message whose `<think>` tags a chat template does not know; private-use characters stand for them."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for tag, stand_in in TAGS.items():
        content = content.replace(tag, stand_in)
    return message | {"content": content}


def show_tags(text: str) -> str:
    for tag, stand_in in TAGS.items():
        text = text.replace(stand_in, tag)
    return text


class DummyManagedServer:
    """Placeholders for tokens and logprobs, for evaluating through endpoints that give none. Never train on them."""

    DUMMY_TOKENS: ClassVar[list[int]] = list(range(128))
    DUMMY_MASKED_TOKENS: ClassVar[list[int]] = [-100, *range(1, 128)]
    DUMMY_LOGPROBS: ClassVar[list[float]] = [-0.5] * 128

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False):
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        answer = await self.server.chat_completion(**kwargs)
        before = "\n\n".join(f"{message['role']}:{message.get('content')}" for message in kwargs["messages"])
        for choice in answer.choices:
            self._note(f"{before}\n\nassistant:{choice.message.content}", choice, answer.id)
        return answer

    async def completion(self, **kwargs: Any) -> Completion:
        answer = await self.server.completion(**kwargs)
        for choice in answer.choices:
            self._note(f"{kwargs['prompt']}{choice.text}", choice, answer.id)
        return answer

    def node_of(self, answer: ChatCompletion | Completion, index: int = 0) -> SequenceNode:
        return node_of(self.nodes, answer.id, index)

    def _note(self, text: str, choice: Choice | CompletionChoice, answer_id: str) -> None:
        whose = {"finish_reason": choice.finish_reason, "answer_id": answer_id, "index": choice.index}
        self.nodes.append(
            SequenceNode(
                full_text=text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata=whose | {"dummy_tokens": True},
            )
        )

    def get_state(self) -> dict[str, Any]:
        if self.track_tree:
            sequences = {node.full_text: node for node in self.nodes}
            return {"sequences": sequences, "tree": sequences}
        return {"nodes": list(self.nodes)}

    def reset(self) -> None:
        self.nodes = []

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("placeholders have no logprobs: use a server that gives token ids")


class _Create:
    """An object whose `create` is the given coroutine function."""

    def __init__(self, create: Any):
        self.create = create


class _Chat:
    def __init__(self, create: Any):
        self.completions = _Create(create)


class ManagedServerAdapter:
    """`client.chat.completions.create(...)` and `client.completions.create(...)` go to the managed server, which keeps tokens.

    Args:
        managed_server: a `ManagedServer`.
        base_url: what `client.base_url` says.
    """

    def __init__(self, managed_server: Any, base_url: str):
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(managed_server.chat_completion)
        self.completions = _Create(managed_server.completion)

    async def post(self, path: str, body: dict[str, Any], cast_to: type) -> Any:
        """Raw requests would go past the record of tokens, so there are none."""
        raise NotImplementedError(f"POST {path}: only chat.completions.create and completions.create keep tokens")

    def copy(self, **kwargs: Any) -> "ManagedServerAdapter":
        """Itself: options such as timeouts are the server's."""
        return self
