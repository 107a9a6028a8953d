"""Weights that a program takes in another form than the model has them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from kimigraph.adapters.tensor_version import tensor_version
from kimigraph.ir.preparation import names_read, prepare


class PreparedWeight:
    """One prepared weight, ``value``, and the model's own that it is made of.

    Those are kept so that a change of them in place is seen: ``refresh`` then makes the weight again, in its memory.
    """

    def __init__(self, steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        self._steps = steps
        self._tensors = {name: tensors[name] for name in names_read(steps)}
        self._versions = self._current()
        self.value = prepare(steps, self._tensors)

    @property
    def sources(self) -> list[torch.Tensor]:
        """The model's own weights, but those made under inference mode, whose changes nothing counts."""
        return [tensor for tensor in self._tensors.values() if not tensor.is_inference()]

    def refresh(self) -> None:
        """Make the weight again if one of the model's own was changed since."""
        versions = self._current()
        if versions != self._versions:
            self._versions = versions
            self.value.copy_(prepare(self._steps, self._tensors))

    def _current(self) -> list[int]:
        return [tensor_version(tensor) for tensor in self._tensors.values()]


class PreparedWeights:
    """Prepared weights that several programs over one model share: each is made once, whoever asks first."""

    def __init__(self) -> None:
        self._made: dict[str, PreparedWeight] = {}

    def weight(self, steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """What ``steps`` make of these very tensors."""
        places = [(tensors[name].device.type, tensors[name].data_ptr()) for name in names_read(steps)]
        key = json.dumps([steps, places])
        if key not in self._made:
            self._made[key] = PreparedWeight(steps, tensors)
        return self._made[key]


def prepare_in_place(
    preparation: Mapping[str, Sequence[Mapping[str, Any]]], tensors: dict[str, torch.Tensor], spare: AbstractSet[str]
) -> None:
    """Make the prepared weights of ``preparation`` in ``tensors``, and drop each of ``spare`` after its last reader.

    At the peak there are the tensors and one prepared weight. Later changes of the model's own are not seen.
    """
    readers = Counter(name for steps in preparation.values() for name in set(names_read(steps)))
    for made, steps in preparation.items():
        tensors[made] = prepare(steps, tensors)
        for name in set(names_read(steps)):
            readers[name] -= 1
            if not readers[name] and name in spare:
                del tensors[name]
