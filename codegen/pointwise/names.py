"""Variables of a generated kernel, named after the graph."""

import re
from keyword import iskeyword

import torch
from torch.fx import Node

from kimigraph.ir.pointwise import Loops, Value

RESERVED = (
    *("row", "column", "element", "start", "inside", "row_inside", "column_inside", "tl", "triton", "torch", "float"),
    *("range", "ROWS", "COLUMNS", "ELEMENTS", "INTERPRET", "CONSTANTS", "launch", "pointwise", "os", "Any"),
    *("round_to_bf16", "hyperbolic_tangent", "log_one_plus", "quotient", "start_next_launch", "await_earlier_launch"),
)
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "bool"}


class Names:
    """Hands out variable names; ``canonical`` ones say nothing about the graph, so equal kernels are equal text."""

    def __init__(self, loops: Loops, canonical: bool) -> None:
        self.canonical = canonical
        self.taken = set(RESERVED)
        if loops.depths:
            variables = [*loops.depths, *(section.row for section in loops.sections)]
            self.taken |= {"line", "depth", "turn", "tile", "program", "plus_product", "ask_for"}
            self.taken |= {f"{variable.name}{end}" for variable in variables for end in ("", "_inside")}
        self.buffers = {node: self._new(_stem(node), "given") for node in loops.buffers}
        self.results = {node: self._new(f"{_stem(node)}_out", "result") for node in loops.results}
        self._values: dict[int, str] = {}

    def value(self, value: Value) -> str:
        """The variable of a value."""
        if value.number not in self._values:
            self._values[value.number] = self._new(self._hint(value), "value")
        return self._values[value.number]

    def local(self, hint: str) -> str:
        """A new variable."""
        return self._new(hint, "local")

    def _hint(self, value: Value) -> str:
        if value.op == "load":
            return f"{self.buffers[value.detail.buffer]}_value" if not self.canonical else "value"
        if value.op == "convert" and value.detail in _TYPES:
            base = value.args[0]
            return f"{_stem(value.node) if value.node and not _is_cast(value.node) else base.op}_{_TYPES[value.detail]}"
        return _stem(value.node) if value.node is not None else value.op

    def _new(self, hint: str, canonical: str) -> str:
        stem = canonical if self.canonical else hint
        if iskeyword(stem) or not stem.isidentifier():
            stem = f"{canonical}_{stem}" if f"{canonical}_{stem}".isidentifier() else canonical
        name, count = stem, 1
        while name in self.taken:
            name, count = f"{stem}_{count}", count + 1
        self.taken.add(name)
        return name


def _is_cast(node: Node) -> bool:
    return "_to_copy" in str(node.target)


def _stem(node: Node) -> str:
    """A node's name without what tells it apart from its likes: numbers, and the path of the layer."""
    name = re.sub(r"^.*_\d+_(?=[a-z])", "", node.name)
    name = re.sub(r"(_\d+)+$", "", name).strip("_")
    return re.sub(r"^w_(model_)?", "", name) or "value"
