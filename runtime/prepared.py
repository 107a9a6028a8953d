"""Weights that a program takes in another form than the model has them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

    def take_over(self) -> dict[str, torch.Tensor]:
        """Views of the prepared weight that say what those do that lie in it side by side, by name.

        Who puts them in place of the model's own has each value once. Changes are not seen any more.
        """
        [step] = self._steps
        views: dict[str, torch.Tensor] = {}
        begin = 0
        for name in step["of"] if step["op"] == "cat" else ():
            size = self._tensors[name].shape[step["dim"]]
            views[name] = self.value.narrow(step["dim"], begin, size)
            begin += size
        found = {name: view for name, view in views.items() if view.stride() == self._tensors[name].stride()}
        self._tensors, self._versions = {}, []
        return found

    def _current(self) -> list[int]:
        return [tensor_version(tensor) for tensor in self._tensors.values()]


class PreparedWeights:
    """Prepared weights that several programs over one model share: each is made once, whoever asks first.

    ``own`` are the weights that programs are given, where nobody else has them and nobody changes them: those that lie
    in a prepared one side by side become views of it, so that each is in memory once.
    """

    def __init__(self, own: dict[str, torch.Tensor] | None = None) -> None:
        self._own = own
        self._made: dict[str, PreparedWeight] = {}

    def weight(self, steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> PreparedWeight:
        """What ``steps`` make of these very tensors."""
        key = _key(steps, tensors)
        if key not in self._made:
            made = self._made[key] = PreparedWeight(steps, tensors)
            if self._own is not None:
                self._own.update(made.take_over())
                self._made[_key(steps, self._own)] = made
        return self._made[key]

    def current(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The weight of that name as it now is, for a program that has bound ``tensor``."""
        return tensor if self._own is None else self._own.get(name, tensor)


def _key(steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> str:
    places = [(tensors[name].device.type, tensors[name].data_ptr()) for name in names_read(steps)]
    return json.dumps([steps, places])


def prepare_in_place(
    preparation: Mapping[str, Sequence[Mapping[str, Any]]], tensors: dict[str, torch.Tensor], spare: AbstractSet[str]
) -> None:
    """Make the prepared weights of ``preparation`` in ``tensors``, and drop each of ``spare`` after its last reader.

    At the peak there are the tensors and one prepared weight. Later changes of the model's own are not seen.
    """
    for made, steps, spent in in_turn(preparation, spare):
        tensors[made] = prepare(steps, tensors)
        for name in spent:
            del tensors[name]


def in_turn(
    preparation: Mapping[str, Sequence[Mapping[str, Any]]], spare: AbstractSet[str]
) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], list[str]]]:
    """Each prepared weight with its steps, and those of ``spare`` that no later one reads."""
    readers = Counter(name for steps in preparation.values() for name in set(names_read(steps)))
    for made, steps in preparation.items():
        read = dict.fromkeys(names_read(steps), 1)
        readers.subtract(read)
        yield made, steps, [name for name in read if not readers[name] and name in spare]
