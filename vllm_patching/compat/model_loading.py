"""The moment between vLLM's loading of a model's weights and its processing of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_patching.compat.versions import UnsupportedVllm, seam_missing

Watch = Callable[[Any, Any], AbstractContextManager[None]]


def watch_processing(around: Watch) -> None:
    """Call vLLM's processing of loaded weights inside a context.

    Args:
        around: gets the model and vLLM's ModelConfig; its context begins when the weights have
            been loaded and ends when vLLM has processed them.
    """
    module = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    process = getattr(module, "process_weights_after_loading", None)
    if process is None:
        raise UnsupportedVllm(seam_missing(f"{module.__name__}.process_weights_after_loading"))

    def watched(model: Any, model_config: Any, *rest: Any, **options: Any) -> Any:
        with around(model, model_config):
            return process(model, model_config, *rest, **options)

    module.process_weights_after_loading = watched  # type: ignore[attr-defined]
