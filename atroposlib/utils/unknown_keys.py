"""Settings that only warn of keys that they do not have."""

import logging
from typing import Any

from pydantic import BaseModel, model_validator

logger = logging.getLogger(__name__)


class WarnsOfUnknownKeys(BaseModel):
    """Unknown keys from a flag or a YAML file are refused by the command line; from Python code
    they only warn.

    Environments written for other versions of the interface name settings that no longer exist in
    their `config_init`; they are to run unchanged.
    """

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                logger.warning("%s has no setting named %r: it is ignored", cls.__name__, key)
        return data
