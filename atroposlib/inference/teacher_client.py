"""A teacher's endpoint: token ids in, the teacher's logprobs of them out.

The endpoint is a server of ours, or any vLLM server.
"""

import asyncio
import logging
import math
import time
from typing import Any

import httpx
import orjson

from atroposlib.errors import EnvironmentFailure, RolloutFailure, UsageError
from atroposlib.inference.chat_template import (
    differing_ids,
    encode_rendered,
    first_difference,
    probe_texts,
)
from atroposlib.inference.client import (
    MODEL_NOT_NAMED,
    PROBE_TIMEOUT,
    APIServerConfig,
    VLLMServer,
    describe,
    status_of,
    worth_retrying,
)
from atroposlib.utils.waiting import Patience
from atroposlib.web.keys import TEACHER_KEY

logger = logging.getLogger(__name__)

MAX_REQUEST_SECONDS = 300.0
"""Seconds without an answer after which a request is sent again: the server may hang until its next
start."""
VOCABULARY_SECONDS = 60.0
MODEL_CHECK_SECONDS = 5.0
"""Longest age of the answer of /v1/models when a sequence is scored. A restart takes longer, so the
client notices an exchanged server before that server scores anything."""
IDENTITY = ("id", "root", "max_model_len")
"""Fields of a model in /v1/models, without `created`, which vLLM makes up for each answer."""
ROUNDING = 1e-3
"""Largest logprob in nats that counts as rounded from 0."""


class TeacherUnavailable(EnvironmentFailure):
    """The teacher did not answer within the time allowed, or its answer is not a scoring."""


class TeacherRefused(RolloutFailure):
    """The teacher cannot score this sequence. Another attempt would not help."""


class NoLogprob(ValueError):
    """A number in the teacher's answer is not a logprob."""


class TeacherServer(VLLMServer):
    """Scores sequences of token ids.

    Requests go to `/generate` if `GET /sampling` of the server lists `prompt_token_logprobs`, else
    to `/v1/completions` with `prompt_logprobs`, which vLLM has.

    The client compares the server's vocabulary with that of `tokenizer`, which must be set. It does
    so before the first sequence, after the server was away, and when /v1/models names another model
    than before. It polls that route every MODEL_CHECK_SECONDS at most.

    Args:
        url: address, with or without /v1.
        model_name: the model to ask for; None for the first one that is served.
        api_key: bearer token; None for $TEACHER_API_KEY.
        timeout: longest wait for the server, in seconds.
        max_requests: most sequences that are scored at once.
    """

    key_variable = TEACHER_KEY
    reports_weights = False  # it stands alone, and its probe has more to do
    role = "teacher"
    address_flag = "--env.teacher_url"

    def __init__(
        self,
        url: str,
        model_name: str | None,
        api_key: str | None,
        timeout: float,
        max_requests: int,
    ):
        super().__init__(
            APIServerConfig(
                base_url=url,
                model_name=model_name or MODEL_NOT_NAMED[0],
                api_key=api_key,
                timeout=math.ceil(min(timeout, MAX_REQUEST_SECONDS)),
                num_max_requests_at_once=max_requests,
                server_type="vllm",
            )
        )
        self.pool.outage_timeout = self._timeout = timeout
        self._comparing = asyncio.Lock()
        self._same_vocabulary = False
        self._checked = -math.inf
        self._scores = False
        """It has scored a sequence: from then on what is wrong with one is wrong with that one."""

    async def probe(self) -> str | None:
        # Asked after an outage: what comes back may be another server.
        self._options, self._served, self._same_vocabulary = None, None, False
        return await self._fault_of("/health")

    async def start(self) -> None:
        """Wait until it answers, compare the vocabularies, and have it score a sequence.

        Raises:
            EnvironmentFailure: it did not come in time, has another vocabulary, or does not score;
                one line.
        """
        await self.pool.wait_until_well()
        try:
            await self.score(sorted(self.tokenizer.get_vocab().values())[:2])
            self._scores = True
        except TeacherRefused as refusal:
            raise UsageError(str(refusal)) from refusal

    async def score(self, tokens: list[int]) -> list[float | None]:
        """The logprob of each token given those before it, at temperature 1; None for the first,
        which nothing predicts.

        Raises:
            TeacherRefused: it will not score this sequence, which may be too long for it, or has no
                logprob of one of its tokens.
            EnvironmentFailure: it was away for too long, refuses the key, has another vocabulary,
                or answers something else.
        """
        patience: Patience | None = None
        while True:
            try:
                return await self._request("_score_wrapper", {"tokens": tokens})
            except httpx.HTTPError as error:
                what = " ".join(describe(error).split())
                if not worth_retrying(error):
                    raise self._refusal(error, what) from error
                patience = patience or Patience(
                    f"teacher at {self.root_url}",
                    self._timeout,
                    TeacherUnavailable,
                    logger,
                    "see its log",
                )
                await patience.wait(what)

    def _refusal(self, error: httpx.HTTPError, what: str) -> Exception:
        status = status_of(error)
        if status in (401, 403):
            return UsageError(
                f"teacher at {self.root_url} refused with {status}: set {TEACHER_KEY} to its key (or --env.teacher_api_key, "
                "which other users of the machine can see)"
            )
        if status == 404:
            return UsageError(
                f"teacher at {self.root_url}: {what}; is --env.teacher_model_name "
                f"{self.config.model_name or 'none'} served there, by vLLM?"
            )
        return TeacherRefused(f"teacher at {self.root_url} will not score: {what}")

    async def _score_wrapper(self, tokens: list[int], model: str) -> list[float | None]:
        await self._check_model()
        model = await self.model()  # if it is not named, the served one
        await self._compare_vocabularies(model)
        context = await self._context_length()
        if context and len(tokens) >= context:
            raise TeacherRefused(
                f"teacher at {self.root_url}: a sequence of {len(tokens)} tokens does not fit "
                f"into its {context}, one of them for the token that it samples. Start it with a "
                "larger --max-model-len"
            )
        names_a_model = (
            self.config.model_name not in MODEL_NOT_NAMED
        )  # which /generate does not know
        try:
            if not names_a_model and "prompt_token_logprobs" in await self._generate_options():
                logprobs = await self._by_generate(tokens)
            else:
                logprobs = await self._by_completions(tokens, model)
            return checked_scores(logprobs, len(tokens))
        except NoLogprob as error:
            if self._scores:
                raise TeacherRefused(
                    f"teacher at {self.root_url}: of a sequence of {len(tokens)} tokens, {error}"
                ) from error
            raise self._no_scoring(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise self._no_scoring(error) from error

    def _no_scoring(self, error: Exception) -> TeacherUnavailable:
        return TeacherUnavailable(
            f"teacher at {self.root_url}: its answer does not score the tokens sent ({error}); "
            "serve it with vLLM, "
            "and without logits in place of logprobs (--logprobs-mode)"
        )

    async def _check_model(self) -> None:
        """See now and then whether it is still the same model that is served."""
        async with self._comparing:
            if time.monotonic() - self._checked < MODEL_CHECK_SECONDS:
                return
            before, self._served = self._served, None  # where this fails, the next one compares
            now = await self.served_model()
            if before is None or any(before.get(name) != now.get(name) for name in IDENTITY):
                self._options, self._same_vocabulary = None, False
                if before is not None:
                    logger.warning(
                        "teacher at %s: another model is served there now, %s",
                        self.root_url,
                        now.get("id"),
                    )
            self._checked = time.monotonic()

    async def _by_generate(self, tokens: list[int]) -> list[Any]:
        body = {"prompt": {"prompt_token_ids": tokens}, "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_token_logprobs": True, "token_logprobs": True, "return_text": False}
        return (await self._post(body))["prompt_token_logprobs"]

    async def _by_completions(self, tokens: list[int], model: str) -> list[Any]:
        body = {
            "model": model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        response = await self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        tables = orjson.loads(response.content)["choices"][0].get("prompt_logprobs")
        if tables is None or len(tables) != len(tokens):
            raise ValueError(f"{len(tables or [])} prompt_logprobs of {len(tokens)} tokens")
        return [
            None,
            *(
                table[str(token)]["logprob"]
                for table, token in zip(tables[1:], tokens[1:], strict=True)
            ),
        ]

    async def _compare_vocabularies(self, model: str) -> None:
        """Once after each start or outage, and for each model.

        Raises:
            UsageError: an id means another token there, or the server refuses to show it.
        """
        async with self._comparing:
            if self._same_vocabulary:
                return
            difference = await self._difference(model)
            if difference is not None:
                ours = (
                    getattr(self.tokenizer, "name_or_path", None) or type(self.tokenizer).__name__
                )
                raise UsageError(
                    f"--env.teacher_url {self.root_url}: the teacher {model} has another vocabulary than this environment's "
                    f"tokenizer {ours}: {difference}; serve a teacher with the same tokenizer"
                )
            self._same_vocabulary = True

    async def _difference(self, model: str) -> str | None:
        response = await self.http.get("/vocabulary", timeout=VOCABULARY_SECONDS)
        if response.status_code != 404:
            response.raise_for_status()
            return first_difference(
                orjson.loads(response.content)["vocabulary"], self.tokenizer.get_vocab()
            )
        for text in probe_texts(self.tokenizer):
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            response = await self.http.post("/tokenize", json=body, timeout=PROBE_TIMEOUT)
            response.raise_for_status()
            difference = differing_ids(
                text,
                orjson.loads(response.content)["tokens"],
                encode_rendered(self.tokenizer, text),
            )
            if difference is not None:
                return difference
        logger.info(
            "teacher at %s: same ids for all probe texts; it does not list its whole vocabulary",
            self.root_url,
        )
        return None


def checked_scores(logprobs: list[Any], length: int) -> list[float | None]:
    """The logprobs of a sequence's tokens, None for the first.

    Raises:
        ValueError: they are not as many as the tokens.
        NoLogprob: one is not a logprob.
    """
    if len(logprobs) != length:
        raise ValueError(f"{len(logprobs)} logprobs of {length} tokens")
    wrong = [
        v for v in logprobs[1:] if not isinstance(v, float | int) or not -math.inf < v <= ROUNDING
    ]
    if wrong:
        raise NoLogprob(f"{wrong[0]} is not a logprob")
    return [None, *logprobs[1:]]
