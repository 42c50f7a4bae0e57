"""Updates through vLLM's own loader, for a model whose loading is more than copying.

A rank keeps a copy of the whole checkpoint, which updates write. After each update vLLM reloads
the model from it. The rank tries that at its start, with other weights and with its own. The first
must change every parameter, and the second must bring all of them back. If it does not, vLLM gets
the tensors that its loader computes with from the CPU, as at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path

import torch
from torch import nn

from vllm_patching.protocol.checksum import weights_checksum
from vllm_patching.weights.regions import row_major
from vllm_patching.weights.sharding import LearnedShard, SourceSlice
from vllm_patching.worker.learned_layout import ProcessedWeights
from vllm_patching.worker.parameters import LayoutError, own_parameters


class ReloadedModel:
    """A model and the copy of its checkpoint.

    Attributes:
        tensors: the copy, by the names of the checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        headers: Mapping[str, torch.Tensor],
        computed: Set[str],
        dtype: torch.dtype,
        reload: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        """Read the checkpoint, and reload the model from it.

        Args:
            folder: of the checkpoint.
            headers: its tensors, without data.
            computed: its tensors that vLLM's loader computes with.
            dtype: that the model computes in.
            reload: see compat.model_loading.reloader.

        Raises:
            LayoutError: vLLM's reload fails, leaves other parameters than its loading, or does not
                write all of them.
        """
        self._model, self._reload = model, reload
        self._on_cpu: Set[str] = frozenset()
        device = next(model.parameters()).device
        self.tensors = {
            # A tensor that the checkpoint stores in float32 may need it.
            name: torch.empty(
                header.shape, dtype=torch.promote_types(dtype, header.dtype), device=device
            )
            for name, header in headers.items()
        }
        before, weights = self._checksum(), ProcessedWeights(model)
        _read(folder, self.tensors)
        for tensor in self.tensors.values():
            tensor.neg_().add_(3)
        self._first_update()
        changed = weights.changed(weights.sums)
        _read(folder, self.tensors)
        after = self._first_update()
        if after != before and computed:
            # vLLM's start computes with them on the CPU, where an exp() rounds in another way.
            self._on_cpu = computed
            after = self._first_update()
        if after != before:
            raise LayoutError("vLLM's reload of its own checkpoint gives other parameters")
        kept = [name for name in weights.sums if name not in changed]
        if kept:
            raise LayoutError(
                f"vLLM's reload of other weights leaves {len(kept)} parameters as they were "
                f"({', '.join(kept[:4])}); if they are of experts, start the server with "
                "--moe-backend triton"
            )

    def _first_update(self) -> str:
        """See update. Raises LayoutError."""
        try:
            return self.update()
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise LayoutError(
                f"vLLM cannot reload it ({type(error).__name__}: {reason})"
            ) from error

    def shards(self) -> list[LearnedShard]:
        """The copy as parameters that are filled from the checkpoint's tensors, whole."""
        shards = []
        for name, tensor in self.tensors.items():
            shape = tuple(tensor.shape)
            size = row_major(shape).size
            piece = SourceSlice(name, (size,), 0, (1,), 0)
            shards.append(LearnedShard(name, shape, ((name, shape),), (piece,)))
        return shards

    def update(self) -> str:
        """Reload the model from the copy. Returns the checksum of all its parameters then."""
        self._reload(
            {
                name: tensor.cpu() if name in self._on_cpu else tensor
                for name, tensor in self.tensors.items()
            }
        )
        return self._checksum()

    def _checksum(self) -> str:
        return weights_checksum(
            (name, tensor.data) for name, tensor in own_parameters(self._model).items()
        )


def _read(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                tensors[name].copy_(file.get_tensor(name))
