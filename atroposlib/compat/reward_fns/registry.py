"""Reward functions: their classes, and the registry that finds them by name.

The built-in ones are imported at their first use.
"""

from __future__ import annotations

import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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

        Other values of the caller, such as `solution`, come by keyword.
        """

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Weighted scores, logged if there is a logger.

        Raises:
            ValueError: `compute` returned too many or too few scores, or one that is not a finite
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


BUILT_IN_MODULE = "atroposlib.compat.reward_fns.rewards"
BUILT_IN = {
    "accuracy": "AccuracyReward",
    "cascading_r1_math": "cascading_r1_math_reward",
    "cosine_scaled": "CosineScaledReward",
    "crossword_format": "CrosswordFormatReward",
    "format": "FormatReward",
    "r1": "R1Reward",
    "format_reasoning": "FormatReasoningReward",
    "accuracy_x": "AccuracyXReward",
    "reasoning_steps": "ReasoningStepsReward",
    "repetition_penalty": "RepetitionPenaltyReward",
}
"""Name -> class or function of that module."""
NOT_OFFERED = {"chandas_meter": "it needs a Sanskrit grammar engine"}

Entry = type[RewardFunction] | Callable[..., Any]


class LegacyFunctionWrapper(RewardFunction):
    """A plain function as a reward."""

    def __init__(self, func: Callable[..., Any], weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.func = func

    @property
    def name(self) -> str:
        """The function's name, if no other was given."""
        return self._name or str(getattr(self.func, "__name__", "function"))

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return the scores of the function, which also gets the options of this reward."""
        return list(self.func(completions, **{**self.config, **kwargs}))


class RewardRegistry:
    """Finds and makes reward functions."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Register a class, by itself or as a decorator: `@registry.register`,
        `@registry.register(name="mine")`.

        Without a name it is the class's in lower case, less a trailing "reward"; FormatReward is
        "format".
        """
        if cls is None:
            return lambda decorated: self.register(decorated, name)
        if not (inspect.isclass(cls) and issubclass(cls, RewardFunction)):
            raise TypeError(
                f"{cls!r} is not a RewardFunction class; register_function takes functions"
            )
        self._entries[name or cls.__name__.lower().removesuffix("reward")] = cls
        return cls

    def register_function(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function (completions, **kwargs) -> scores."""
        self._entries[name] = function

    def get(self, name: str) -> Entry:
        """The class or function of that name; a trailing "_reward" does not matter.

        Raises:
            ImportError: there is none, or a package that it needs is missing.
        """
        if name in self._entries:
            return self._entries[name]
        short = name.removesuffix("_reward")
        if short in self._entries:
            return self._entries[short]
        if short in NOT_OFFERED:
            raise ImportError(
                f"reward function {name!r} is not offered: {NOT_OFFERED[short]}; register your own by that name"
            )
        if short not in BUILT_IN:
            raise ImportError(
                f"no reward function is called {name!r}; there are {', '.join(self.list_registered())}"
            )
        entry: Entry = getattr(importlib.import_module(BUILT_IN_MODULE), BUILT_IN[short])
        self._entries[short] = entry
        return entry

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """A reward function by name, or by `{"type": name, "weight": …, "params": {…}}`; parameters
        may also stand beside type.

        Raises:
            KeyError: the configuration names no type.
            ImportError: see `get`.
        """
        if isinstance(name_or_config, str):
            name, options = name_or_config, {}
        else:
            options = dict(name_or_config)
            if "type" not in options:
                raise KeyError(
                    f"'type': a reward's configuration must name its type, but has only {sorted(options)}"
                )
            name = options.pop("type")
            options |= dict(options.pop("params", None) or {})
        options |= kwargs
        entry = self.get(name)
        is_class = isinstance(entry, type) and issubclass(entry, RewardFunction)
        reward = entry(**options) if is_class else LegacyFunctionWrapper(entry, **options)
        if "name" in options:
            reward._name = options["name"]
        return reward

    def list_registered(self) -> list[str]:
        """All names, built-in ones first."""
        return list(dict.fromkeys([*BUILT_IN, *self._entries]))

    def load_required_functions(self, config: Any) -> set[str]:
        """Import all that a configuration names, so that one that is missing shows at the start,
        and return their names.

        Args:
            config: a name, a reward's configuration, a list of them, or an object or table that has
                such a list as `reward_functions` or `rewards`.
        """
        names: set[str] = set()
        if isinstance(config, str):
            names.add(config)
        elif isinstance(config, list | tuple):
            for entry in config:
                names |= self.load_required_functions(entry)
        elif config is not None:
            fields = config if isinstance(config, Mapping) else vars(config)
            if isinstance(fields.get("type"), str):
                names.add(fields["type"])
            for inner in ("reward_functions", "rewards", "params"):
                names |= self.load_required_functions(fields.get(inner))
        for name in names:
            self.get(name)
        return names


registry = RewardRegistry()
"""The registry that all environments of a process share."""


NORMALIZATIONS = ("none", "sum", "minmax")


class CombinedReward(RewardFunction):
    """The weighted sum of other rewards.

    Args:
        rewards: names or configurations, as `registry.create` takes them.
        normalization: "none"; "sum", divided by the sum of the weights; or "minmax", stretched over
            0 to 1 within each call. Equal rewards stay as they are under "minmax".
        weight: factor of the whole.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any]],
        normalization: str = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"normalization {normalization!r} is not known; there are {', '.join(NORMALIZATIONS)}"
            )
        self.normalization = normalization
        self.reward_functions = [registry.create(entry) for entry in rewards]

    @property
    def name(self) -> str:
        """Its own name, or the names of its parts."""
        return (
            self._name or f"combined({','.join(reward.name for reward in self.reward_functions)})"
        )

    def set_wandb_logger(self, logger: Any) -> None:
        """Log to this, and each part too."""
        super().set_wandb_logger(logger)
        for reward in self.reward_functions:
            reward.set_wandb_logger(logger)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """The combined scores."""
        parts = [reward(completions, **kwargs) for reward in self.reward_functions]
        totals = [sum(scores) for scores in zip([0.0] * len(completions), *parts, strict=True)]
        if self.normalization == "sum":
            weights = sum(abs(reward.weight) for reward in self.reward_functions)
            return [total / (weights or 1.0) for total in totals]
        if self.normalization == "minmax" and totals and min(totals) < max(totals):
            least, most = min(totals), max(totals)
            return [(total - least) / (most - least) for total in totals]
        return totals


registry.register(CombinedReward, "combined")
