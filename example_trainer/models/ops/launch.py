"""Where Triton's kernels are launched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def on_its_device(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Triton launches on the current GPU, whichever the tensors are on. So make the GPU of the
    first argument the current one.
    """

    @functools.wraps(function)
    def launched(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with torch.cuda.device_of(arguments[0]):
            return function(*arguments, **options)

    return launched
