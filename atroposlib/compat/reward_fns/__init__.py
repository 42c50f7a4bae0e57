"""Reward functions by name, for environments that choose them in their configuration.

    reward = registry.create({"type": "combined", "rewards": ["accuracy", {"type": "format", "weight": 0.5}]})
    scores = reward(completions, solution=gold)

A reward that cannot be computed raises: it never becomes a score of zero, which would teach the
model something.
"""

from atroposlib.compat.reward_fns.registry import CombinedReward, RewardFunction, registry

__all__ = ["CombinedReward", "RewardFunction", "registry"]
