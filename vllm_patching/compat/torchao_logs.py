"""torchao's log lines that have no meaning for a run. transformers imports it with every model, and
so does vLLM.
"""

from __future__ import annotations

import logging

_UNIMPORTANT = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": " is an Enum subclass and is now natively supported",
}
"""Logger -> a part of its lines: GPU extensions that do not fit this PyTorch, and that nothing here
uses; a deprecation."""


class _Without(logging.Filter):
    """Drops the records whose message has a part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self._part not in record.getMessage()


def quiet_torchao() -> None:
    """Keep these lines out of this process's log, whenever torchao is imported."""
    for name, part in _UNIMPORTANT.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Without) for one in logger.filters):
            logger.addFilter(_Without(part))
