"""Reward functions by name. The built-in ones are imported when they are first asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.compat.reward_fns.reward_function import RewardFunction

PACKAGE = "atroposlib.compat.reward_fns"
BUILT_IN = {
    "accuracy": "accuracy_reward:AccuracyReward",
    "cascading_r1_math": "cascading_r1_math_reward:cascading_r1_math_reward",
    "combined": "combined_reward:CombinedReward",
    "cosine_scaled": "cosine_scaled_reward:CosineScaledReward",
    "crossword_format": "crossword_format_reward:CrosswordFormatReward",
    "format": "format_reward:FormatReward",
    "r1": "r1_reward:R1Reward",
    "format_reasoning": "r1_reward:FormatReasoningReward",
    "accuracy_x": "r1_reward:AccuracyXReward",
    "reasoning_steps": "reasoning_steps_reward:ReasoningStepsReward",
    "repetition_penalty": "repetition_penalty_reward:RepetitionPenaltyReward",
}
"""Name to module and object."""
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
        """What the function returns. It also gets what the reward was created with."""
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
                f"{cls!r} is no RewardFunction class; register_function takes functions"
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
        module, _, attribute = BUILT_IN[short].partition(":")
        entry: Entry = getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)
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
