"""The backward passes on a GPU, under the names of `torch_gradients`, each on its tensors' GPU. Imports Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from example_trainer.models.ops import attention_kernels, row_kernels

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _on_its_device(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Triton launches on the current GPU, whichever the tensors are on."""

    @functools.wraps(function)
    def launched(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with torch.cuda.device_of(arguments[0]):
            return function(*arguments, **options)

    return launched


attention_backward = _on_its_device(attention_kernels.attention_backward)
add_embedding_gradient = _on_its_device(row_kernels.add_embedding_gradient)
add_row_sums = _on_its_device(row_kernels.add_row_sums)
add_weight_gradient = _on_its_device(row_kernels.add_weight_gradient)
entropy = _on_its_device(row_kernels.entropy)
logit_gradient = _on_its_device(row_kernels.logit_gradient)
norm_gradient = _on_its_device(row_kernels.norm_gradient)
silu_and_mul_gradient = _on_its_device(row_kernels.silu_and_mul_gradient)
