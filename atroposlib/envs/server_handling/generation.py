"""What one request for tokens gave back, and a record of the weight versions that a rollout was sampled under."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Generation:
    """Completions of one prompt, token for token as the server sampled them.

    Attributes:
        prompt_tokens: token ids that the completions continue.
        output_tokens: [completion][position] sampled token ids, the end token included where one was sampled.
        output_logprobs: [completion][position] logprobs of exactly those tokens.
        finish_reasons: "stop" or "length" per completion.
        texts: per completion, as the server decoded it; None where it gave none.
        weight_versions: per completion, the oldest version of the weights that any of its tokens was sampled under; None
            where the server does not say.
    """

    prompt_tokens: list[int]
    output_tokens: list[list[int]]
    output_logprobs: list[list[float]]
    finish_reasons: list[str]
    texts: list[str] | None = None
    weight_versions: list[int] | None = None


@dataclass
class VersionRecord:
    """The weight versions that the requests of one rollout met.

    An environment that builds its groups by hand need not carry versions along: the oldest one seen during the rollout is a
    true bound for every sequence in it.
    """

    oldest: int | None = None
    newest: int | None = None

    def note(self, versions: list[int] | None) -> None:
        for version in versions or ():
            self.oldest = version if self.oldest is None else min(self.oldest, version)
            self.newest = version if self.newest is None else max(self.newest, version)


# Set around each rollout; tasks that the rollout starts inherit it.
current_versions: ContextVar[VersionRecord | None] = ContextVar("current_versions", default=None)
