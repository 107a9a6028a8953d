"""Weights that stay packed: MXFP4 of a checkpoint, byte by byte into the planes that kernels read."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kimigraph.ir.program import InputSpec
from kimigraph.ir.reference.mxfp4_quantize import GROUP, ROW_BYTES, parts_of
from kimigraph.weights.plan import Copy
from kimigraph.weights.quantized import Mxfp4


class PackedTensors:
    """The planes (``mxfp4_quantize``) of some tensors, by the names that ``names`` gives these.

    Nothing is rounded and no real weight is made. A tensor of which the checkpoint has any piece in another format is
    left to be read as real numbers.
    """

    def __init__(self, names: Mapping[str, str], specs: Mapping[str, InputSpec], device: torch.device | str) -> None:
        self._names, self._specs, self._device = names, specs, device
        self._chosen: set[str] = set()
        self.tensors: dict[str, Tensor] = {}
        """The planes that were made."""

    def choose(self, copies: Iterable[Copy]) -> None:
        """Decide which tensors are taken, from all copies that there are."""
        pieces: defaultdict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            pieces[copy.name].append(copy)
        for name, parts in pieces.items():
            if name in self._names and all(self._fits(part) for part in parts):
                self._chosen.add(name)

    def _fits(self, copy: Copy) -> bool:
        """Whether the values are MXFP4, and a rank's part of them whole groups."""
        if not isinstance(copy.stored, Mxfp4) or copy.piece.padded:
            return False
        columns = copy.part is not None and copy.part[0] == len(copy.region) - 1
        return not columns or all(number % GROUP == 0 for number in (copy.part or ())[1:])

    def take(self, copy: Copy) -> bool:
        """Copy codes and scales of a piece to their places; False where the tensor is not taken."""
        if copy.name not in self._chosen or not isinstance(copy.stored, Mxfp4):
            return False
        sources = ((copy.stored.values, 2), (copy.stored.scale, GROUP))
        for place, (source, each) in zip(self._planes(copy.name), sources, strict=True):
            values = source.read().view(torch.uint8)
            if copy.piece.take is not None:
                values = values[slice(*copy.piece.take)]
            if copy.part is not None:
                dim, begin, behind = copy.part
                each = each if dim == len(copy.region) - 1 else 1
                values = values.narrow(dim, begin // each, (behind - begin) // each)
            # Rows alone say where: of columns a rank has the whole row of its own tensor.
            place[copy.put[: place.dim() - 1]].copy_(values)
        return True

    def _planes(self, name: str) -> tuple[Tensor, Tensor]:
        """Codes [.., rows, columns / 2] and scales [.., rows, columns / 32] of a plane, made when first asked for."""
        *outer, rows, columns = self._specs[name].shape
        made = self._names[name]
        if made not in self.tensors:
            shape = (*outer, rows, columns // GROUP * ROW_BYTES)
            self.tensors[made] = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return parts_of(self.tensors[made])
