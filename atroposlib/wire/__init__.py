"""Facts that environments, rollout service and trainer share: groups, numbers, sampling parameters,
weight versions.
"""
