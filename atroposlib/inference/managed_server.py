"""Chat and text completions of one server, with the tokens, masks and logprobs of every
sequence kept.

async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
    answer = await managed.chat_completion(messages=messages, n=8, max_tokens=512, temperature=1.0)
    nodes = managed.get_state()["nodes"]        # one SequenceNode per choice, in order; a later turn takes its place
"""

import logging
import time
import uuid
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from atroposlib.inference.chat_template import (
    Chat,
    ChatTemplate,
    Exchange,
    MessageKey,
    completed,
    exchange,
)
from atroposlib.inference.client import MODEL_NOT_NAMED
from atroposlib.inference.client import APIServer as APIServer
from atroposlib.inference.generation import Generation
from atroposlib.inference.messages import checked_messages
from atroposlib.inference.sampling_record import sampling_of
from atroposlib.inference.sequence_tracker import Prompt, SequenceNode, SequenceTracker, node_of
from atroposlib.inference.tokenizers import load_tokenizer
from atroposlib.inference.tool_calls import ToolCallTranslator
from atroposlib.utils.thinking import opened_by

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

# Fields of a chat request that the sampler must not see, because the prompt is rendered here.
CHAT_ONLY = ("messages", "tools", "tool_choice", "chat_template_kwargs", "extra_body", "model")


class ManagedServer:
    """Renders, asks for tokens, and keeps the sequences.

    Args:
        server: a server with token ids and logprobs (`APIServer.generate`).
        tokenizer: the tokenizer of the served model; by default the server's own, or else the one
            that its settings name.
        track_tree: keep every sequence by its text, rather than only those that nothing continues.
        tool_parser: format of tool calls in the model's text; see `ToolCallTranslator`.
        preserve_think_blocks: keep the reasoning of answers that were not sampled here, which many
            chat templates remove. Answers that were sampled here are continued token for token in
            any case.
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
        self.template = ChatTemplate(self.tokenizer, self.translator)
        self.preserve_think_blocks = preserve_think_blocks
        self.reset()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """As OpenAI's `chat.completions.create`: `messages`, `n`, `max_tokens`, `temperature`,
        `tools` …

        Raises:
            UsageError: a message has a form that no prompt can hold, such as an image.
        """
        tools = kwargs.get("tools")
        chat = self._chat(kwargs["messages"], tools, kwargs.get("chat_template_kwargs"))
        prompt = self._prompt_of(chat)
        if prompt.continued < sum(key in self._opened for key in chat.keys):
            say_that_history_changed()
        sampling = {key: value for key, value in kwargs.items() if key not in CHAT_ONLY}
        # `reset` during the request makes a new table, which does not get this answer.
        opened, opened_before = opened_by(prompt.text), self._opened
        choices: list[Choice] = []
        exchanges: list[Exchange] = []

        def read(generation: Generation) -> list[Exchange]:
            for index, tokens in enumerate(generation.output_tokens):
                text = self.translator.decode_with_tool_awareness(tokens, has_tools=bool(tools))
                content, calls, reason = self.translator.parse_model_output(
                    text, kwargs.get("tool_choice"), tools, opened
                )
                # A response that was cut off stays one, whatever calls it had begun with.
                cut_off = generation.finish_reasons[index] == "length"
                message = ChatCompletionMessage.model_construct(
                    role="assistant", content=content, tool_calls=None
                )
                message.tool_calls = calls  # type: ignore[assignment]  # after, for OpenAI's constructor makes objects of tables
                reason = reason if calls and not cut_off else generation.finish_reasons[index]
                choices.append(
                    Choice.model_construct(index=index, finish_reason=reason, message=message)
                )
                exchanges.append(exchange(chat, message, text, opened))
            return exchanges

        answer_id = await self._answer(prompt, sampling, read)
        opened_before.update((key, opened) for turn in exchanges for key in turn.keys)
        return ChatCompletion.model_construct(
            id=answer_id,
            choices=choices,
            created=int(time.time()),
            model=self._model(),
            object="chat.completion",
        )

    async def completion(self, **kwargs: Any) -> Completion:
        """As OpenAI's `completions.create`, for one `prompt` given as text."""
        sampling = {
            key: value for key, value in kwargs.items() if key not in ("prompt", *CHAT_ONLY)
        }
        choices: list[CompletionChoice] = []

        def read(generation: Generation) -> None:
            for index, tokens in enumerate(generation.output_tokens):
                text, reason = (
                    self.translator.decode_with_tool_awareness(tokens),
                    generation.finish_reasons[index],
                )
                choices.append(
                    CompletionChoice.model_construct(index=index, finish_reason=reason, text=text)
                )

        answer_id = await self._answer(
            self.tracker.whole(kwargs["prompt"], rendered=False), sampling, read
        )
        return Completion.model_construct(
            id=answer_id,
            choices=choices,
            created=int(time.time()),
            model=self._model(),
            object="text_completion",
        )

    def render(
        self,
        messages: list[Any],
        tools: list[dict] | None = None,
        template_kwargs: dict | None = None,
    ) -> str:
        """Return the text of the prompt that `chat_completion` would send for these messages."""
        return self._prompt_of(self._chat(messages, tools, template_kwargs)).text

    def prompt_tokens(
        self,
        messages: list[Any],
        tools: list[dict] | None = None,
        template_kwargs: dict | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt that `chat_completion` would send for these messages."""
        return self._prompt_of(self._chat(messages, tools, template_kwargs)).tokens

    def get_state(self) -> dict[str, Any]:
        """`nodes`: the sequences in order; with `track_tree`, `sequences` (and its alias `tree`):
        text -> sequence.
        """
        return state_of(self.tracker.nodes, self.track_tree)

    def reset(self) -> None:
        """Forget all sequences."""
        self.tracker = SequenceTracker(self.tokenizer, keep_all=self.track_tree)
        self._opened: dict[MessageKey, str] = {}
        """Key of each answer, and what its prompt had opened."""

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Logprobs of a prompt given as `prompt`, `messages` or `input_ids`."""
        if "messages" in kwargs:
            messages, tools = kwargs.pop("messages"), kwargs.pop("tools", None)
            kwargs["input_ids"] = self.prompt_tokens(messages, tools)
        if "input_ids" not in kwargs:
            kwargs["input_ids"] = self.tracker.whole(kwargs.pop("prompt"), rendered=False).tokens
        return await self.server.get_logprobs(**kwargs)

    def node_of(self, answer: ChatCompletion | Completion, index: int = 0) -> SequenceNode:
        """The sequence that ends with an answer's choice, also where several sequences have the
        same text.

        Raises:
            KeyError: the answer was continued since, or is of another managed server, or of before
                `reset`.
        """
        return node_of(self.tracker.nodes, answer.id, index)

    def _chat(self, messages: list[Any], tools: list[dict] | None, options: dict | None) -> Chat:
        """Return a request's messages with its tools and the options of the chat template.

        Raises:
            UsageError: a message has a form that no prompt can hold.
        """
        return Chat(self.translator.with_problems(checked_messages(messages)), tools, options or {})

    def _prompt_of(self, chat: Chat) -> Prompt:
        """Return the prompt of a chat: the tokens of the answer that it continues, or else all of
        it as the template has it.
        """
        fits: dict[int, bool] = {}

        def likeness(exchange: Exchange) -> int:
            like = exchange.likeness(chat)
            if like and id(exchange.chat) not in fits:
                fits[id(exchange.chat)] = self.template.same_beginning(exchange.chat, chat)
            return like if like and fits[id(exchange.chat)] else 0

        if longest := self.tracker.find(likeness):
            source, turn = longest
            assert turn.exchange is not None
            tail = self.template.after(
                chat, len(turn.exchange.chat.keys), self.tracker.end_of(source, turn)
            )
            if tail is not None:
                return self.tracker.after(source, turn, tail)
        pairs = zip(chat.messages, chat.keys, strict=True)
        messages = [
            completed(message, self._opened.get(key), self.translator.format)
            for message, key in pairs
        ]
        whole = Chat(messages, chat.tools, chat.options)
        return self.tracker.whole(self.template.whole(whole, self.preserve_think_blocks))

    async def _answer(
        self,
        prompt: Prompt,
        sampling: dict[str, Any],
        read: Callable[[Generation], list[Exchange] | None],
    ) -> str:
        """Send a prompt, have the answer read, and note its sequences under a new id, which is
        returned.
        """
        # `reset` during the request makes a new tracker, which does not get this answer.
        tracker = self.tracker
        request = tracker.begin(prompt)
        try:
            if hasattr(self.server, "generate") and not getattr(self.server, "by_text", False):
                generation = await self.server.generate(input_ids=prompt.tokens, **sampling)
            else:
                answer = await self.server.tokens_and_logprobs_completion(
                    prompt=prompt.text, **sampling
                )
                generation = Generation(*answer)
                generation.sampling = sampling_of(sampling, len(generation.output_tokens))
            exchanges = read(generation)
        except BaseException:
            tracker.abandon(request)
            raise
        answer_id = str(uuid.uuid4())
        tracker.add(prompt.text, request, generation, answer_id, exchanges)
        return answer_id

    def _model(self) -> str:
        return getattr(getattr(self.server, "config", None), "model_name", "unknown")


def state_of(nodes: list[SequenceNode], as_tree: bool) -> dict[str, Any]:
    """Return sequences as a managed server's state: in order, or by their text."""
    if not as_tree:
        return {"nodes": list(nodes)}
    sequences = {node.full_text: node for node in nodes}
    return {"sequences": sequences, "tree": sequences}


def tokenizer_of(server: Any) -> Any:
    """Return the server's tokenizer, or load the one that its settings name. None if they name none."""
    tokenizer = getattr(server, "tokenizer", None)
    config = getattr(server, "config", None)
    if tokenizer is not None or config is None:
        return tokenizer
    names = (getattr(config, "tokenizer_name", None), getattr(config, "model_name", None))
    named = next(
        (name for name in names if isinstance(name, str) and name not in MODEL_NOT_NAMED), None
    )
    if named is None:
        return None
    server.tokenizer = load_tokenizer(named)
    return server.tokenizer


@cache
def say_that_history_changed() -> None:
    """Warn once in each process: an environment that does this does it in every conversation."""
    logger.warning(
        "a request holds an answer that was sampled before, but not the messages, tools and template options before it: the "
        "answer is given text there, and the conversation becomes several nodes. Append to the messages without changing "
        "earlier ones if all turns are to be trained as one sequence. This warning appears once"
    )


class DummyManagedServer:
    """Placeholders for tokens and logprobs, for evaluating through endpoints that give none.

    Never train on them.
    """

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
        before = "\n\n".join(
            f"{message['role']}:{message.get('content')}" for message in kwargs["messages"]
        )
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
        metadata = {
            "finish_reason": choice.finish_reason,
            "answer_id": answer_id,
            "index": choice.index,
        }
        self.nodes.append(
            SequenceNode(
                full_text=text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata=metadata | {"dummy_tokens": True},
            )
        )

    def get_state(self) -> dict[str, Any]:
        return state_of(self.nodes, self.track_tree)

    def reset(self) -> None:
        self.nodes = []

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(
            "placeholders have no logprobs: use a server that gives token ids"
        )


class ManagedServerAdapter:
    """`client.chat.completions.create(...)` and `client.completions.create(...)` go to the managed
    server, which keeps tokens.

    Args:
        managed_server: a `ManagedServer`.
        base_url: what `client.base_url` says.
    """

    def __init__(self, managed_server: Any, base_url: str):
        self.managed_server = managed_server
        self.base_url = base_url
        self.completions = SimpleNamespace(create=managed_server.completion)
        chats = SimpleNamespace(create=managed_server.chat_completion)
        self.chat = SimpleNamespace(completions=chats)

    async def post(self, path: str, body: dict[str, Any], cast_to: type) -> Any:
        """Raw requests would go past the record of tokens, so there are none."""
        raise NotImplementedError(
            f"POST {path}: only chat.completions.create and completions.create keep tokens"
        )

    def copy(self, **kwargs: Any) -> "ManagedServerAdapter":
        """Itself: options such as timeouts are the server's."""
        return self
