"""The operators of one ONNX graph or function body while they are made, free of the onnx library."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OPSET = 20


@dataclass(frozen=True)
class Op:
    """One node. Attributes are plain values, lists of them, tensors, subgraphs and dtypes (which name a type)."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    domain: str = ""
    note: str = ""
    """Where the node comes from: its name in the graph and the line of the model."""
    modules: tuple[str, ...] = ()
    """The paths of the modules that it was written in, from the outermost."""


@dataclass(frozen=True)
class Port:
    """One input or output of a graph; sizes that the run alone knows are names."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    note: str = ""


@dataclass(frozen=True)
class Subgraph:
    """A graph that is an attribute, such as the body of a Scan."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ops: list[Op]


@dataclass
class Scope:
    """Nodes in order, with names that are used once; equal constants are made once."""

    ops: list[Op] = field(default_factory=lambda: [])
    note: str = ""
    modules: tuple[str, ...] = ()
    _names: dict[str, int] = field(default_factory=lambda: {})
    _constants: dict[tuple[Any, ...], str] = field(default_factory=lambda: {})

    def inner(self) -> "Scope":
        """A scope for a subgraph: its names are used nowhere outside either."""
        return Scope(_names=self._names)

    def unused(self, base: str) -> str:
        """``base``, numbered where it is taken."""
        count = self._names[base] = self._names.get(base, 0) + 1
        return base if count == 1 else self.unused(f"{base}.{count}")

    def add(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str] | int = 1, *, domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """A node with these attributes (None: left out), and the names of its outputs."""
        names = [self.unused(f"{kind.lower()}_{i}") for i in range(outputs)] if isinstance(outputs, int) else outputs
        given = {key: value for key, value in attributes.items() if value is not None}
        self.ops.append(Op(kind, tuple(inputs), tuple(names), given, domain, self.note, self.modules))
        return tuple(names)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A standard node of one output, and its name."""
        return self.add(kind, inputs, **attributes)[0]

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        """The name of a constant: a number, a (nested) list, or a tensor."""
        tensor = torch.as_tensor(value, dtype=dtype).contiguous()
        key = (dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        if key not in self._constants:
            origin = self.note, self.modules
            self.note, self.modules = "", ()
            self._constants[key] = self.add("Constant", (), (self.unused("constant"),), value=tensor)[0]
            self.note, self.modules = origin
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """A constant list of int64, as shapes and axes are given."""
        return self.constant(list(values), torch.int64)
