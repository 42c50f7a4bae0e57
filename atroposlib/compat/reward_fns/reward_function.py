"""Classes that score completions, with a weight and a name."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from atroposlib.inference.responses import opened_by


class RewardFunction(ABC):
    """Scores completions. Call the instance for weighted scores, `compute` for raw ones.

    Args:
        weight: factor of every score.
        name: for logs; by default the class's name in lower case.
        kwargs: kept in `config`.
    """

    def __init__(self, weight: float = 1.0, name: str | None = None, **kwargs: Any) -> None:
        self.weight = weight
        self._name = name
        self.config = kwargs
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        """The name under which scores are logged."""
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Raw scores, one for each completion.

        What a caller knows besides, such as `solution`, comes by keyword.
        """

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Weighted scores, logged if there is a logger.

        Raises:
            ValueError: `compute` returned too many or too few scores, or one that is no finite
                number.
        """
        raw = self.compute(completions, **kwargs)
        if len(raw) != len(completions):
            raise ValueError(
                f"reward {self.name} returned {len(raw)} scores for {len(completions)} completions"
            )
        for index, score in enumerate(raw):
            if not math.isfinite(score):
                raise ValueError(f"reward {self.name} returned {score} for completion {index}")
        weighted = [score * self.weight for score in raw]
        if self.wandb_logger is not None:
            self.log_metrics(raw, weighted)
        return weighted

    def set_wandb_logger(self, logger: Any) -> None:
        """Log to this: anything with a `log(dict)`."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        """Log mean, least and greatest score."""
        if not raw_rewards or self.wandb_logger is None:
            return
        values = {
            "mean_raw": fmean(raw_rewards),
            "mean_weighted": fmean(weighted_rewards),
            "min": min(raw_rewards),
            "max": max(raw_rewards),
        }
        self.wandb_logger.log({f"reward/{self.name}/{key}": value for key, value in values.items()})

    @staticmethod
    def get_content(completion: Any) -> str:
        """The text of a completion: a string, a message, or a conversation, whose first assistant
        message counts.

        Raises:
            TypeError: it is none of these.
        """
        if isinstance(completion, str):
            return completion
        messages = [completion] if isinstance(completion, Mapping) else completion
        if isinstance(messages, Sequence):
            for message in messages:
                if isinstance(message, Mapping) and message.get("role", "assistant") == "assistant":
                    content = message.get("content")
                    if isinstance(content, str):
                        return content
        raise TypeError(
            f"no text of an assistant in {completion!r:.200}; give a string, a message or a list of messages"
        )


class TextReward(RewardFunction):
    """A reward that scores each completion's text by itself.

    Its options are the annotated attributes of the class, with their defaults. None stands for the
    default. Further keywords are kept in `config`.
    """

    needs_reference = False

    def __init__(
        self, *values: Any, weight: float = 1.0, name: str | None = None, **options: Any
    ) -> None:
        names = list(inspect.get_annotations(type(self)))
        options |= dict(zip(names, values, strict=False))
        super().__init__(weight, name, **{k: v for k, v in options.items() if k not in names})
        for option in names:
            if options.get(option) is not None:
                setattr(self, option, options[option])

    def compute(
        self, completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
    ) -> list[float]:
        """Return a score for each completion.

        Args:
            completions: texts or messages.
            solution: the reference for all, or one for each.
            ground_truth: another name for it.
            kwargs: `opened` or `prompts`, see `openings`.

        Raises:
            ValueError: a reference is needed, and there is none, or not one for each.
        """
        golds = [""] * len(completions)
        if self.needs_reference:
            given = ground_truth if solution is None else solution
            golds = references(given, len(completions))
        texts = map(self.get_content, completions)
        rows = zip(texts, golds, openings(completions, kwargs), strict=True)
        return [self.score(text, gold, opened) for text, gold, opened in rows]

    @abstractmethod
    def score(self, text: str, gold: str, opened: str) -> float:
        """Score one text.

        Args:
            text: of a completion.
            gold: its reference; empty without `needs_reference`.
            opened: the text that the prompt opened, see `openings`.
        """


def openings(completions: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    """Return what the prompt of each completion opened; see `atroposlib.inference.responses.opened_by`.

    Args:
        completions: what is scored.
        options: keywords of the reward. `opened` is one text for all or one for each. `prompts` are
            the texts of the prompts.

    Raises:
        ValueError: there is not one entry for each completion.
    """
    opened, prompts = options.get("opened"), options.get("prompts")
    if opened is None and prompts is not None:
        if isinstance(prompts, str):
            prompts = [prompts] * len(completions)
        opened = [opened_by(prompt) if isinstance(prompt, str) else "" for prompt in prompts]
    return references(opened or "", len(completions), "opened")


def references(given: Any, count: int, what: str = "solution") -> list[str]:
    """One reference for each completion; a single one is for all.

    Raises:
        ValueError: there is none, or their number is another.
    """
    if given is None:
        raise ValueError(f"a reference is needed to compare with; pass {what}=")
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [str(given)] * count
    if len(given) != count:
        raise ValueError(f"{what} has {len(given)} entries for {count} completions")
    return [str(entry) for entry in given]
