"""The graph of ATen operators that an ONNX graph becomes, while it is made."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, cast

import torch
from torch import SymInt, Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from kimigraph.capture.onnx.audit import MOST_BYTES
from kimigraph.ir.errors import CaptureError
from kimigraph.ir.fake import quiet
from kimigraph.ir.open_sizes import OpenSize, OpenSizeError, SizeExpressions, sized

ATEN = torch.ops.aten
FOLDED_BYTES = 2**26
"""What is known and larger stays a computation."""
FOLDED_IN_ALL = 2**31
"""So does what is known beyond this, of a whole file."""


@dataclass(frozen=True)
class Value:
    """One tensor of the graph: its form, and the node that makes it or what it is, where that is known now.

    ``numbers`` are the elements of a list of sizes of which some are known in the run alone.
    """

    form: Tensor
    node: Node | None = None
    known: Tensor | None = None
    numbers: tuple[Any, ...] | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes: numbers, or OpenSize for what the run alone knows."""
        return tuple(sized(size) for size in self.form.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.form.dtype

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self.form.dim()


@dataclass
class Builder:
    """Calls of ATen operators on values. What depends on no input and no weight is computed at once."""

    root: nn.Module = field(default_factory=nn.Module)
    graph: Graph = field(default_factory=Graph)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
    title: str = ""
    """The node of the file that is being translated."""
    meta: dict[str, Any] = field(default_factory=lambda: {})
    """Where it comes from: what nodes made now are told."""
    _lifted: dict[int, tuple[Tensor, Node]] = field(default_factory=lambda: {})
    _folded: float = 0
    _sizes: SizeExpressions[Node] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = SizeExpressions(self._measured, self._size)

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        """An input."""
        return self.given(self.graph.placeholder(name), torch.empty(shape, dtype=dtype, device="meta"))

    def given(self, node: Node, like: Tensor) -> Value:
        """The value of a node that looks like ``like``."""
        with self.mode:
            node.meta["val"] = torch.empty(like.shape, dtype=like.dtype)
        return Value(node.meta["val"], node)

    def weight(self, name: str, tensor: Tensor) -> Value:
        """A parameter of the module, below the modules that its name says."""
        path = place(self.root, name, nn.Parameter(tensor, requires_grad=False))
        return self.given(self.graph.get_attr(path), tensor)

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> Value:
        """What is known now."""
        known = torch.as_tensor(value, dtype=dtype)
        return Value(known, known=known)

    def node_of(self, value: Value) -> Node:
        """The node that makes a value; one that is known becomes a constant of the module."""
        if value.node is not None:
            return value.node
        if value.known is None:
            raise OpenSizeError(f"computes with sizes that the run alone knows ({list(value.numbers or ())})")
        if id(value.known) not in self._lifted:
            made = self._made_anew(value.known)
            if made is not None:
                return made
            name = f"constant_{len(self._lifted)}"
            # A copy, for what was expanded from one element counts as contiguous and has strides of its own.
            constant = value.known.clone(memory_format=torch.contiguous_format)
            self.root.register_buffer(name, constant, persistent=False)
            node = self.graph.get_attr(name)
            self.given(node, value.known)
            node.meta["constant"] = value.known
            self._lifted[id(value.known)] = (value.known, node)
        return self._lifted[id(value.known)][1]

    def _made_anew(self, known: Tensor) -> Node | None:
        """A constant that counts or is one number throughout, as the call that makes it: patterns read those."""
        flat = known.flatten()
        if known.numel() > 1 and bool((flat == flat[0]).all()):
            return self._fresh(ATEN.full.default, list(known.shape), flat[0].item(), dtype=known.dtype).node
        counts = known.numel() > 0 and not known.dtype.is_floating_point and known.dtype != torch.bool
        if not counts or known.numel() != max(known.shape, default=0):
            return None
        start, step = int(flat[0]), int(flat[1] - flat[0]) if known.numel() > 1 else 1
        if step == 0 or not torch.equal(flat, start + step * torch.arange(known.numel(), dtype=known.dtype)):
            return None
        if (start, step) == (0, 1):
            made = self._fresh(ATEN.arange.default, known.numel(), dtype=known.dtype)
        else:
            made = self._fresh(ATEN.arange.start_step, start, start + step * known.numel(), step, dtype=known.dtype)
        for axis, size in enumerate(known.shape):
            if size == 1 and known.dim() > 1 and (known.numel() > 1 or axis > 0):
                made = self.call(ATEN.unsqueeze.default, made, axis)
        return made.node

    def _fresh(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._form(target, args, kwargs)
        return Value(node.meta["val"], node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """``target`` on values and plain arguments: a value, or a tuple of them for several results.

        CaptureError naming the node where the operator does not take these, or makes something larger than memory.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        values = [leaf for leaf in leaves if isinstance(leaf, Value)]
        form = self._form(target, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, Tensor)]
        size = sum(self._most(t) * t.element_size() for t in tensors)
        if size > MOST_BYTES:
            raise CaptureError(f"node '{self.title}' makes {size:.3g} bytes, at most {MOST_BYTES:.3g} are taken")
        is_open = any(isinstance(leaf, OpenSize) for leaf in leaves)
        known = all(value.known is not None for value in values) and not is_open
        if known and size <= min(FOLDED_BYTES, FOLDED_IN_ALL - self._folded):
            self._folded += size
            result = target(*_mapped(args, lambda v: v.known), **_mapped(kwargs, lambda v: v.known))
            return tuple(map(self.constant, result)) if isinstance(result, tuple | list) else self.constant(result)
        given = _mapped((args, kwargs), self.node_of, self._sizes.of)
        node = self.graph.call_function(target, *given)
        node.meta = {**self.meta, "val": form}
        if not isinstance(form, tuple | list):
            # What is picked tells how many places there are: then the places themselves may go.
            self._sizes.note(node, form, preferred=target is ATEN.index.Tensor)
            return Value(form, node)
        return tuple(self._item(node, number, item) for number, item in enumerate(cast("Iterable[Tensor]", form)))

    def _measured(self, node: Node, axis: int) -> Node:
        made = self.graph.call_function(ATEN.sym_size.int, (node, axis))
        made.meta["val"] = node.meta["val"].shape[axis]
        return made

    def _size(self, target: Callable[..., Any], a: Node | int, b: Node | int) -> Node:
        made = self.graph.call_function(target, (a, b))
        made.meta["val"] = target(*(item.meta["val"] if isinstance(item, Node) else item for item in (a, b)))
        return made

    def _most(self, tensor: Tensor) -> float:
        """How many elements a tensor may have."""
        most = 1.0
        for size in tensor.shape:
            bound = self._bound(size) if isinstance(size, SymInt) else size
            most *= bound
        return most

    def _bound(self, size: SymInt) -> float:
        assert self.mode.shape_env is not None
        return float(self.mode.shape_env.bound_sympy(size.node.expr).upper)

    def _item(self, node: Node, number: int, form: Tensor) -> Value:
        item = self.graph.call_function(getitem, (node, number))
        item.meta["val"] = form
        self._sizes.note(item, form)
        return Value(form, item)

    def _form(self, target: Any, args: Any, kwargs: Any) -> Any:
        def form(value: Value) -> Tensor:
            return value.form if value.node is not None else self.mode.from_tensor(value.form)

        try:
            # Some operators take no symbolic size without the Python dispatcher.
            with torch.no_grad(), self.mode, enable_python_dispatcher(), quiet():
                return target(*_mapped(args, form), **_mapped(kwargs, form))
        except Exception as error:
            shapes = [list(leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value)]
            reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise CaptureError(f"node '{self.title}' cannot have operands of shapes {shapes}: {reason}") from error


def _symbol(size: OpenSize) -> Any:
    return size.symbol


def _mapped(tree: Any, function: Callable[[Value], Any], size: Callable[[OpenSize], Any] = _symbol) -> Any:
    return pytree.tree_map_only(OpenSize, size, pytree.tree_map_only(Value, function, tree))


def place(root: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Register ``parameter`` below the modules that its dotted name says, and return its path."""
    path = [part for part in re.sub(r"[^\w.]+", "_", name).split(".") if part] or ["weight"]
    home = root
    for number, part in enumerate(path[:-1]):
        if not isinstance(getattr(home, part, nn.Module()), nn.Module):
            return place(root, "_".join(path), parameter)
        if not hasattr(home, part):
            home.add_module(part, nn.Module())
        home = getattr(home, part)
        assert number < len(path)
    leaf = path[-1]
    while hasattr(home, leaf):
        leaf += "_"
    home.register_parameter(leaf, parameter)
    return ".".join([*path[:-1], leaf])
