"""Settings that ask an OpenAI-compatible endpoint for reasoning, and the request fields they turn
into.
"""

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlparse

VALID_REASONING_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh"}

# OpenAI's own endpoint knows three levels.
OPENAI_EFFORT = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


@dataclass
class ReasoningConfig:
    """Amount of reasoning before an answer.

    Attributes:
        enabled: ask for reasoning; set by itself when one of the others is.
        effort: one of `VALID_REASONING_EFFORTS`.
        max_tokens: most tokens of reasoning, 1024 to 32000.

    Raises:
        ValueError: a value out of range.
    """

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ValueError(
                f"reasoning effort {self.effort!r}: choose one of {', '.join(sorted(VALID_REASONING_EFFORTS))}"
            )
        if self.max_tokens is not None and not 1024 <= self.max_tokens <= 32000:
            raise ValueError(f"{self.max_tokens} reasoning tokens: give 1024 to 32000")
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """The request's extra body for the endpoint at `base_url`, or None when no reasoning is
        asked for.

        `use_max_tokens` is for endpoints that take a number of tokens only: an effort becomes one.
        """
        if not self.enabled:
            return None
        if base_url and (urlparse(base_url).hostname or "").endswith("api.openai.com"):
            return {"reasoning_effort": OPENAI_EFFORT[self.effort or "medium"]}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.max_tokens is not None and (use_max_tokens or self.effort is None):
            reasoning["max_tokens"] = self.max_tokens
        elif self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        return {"reasoning": reasoning}

    @classmethod
    def from_env_config(cls, env_config: Any) -> "ReasoningConfig":
        return cls(
            env_config.thinking_mode, env_config.reasoning_effort, env_config.max_reasoning_tokens
        )
