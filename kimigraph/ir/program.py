"""A captured model: an FX graph with the facts that the graph alone does not hold."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from kimigraph.ir.regions import copy_graph_module
from kimigraph.ir.shares import Share

InputKind = Literal["weight", "buffer", "constant", "cache", "input"]
BLOCK_TABLE = "block_table"
"""The input of a step over pages that says where the pages of each sequence are: int32 [B, columns]."""


@dataclass(frozen=True)
class InputSpec:
    """One placeholder of the graph, in order.

    ``name`` is the placeholder; ``source`` its name outside: the state-dict name of a weight, buffer or constant, the
    flat cache name (``cache.3.latent``, ``state.0.kda``) or the argument path of an input. ``mutated`` inputs are
    updated in place by the step. ``value_range`` (low inclusive, high exclusive) bounds integer inputs for seeded
    tensors. ``descriptor`` is the text form of a cache's descriptor (``kimigraph.ir.descriptors``), empty for others.
    ``parts`` are source and dtype of the captured caches whose values a quantised cache holds, in the order of its row.
    ``share`` (the fields of a ``Share``): of the tensor outside each rank has a part, and ``shape`` is that part's;
    which one, ``part_of`` says: neighbouring ranks have the same one, ``share_step`` of them.
    """

    name: str
    kind: InputKind
    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    mutated: bool = False
    value_range: tuple[int, int] | None = None
    descriptor: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    share: tuple[int, int, int] | None = None
    share_step: int = 1

    @property
    def shared(self) -> Share | None:
        """The part that a rank has; None where each has the whole."""
        return None if self.share is None else Share(*self.share)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor outside."""
        return self.shape if self.shared is None else self.shared.whole(self.shape)

    def part_of(self, rank: int) -> int:
        """The number of the part that ``rank`` of the program has."""
        return rank // self.share_step % (1 if self.share is None else Share(*self.share).ways)

    def taken(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` has of the tensor outside."""
        return whole if self.shared is None else self.shared.take(whole, self.part_of(rank))

    @property
    def bound(self) -> bool:
        """Whether the tensor comes with the model (weight, buffer, constant) and not from the caller."""
        return self.kind in ("weight", "buffer", "constant")


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the step returns, in order; ``source`` is its path in the model's own result."""

    name: str
    source: str


@dataclass
class CapturedProgram:
    """An FX graph on its way through the compiler.

    ``graph_module`` is flat: every weight, buffer, constant, cache and input is a placeholder (``inputs``, same order
    and names), the graph updates mutated placeholders in place, and its output node returns a tuple (``outputs``).
    Every node but the output carries ``meta["val"]``. ``tensors`` holds the bound inputs by placeholder name. The tree
    specifications (``torch.utils._pytree``) restore the model's call signature; they cover caller-given inputs only, in
    the order of ``inputs``. ``info`` is free JSON about where the graph came from (source, phase, model type, shapes).
    """

    graph_module: GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    tensors: dict[str, torch.Tensor] = field(default_factory=lambda: {})
    in_spec: Any = None
    out_spec: Any = None
    info: dict[str, Any] = field(default_factory=lambda: {})

    @property
    def placeholders(self) -> dict[str, Node]:
        """The placeholder nodes by name."""
        return {node.name: node for node in self.graph_module.graph.nodes if node.op == "placeholder"}

    def copy(self) -> "CapturedProgram":
        """The same program over a copy of its graph and regions, nodes named as before; tensors are shared."""
        return replace(self, graph_module=copy_graph_module(self.graph_module), info=dict(self.info))
