"""Errors that end the trainer with one line: each message names the thing, the value, and what to
do about it.
"""

from __future__ import annotations


class TrainerError(RuntimeError):
    """Something outside the program is wrong and a person can put it right.

    The message is a single line.
    """


class ConfigError(TrainerError):
    """An option is unknown, missing, out of range, or contradicts another one."""


class ModelError(TrainerError):
    """The model cannot be found, is not supported, or its files do not hold what its config
    promises.
    """


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class RolloutServiceError(TrainerError):
    """The rollout service is not there, went away for too long, or sent something that is not a batch."""


class BatchError(TrainerError):
    """A batch cannot be trained on; the next one perhaps can."""


class OutOfMemoryError(BatchError):
    """Memory ran out while a batch was trained on."""


class NonFiniteError(BatchError):
    """A gradient or a weight is NaN or infinite."""


class BridgeError(TrainerError):
    """The vLLM server is not there, refused or fell silent, or the weights could not be delivered
    to it. The message names the side, rank, phase and version, and what to do.
    """


class RankError(TrainerError):
    """Another rank of this trainer failed, ended or fell silent.

    Nothing collective is possible any more.
    """
