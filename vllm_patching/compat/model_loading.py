"""The moment between vLLM's loading of a model's weights and its processing of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from vllm_patching.compat.versions import seam

Watch = Callable[[Any, Any], AbstractContextManager[None]]


def watch_processing(around: Watch) -> None:
    """Call vLLM's processing of loaded weights inside a context.

    Args:
        around: gets the model and vLLM's ModelConfig; its context begins when the weights have
            been loaded and ends when vLLM has processed them.
    """
    module = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    process = seam(module, "process_weights_after_loading")

    def watched(model: Any, model_config: Any, *rest: Any, **options: Any) -> Any:
        with around(model, model_config):
            return process(model, model_config, *rest, **options)

    module.process_weights_after_loading = watched  # type: ignore[attr-defined]


def reloader(model: Any, model_config: Any) -> Callable[[Mapping[str, Any]], None]:
    """Return what loads a checkpoint's tensors into a model that vLLM has loaded and processed.

    It is vLLM's own reload, which keeps the memory of every parameter. Call while vLLM loads the
    model.

    Args:
        model_config: vLLM's.
    """
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    config = importlib.import_module("vllm.config")
    begin = seam(reload, "initialize_layerwise_reload")
    end = seam(reload, "finalize_layerwise_reload")
    vllm_config = config.get_current_vllm_config()

    def load(tensors: Mapping[str, Any]) -> None:
        with config.set_current_vllm_config(vllm_config):
            begin(model)
            model.load_weights(iter(tensors.items()))
            end(model, model_config)

    return load
