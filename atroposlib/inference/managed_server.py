"""Chat and text completions of one server, with the tokens, masks and logprobs of every
sequence kept.

async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
    answer = await managed.chat_completion(messages=messages, n=8, max_tokens=512, temperature=1.0)
    nodes = managed.get_state()["nodes"]        # one SequenceNode per choice, in order; a later turn takes its place

`SequenceTracker` does the bookkeeping, without I/O. A later turn continues the tokens of an earlier
one in two cases. Its messages begin with the earlier request's messages and answer, or its prompt
begins with the earlier sequence's text. Then only the text in between is tokenised: tokens that the
model sampled are kept.
"""

import logging
import time
import uuid
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from atroposlib.inference.chat_template import (
    Chat,
    ChatTemplate,
    Continuation,
    Exchange,
    MessageKey,
    behind,
    checked_messages,
    completed,
    encode_plain,
    encode_rendered,
    exchange,
    load_tokenizer,
    plain,
)
from atroposlib.inference.client import MODEL_NOT_NAMED
from atroposlib.inference.generation import (
    Generation,
    SamplingSpan,
    Span,
    Weights,
    continued,
    joined,
    sampling_of,
    to_wire,
    weight_fields,
    weights_of,
)
from atroposlib.inference.responses import ToolCallTranslator, opened_by
from atroposlib.inference.routed_experts import checked, continued_experts
from atroposlib.wire import PROMPT_LOGPROB, PROMPT_MASK


class SequenceNode(BaseModel):
    """One sequence, ready to be trained on.

    Attributes:
        full_text: the prompt's text and what was answered last, without special tokens, which
            `tokens` hold.
        tokens: token ids, prompt and completions.
        masked_tokens: the token id where it was sampled, -100 where it was given.
        logprobs: logprob where it was sampled, 1.0 where it was given.
        weight_version: version of the oldest weights that a token was sampled under, if known.
        weight_epoch: the trainer session that made those weights, if known; see `Weights`.
        weight_spans: the weights of all its sampled tokens, in their order, if known of every one.
        sampling: with which parameters its sampled tokens were sampled, in their order, if known of
            every one.
        routed_experts: the experts of each token but the last, as one word, if known of every turn;
            see `atroposlib.inference.routed_experts`.
        metadata: of the last completion: `finish_reason`, `answer_id`, its `index` among that
            answer's choices, and `opened`: what its prompt opened, such as `<think>`, if anything;
            see `atroposlib.inference.responses`.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    weight_version: int | None = None
    weight_epoch: int | None = None
    weight_spans: list[Span] | None = None
    sampling: list[SamplingSpan] | None = None
    routed_experts: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def weights(self) -> Weights | None:
        """The oldest weights that a token was sampled under, if known."""
        if self.weight_version is None:
            return None
        return Weights(self.weight_epoch or 0, self.weight_version)


def sequence_fields(nodes: Sequence[SequenceNode]) -> dict[str, list[Any]]:
    """Return the fields of a group with the weights, sampling parameters, finish reasons and routed
    experts of its sequences.

    Args:
        nodes: one for each sequence of the group, in its order.

    Returns:
        weights only if they are known of every sequence; in other fields, None for a sequence
        without a known value.
    """
    weights = [node.weights for node in nodes if node.weights is not None]
    fields: dict[str, list[Any]] = {}
    if len(weights) == len(nodes):
        fields = weight_fields(weights, [node.weight_spans for node in nodes])
    sampling = [to_wire(node.sampling) if node.sampling else None for node in nodes]
    reasons = [(node.metadata or {}).get("finish_reason") for node in nodes]
    group_fields: dict[str, list[Any]] = {
        "sampling_params": sampling,
        "finish_reasons": reasons,
        "routed_experts": [node.routed_experts for node in nodes],
    }
    fields.update(
        {
            name: values
            for name, values in group_fields.items()
            if any(value is not None for value in values)
        }
    )
    return fields


def node_of(nodes: Iterable[SequenceNode], answer_id: str, index: int) -> SequenceNode:
    """Return the node that ends with a choice of an answer.

    Raises:
        KeyError: there is none.
    """
    for node in nodes:
        if node.metadata is not None and (
            node.metadata.get("answer_id"),
            node.metadata.get("index"),
        ) == (answer_id, index):
            return node
    raise KeyError(
        f"no sequence ends with choice {index} of answer {answer_id}: it was continued, or was not made here"
    )


@dataclass(frozen=True)
class Turn:
    """The end of a turn of a sequence. The sequence up to it can be continued in another way.

    Attributes:
        text: characters of the sequence's text; see `Kept`.
        tokens: tokens.
        weights: the oldest of the sequence up to there; None if not known.
        spans: of the weights of its sampled tokens up to there; None if not known.
        sampling: of the parameters that they were sampled with; None where they are not known.
        order: of the sequence that ended there; see `Kept`.
        exchange: the request and the answer; None where the prompt was plain text.
    """

    text: int
    tokens: int
    weights: Weights | None
    spans: list[Span] | None
    sampling: list[SamplingSpan] | None
    order: tuple[int, ...]
    exchange: Exchange | None = None


@dataclass
class Kept:
    """A sequence that is kept.

    Attributes:
        node: what the environment gets.
        text: the prompt's text and the text of all tokens after it, special tokens included: what a
            prompt that goes on from it begins with.
        order: sorts the sequences. A first turn has (number of its request, number of the
            completion). A continuation's order begins with the order of what it continues, so that
            it stands in the same place, whichever request was answered first.
        turns: its ends of turns, the last one its own.
        claims: requests under way that continue it as it is.
    """

    node: SequenceNode
    text: str
    order: tuple[int, ...]
    turns: list[Turn]
    claims: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt of one request.

    Attributes:
        text: all of it, special tokens included.
        tokens: their ids.
        source: the sequence whose tokens it begins with, if it continues one.
        turn: the turn of that sequence after which it goes on.
        number: of the request, in the order in which they were begun; 0 before `begin`.
    """

    text: str
    tokens: list[int]
    source: Kept | None = None
    turn: Turn | None = None
    number: int = 0

    @property
    def continued(self) -> int:
        """Number of sampled turns that the prompt holds token for token."""
        if self.source is None or self.turn is None:
            return 0
        return self.source.turns.index(self.turn) + 1


class SequenceTracker:
    """The sequences of one conversation and its branches.

    Args:
        tokenizer: encodes and decodes; `encode(text)`, `encode(text, add_special_tokens=False)` and
            `decode(ids)` are used.
        keep_all: keep every sequence by its text (a tree), instead of replacing a sequence by what
            continues it.
    """

    def __init__(self, tokenizer: Any, keep_all: bool = False):
        self.tokenizer = tokenizer
        self.keep_all = keep_all
        self._continuation = Continuation(tokenizer)
        self._sequences: list[Kept] = []
        self._begun = 0

    @property
    def nodes(self) -> list[SequenceNode]:
        """The sequences, in the order of the requests for their first turns; a continuation in
        its parent's place.
        """
        return [sequence.node for sequence in self._sequences]

    def whole(self, text: str, rendered: bool = True) -> Prompt:
        """Return the prompt with this text. It continues the longest turn whose text it begins
        with.

        Args:
            text: the prompt's, with the marks of `ControlTokens.guard` if a chat template made it.
            rendered: a chat template made it, so that its special tokens are in the text.
        """
        shown = plain(text)
        source, turn = self._find(shown)
        if source is None or turn is None:
            encode = encode_rendered if rendered else encode_plain
            return Prompt(shown, encode(self.tokenizer, text))
        following = self._continuation(behind(text, turn.text))
        return Prompt(shown, source.node.tokens[: turn.tokens] + following, source, turn)

    def after(self, source: Kept, turn: Turn, tail: str) -> Prompt:
        """Return the prompt that continues a turn.

        Args:
            source: a sequence.
            turn: one of its turns.
            tail: text behind the answer, the end of its turn included. Where the model sampled that
                end itself, it is not repeated.
        """
        tokens, added = source.node.tokens[: turn.tokens], self._continuation(tail)
        end, stripped = self.end_of(source, turn), tail.lstrip()
        if end and stripped.startswith(end):
            # Tokenised with the end, and not behind it: some of these tokens take the white space
            # that follows them.
            from_end = encode_rendered(self.tokenizer, stripped)
            if from_end[:1] == tokens[-1:]:
                added, tail = from_end[1:], stripped[len(end) :]
        return Prompt(source.text[: turn.text] + plain(tail), tokens + added, source, turn)

    def end_of(self, source: Kept, turn: Turn) -> str:
        """Return the text of the token with which the model ended a turn; empty if the answer was
        cut off.
        """
        # An answer without tokens has no end: the token is masked then.
        last = source.node.masked_tokens[turn.tokens - 1]
        if last not in self._continuation.atomic:
            return ""
        return str(self.tokenizer.decode([last], skip_special_tokens=False))

    def find(self, likeness: Callable[[Exchange], int]) -> tuple[Kept, Turn] | None:
        """Return the longest turn that a chat continues.

        Args:
            likeness: of a turn's exchange to the beginning of the chat; 0 where it is not that.
        """
        ranked = [
            (
                len(turn.exchange.chat.keys),
                like,
                turn is sequence.turns[-1],
                -sequence.claims,
                sequence,
                turn,
            )
            for sequence in self._sequences
            for turn in sequence.turns
            if turn.exchange is not None and (like := likeness(turn.exchange))
        ]
        best = max(ranked, key=lambda entry: entry[:4], default=None)
        return best and best[4:]

    def begin(self, prompt: Prompt) -> Prompt:
        """Note that a prompt is sent now. `add` or `abandon` ends the request."""
        if prompt.source is not None:
            prompt.source.claims += 1
        self._begun += 1
        return replace(prompt, number=self._begun)

    def abandon(self, request: Prompt) -> None:
        """Note that the prompt was not answered."""
        if request.source is not None:
            request.source.claims -= 1

    def add(
        self,
        text: str,
        request: Prompt,
        generation: Generation,
        answer_id: str = "",
        exchanges: Sequence[Exchange] | None = None,
    ) -> list[SequenceNode]:
        """Note the completions of a prompt, one sequence each, in their order.

        Args:
            text: the prompt's, with the marks of `ControlTokens.guard` if a chat template made it.
            request: see `begin`.
            generation: the answer.
            answer_id: comes back in the nodes' metadata.
            exchanges: one for each completion, where the prompt is a chat.

        Raises:
            ValueError: a completion's tokens and logprobs do not line up, or its spans or experts do
                not cover its tokens.
        """
        self.abandon(request)
        source, beginning = request.source, beginning_of(request, generation.prompt_tokens)
        opened, added = opened_by(text), []
        for index, spans in enumerate(checked_spans(generation)):
            node = completed_node(generation, index, beginning, spans)
            output = generation.output_tokens[index]
            node.full_text = text + self.tokenizer.decode(output, skip_special_tokens=True)
            node.metadata = {
                "finish_reason": generation.finish_reasons[index],
                "answer_id": answer_id,
                "index": index,
                **({"opened": opened} if opened else {}),
            }
            whole = text + self.tokenizer.decode(output, skip_special_tokens=False)
            end = Turn(
                text=len(whole),
                tokens=len(node.tokens),
                weights=node.weights,
                spans=node.weight_spans,
                sampling=node.sampling,
                order=(*(request.turn.order if request.turn else ()), request.number, index),
                exchange=exchanges[index] if exchanges else None,
            )
            added.append(Kept(node, whole, end.order, [*beginning.turns, end]))
        if source and request.turn is source.turns[-1] and added and not self.keep_all:
            # Gone already when another branch took its place; both hold its tokens.
            self._sequences = [sequence for sequence in self._sequences if sequence is not source]
        for sequence in added:
            insort(self._sequences, sequence, key=lambda kept: kept.order)
        return [sequence.node for sequence in added]

    def _find(self, text: str) -> tuple[Kept, Turn] | tuple[None, None]:
        """The sequence and its turn that the text goes on from.

        The text does not distinguish sequences that are equal in it. Then a whole one goes before
        one that was continued already. One that no request under way continues goes before one that
        is continued. Last, the first of them is taken.
        """
        best = max(
            self._beginnings(text),
            key=lambda pair: (pair[1].text, pair[1] is pair[0].turns[-1], -pair[0].claims),
            default=None,
        )
        return best or (None, None)

    def _beginnings(self, text: str) -> Iterator[tuple[Kept, Turn]]:
        for sequence in self._sequences:
            for turn in sequence.turns:
                if 0 < turn.text <= len(text) and text.startswith(sequence.text[: turn.text]):
                    yield sequence, turn


@dataclass(frozen=True)
class Beginning:
    """A prompt, with the sampled tokens of the turns that it continues.

    Attributes:
        tokens, masks, logprobs: of the prompt; see `SequenceNode`.
        turns: the turns that it holds token for token.
        turn: the turn that the request continues.
        spans, sampling: see `Turn`.
        kept: tokens of the prompt that the earlier sequence has; 0 if it continues none.
        routed_experts: of the earlier sequence; see `SequenceNode`.
    """

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    turns: list[Turn]
    turn: Turn | None
    spans: list[Span] | None
    sampling: list[SamplingSpan] | None
    kept: int = 0
    routed_experts: str | None = None


def beginning_of(request: Prompt, tokens: list[int]) -> Beginning:
    """Return the prompt of a request, whose `tokens` the server was sent."""
    masks, logprobs = [PROMPT_MASK] * len(tokens), [PROMPT_LOGPROB] * len(tokens)
    source, turn = request.source, request.turn
    if source is None or turn is None or tokens[: turn.tokens] != source.node.tokens[: turn.tokens]:
        return Beginning(tokens, masks, logprobs, [], turn, [], [])
    masks[: turn.tokens] = source.node.masked_tokens[: turn.tokens]
    logprobs[: turn.tokens] = source.node.logprobs[: turn.tokens]
    turns = [earlier for earlier in source.turns if earlier.tokens <= turn.tokens]
    experts = source.node.routed_experts
    return Beginning(
        tokens, masks, logprobs, turns, turn, turn.spans, turn.sampling, turn.tokens, experts
    )


def checked_spans(generation: Generation) -> list[list[Span] | None]:
    """Return the weight spans of each completion, None where the server reports none.

    Raises:
        ValueError: a completion's tokens and logprobs do not line up, or its spans do not cover its
            tokens.
    """
    rows = []
    for index, (tokens, logprobs) in enumerate(
        zip(generation.output_tokens, generation.output_logprobs, strict=True)
    ):
        if len(tokens) != len(logprobs):
            raise ValueError(
                f"completion {index} has {len(tokens)} tokens but {len(logprobs)} logprobs"
            )
        spans = None if generation.weight_spans is None else generation.weight_spans[index]
        if spans is not None and sum(span.tokens for span in spans) != len(tokens):
            raise ValueError(
                f"completion {index} has {len(tokens)} tokens, but its weight spans cover {spans}"
            )
        rows.append(spans)
    return rows


def completed_node(
    generation: Generation, index: int, beginning: Beginning, spans: list[Span] | None
) -> SequenceNode:
    """Return the sequence of a prompt and one completion, without its text.

    Args:
        generation: the answer.
        index: of the completion.
        beginning: the prompt.
        spans: of the completion's weights.
    """
    output = generation.output_tokens[index]
    parameters = None if generation.sampling is None else generation.sampling[index]
    weights = oldest_of(generation, index, beginning.turn)
    return SequenceNode(
        full_text="",
        tokens=beginning.tokens + output,
        masked_tokens=beginning.masks + output,
        logprobs=beginning.logprobs + generation.output_logprobs[index],
        weight_version=weights and weights.version,
        weight_epoch=(weights and weights.epoch) or None,
        weight_spans=(
            None if spans is None or beginning.spans is None else joined(beginning.spans, spans)
        ),
        sampling=continued(beginning.sampling, parameters, len(output)),
        routed_experts=experts_of(generation, index, beginning),
    )


def experts_of(generation: Generation, index: int, beginning: Beginning) -> str | None:
    """Return the experts of a prompt and one completion; None if a turn's experts are not known.

    Tokens of an earlier turn keep the experts that they were sampled with. The last answer has the
    experts with which the server read them again.

    Raises:
        ExpertsError: the answer has the experts of other tokens.
    """
    words, earlier, kept = generation.routed_experts, beginning.routed_experts, beginning.kept
    if words is None:
        if earlier is not None:
            say_that_experts_are_missing()
        return None
    length = len(beginning.tokens) + len(generation.output_tokens[index])
    answered = checked(words[index], length - 1)
    if not kept:
        return words[index]
    if earlier is None:
        say_that_experts_are_missing()
        return None
    return continued_experts(earlier, answered, kept - 1).to_wire()


@cache
def say_that_experts_are_missing() -> None:
    """Log it once for each process."""
    logger.warning(
        "a conversation is posted without routed_experts, because only some of its turns were "
        "answered with them. A trainer with --router-replay leaves its group out. Start every "
        "vLLM server with --enable-return-routed-experts. Logged once"
    )


def oldest_of(generation: Generation, index: int, before: Turn | None) -> Weights | None:
    """Return the oldest weights of a completion and of the turns before it, if known."""
    met = weights_of(generation.weight_versions, generation.weight_epochs) or []
    weights = met[index : index + 1]
    if before is not None and before.weights is not None:
        weights.append(before.weights)
    return min(weights, default=None)


__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

# Fields of a chat request that the sampler must not see, because the prompt is rendered here.
CHAT_ONLY = ("messages", "tools", "tool_choice", "chat_template_kwargs", "extra_body", "model")


class ManagedServer:
    """Renders, asks for tokens, and keeps the sequences.

    Args:
        server: a server with token ids and logprobs (`APIServer.generate`).
        tokenizer: the tokenizer of the served model; by default the server's own, or else the
            tokenizer in its settings.
        track_tree: keep every sequence by its text, rather than only sequences that nothing
            continues.
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
                    Choice.model_construct(
                        index=index, finish_reason=cast(Any, reason), message=message
                    )
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
                    CompletionChoice.model_construct(
                        index=index, finish_reason=cast(Any, reason), text=text
                    )
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
    """Return the server's tokenizer, or load the one in its settings. None if they name none."""
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
        "a request holds an answer that was sampled before, but not the messages, tools and "
        "template options before it. There the answer is given text, and the conversation "
        "becomes several nodes. Append to the messages without changing earlier ones if all "
        "turns are to be trained as one sequence. This warning appears once"
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
        base_url: the value of `client.base_url`.
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
