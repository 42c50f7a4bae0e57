"""Masters and moments of parameters: on the parameters' device, or in host memory that passes
through the device in buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from example_trainer.training.host_memory import HostTensors, Kind, Piece, Work
from example_trainer.training.quantised import QUANTISED_BLOCK, dequantise, quantise, scale_shape

MASTER = Kind("master")
FLOAT32_KINDS = (MASTER, Kind("exp_avg"), Kind("exp_avg_sq"))
"""An update's tensors for each parameter, all of its shape."""
QUANTISED_KINDS = (
    MASTER,
    Kind("exp_avg_codes", torch.uint8),
    Kind("exp_avg_scale", block=QUANTISED_BLOCK, shaped=scale_shape),
    Kind("exp_avg_sq_codes", torch.uint8),
    Kind("exp_avg_sq_scale", block=QUANTISED_BLOCK, shaped=scale_shape),
)
"""As FLOAT32_KINDS, with moments in 8 bits: see quantised.py."""


class StateGroup:
    """Masters and moments of the parameters whose moments have the same kinds.

    Args:
        weights: this rank's part of each parameter, by name. The moments begin as zeros.
        kinds: the masters first.
        device: of the parameters.
        offload: the tensors are in host memory.
        bucket_elements: of each kind that are on the device at once.
        are_masters: `weights` are the masters, and stay on the device. Otherwise the masters begin
            as copies of them.

    Attributes:
        names: of the parameters, in their order.
        kinds: what there is for each of them.
        tensors: by the kind's name, then by the parameter's.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kinds: Sequence[Kind],
        device: torch.device,
        offload: bool,
        bucket_elements: int,
        are_masters: bool = False,
    ) -> None:
        self.names, self.kinds = tuple(weights), tuple(kinds)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        own_kinds = self.kinds[1:] if are_masters else self.kinds
        self._host = HostTensors(shapes, own_kinds, device, bucket_elements) if offload else None
        self._masters = weights if are_masters else None
        self.tensors: dict[str, Mapping[str, Tensor]] = {MASTER.name: weights}
        if self._host is not None:
            for kind, arena in zip(own_kinds, self._host.arenas, strict=True):
                self.tensors[kind.name] = arena.tensors
        else:
            for kind in own_kinds:
                self.tensors[kind.name] = {
                    name: torch.zeros(kind.shape(shape), dtype=kind.dtype, device=device)
                    for name, shape in shapes.items()
                }
        self._pieces = [Piece(name, 0, shape[0], 0, shape) for name, shape in shapes.items()]
        if not are_masters:
            for name, tensor in weights.items():
                self.tensors[MASTER.name][name].copy_(tensor)

    def work(self, kinds: int, work: Work, write_back: bool) -> None:
        """Call `work` with pieces of the first `kinds` kinds of tensors, on the device, until all
        have had their turn.

        Args:
            write_back: whether it changes them.
        """
        if not self.names:
            return
        masters = self._masters
        if self._host is not None and masters is not None:

            def work_with_masters(
                pieces: Sequence[Piece], state: Sequence[Sequence[Tensor]]
            ) -> None:
                work(pieces, [[piece.of(masters[piece.name]) for piece in pieces], *state])

            self._host.work(kinds - 1, work_with_masters, write_back)
            return
        if self._host is not None:
            self._host.work(kinds, work, write_back)
            return
        work(self._pieces, [list(self.tensors[kind.name].values()) for kind in self.kinds[:kinds]])


def saved_kinds(name: str, saved: Mapping[str, object]) -> tuple[Kind, ...]:
    """The kinds of tensors that a saved state has for a parameter.

    Args:
        saved: by key, such as `exp_avg.model.norm.weight`.
    """
    return QUANTISED_KINDS if f"{QUANTISED_KINDS[1].name}.{name}" in saved else FLOAT32_KINDS


def read_whole(
    name: str, kinds: Sequence[Kind], saved: Mapping[str, object], read: Callable[[str], Tensor]
) -> Iterator[tuple[Kind, Tensor]]:
    """Each whole tensor of a parameter from a saved state. Moments of the other kinds are converted
    to these.

    Args:
        kinds: that are wanted: FLOAT32_KINDS or QUANTISED_KINDS.
        saved: by key.
        read: gives one whole tensor by its key.
    """
    if saved_kinds(name, saved) == tuple(kinds):
        yield from ((kind, read(f"{kind.name}.{name}")) for kind in kinds)
        return
    yield MASTER, read(f"{MASTER.name}.{name}")
    for number, moment in enumerate(FLOAT32_KINDS[1:]):
        codes, scale = QUANTISED_KINDS[1 + 2 * number : 3 + 2 * number]
        signed = number == 0
        if tuple(kinds) == QUANTISED_KINDS:
            yield from zip(
                (codes, scale), quantise(read(f"{moment.name}.{name}"), signed), strict=True
            )
        else:
            yield (
                moment,
                dequantise(read(f"{codes.name}.{name}"), read(f"{scale.name}.{name}"), signed),
            )
