"""Failures that end an environment process with one clear line instead of a traceback."""


class EnvironmentFailure(Exception):
    """Something outside the environment's code is wrong: the message names it, its value and the
    remedy.
    """

    exit_code = 1


class UsageError(EnvironmentFailure):
    """A flag, a YAML key or a value that cannot be accepted."""

    exit_code = 2


class ServiceUnavailable(EnvironmentFailure):
    """The rollout service did not answer (or no trainer came) within the time allowed."""


class InferenceUnavailable(EnvironmentFailure):
    """The inference server did not answer within the time allowed."""


class RolloutFailure(Exception):
    """One rollout cannot be finished: its own retries are used up.

    It is counted and reported, never scored.
    """


class NoRoom(RolloutFailure):
    """A prompt is as long as a sequence may be: there is no room for an answer."""
