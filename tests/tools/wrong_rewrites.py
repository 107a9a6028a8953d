"""A table of wrong rewrites, and an outside pass that makes one of them among many right ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path
from kimigraph.ir.remarks import PassResult
from kimigraph.passes import Pass, PassContext

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Wrong:
    """One kind of mistake: where it can be made, and how. The rewritten node keeps its name unless it goes."""

    find: Callable[[Node], bool]
    rewrite: Callable[[Graph, Node], None]


def is_node(value: Any) -> bool:
    return isinstance(value, Node)


def bypass(graph: Graph, node: Node) -> None:
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def set_argument(index: int, change: Callable[[Any], Any]) -> Callable[[Graph, Node], None]:
    def rewrite(graph: Graph, node: Node) -> None:
        node.update_arg(index, change(node.args[index]))
        infer(node)
        for user in node.users:
            infer(user)

    return rewrite


def set_target(target: Any) -> Callable[[Graph, Node], None]:
    def rewrite(graph: Graph, node: Node) -> None:
        node.target = target
        infer(node)

    return rewrite


def swap_arguments(graph: Graph, node: Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def lose_write(graph: Graph, node: Node) -> None:
    """Readers inside the step still see the new values; the caller's tensor keeps the old ones."""
    if node.target is ATEN.copy_.default:
        node.replace_all_uses_with(node.args[1])
        graph.erase_node(node)
    else:
        node.target = ATEN.index_put.default


def read_stale(graph: Graph, node: Node) -> None:
    """Readers of the updated cache read what was there before the update."""
    with graph.inserting_before(node):
        old = graph.call_function(ATEN.clone.default, (node.args[0],))
    infer(old)
    node.replace_all_uses_with(old)


def round_to_bf16(graph: Graph, node: Node) -> None:
    with graph.inserting_after(node):
        narrow = graph.call_function(ATEN._to_copy.default, (node,), {"dtype": torch.bfloat16})
    with graph.inserting_after(narrow):
        wide = graph.call_function(ATEN._to_copy.default, (narrow,), {"dtype": torch.float32})
    infer(narrow), infer(wide)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)


def take_earlier_columns(graph: Graph, node: Node) -> None:
    """``slice(x, dim, start, end)`` one place too early."""
    _, dim, start, _ = node.args
    length = node.meta["val"].shape[dim]
    node.args = (node.args[0], dim, start - 1, start - 1 + length)


def other_weight(graph: Graph, node: Node) -> None:
    """The weight of another linear of the same input and size."""
    node.update_arg(1, next(other.args[1] for other in siblings(node)))


def siblings(node: Node) -> list[Node]:
    users = node.args[0].users if is_node(node.args[0]) else ()
    shape = node.meta["val"].shape
    return [u for u in users if u.target is node.target and u is not node and u.meta["val"].shape == shape]


def constant_of(node: Node) -> float | None:
    value = node.args[1] if len(node.args) > 1 else None
    return value if isinstance(value, float) else None


def is_scale(node: Node) -> bool:
    """A factor that counts: not 1, and not one that all scores of a top-k share."""
    factor = constant_of(node)
    return node.target is ATEN.mul.Tensor and factor not in (None, 1.0) and "indexer" not in module_path(node)


def is_epsilon(node: Node) -> bool:
    """An epsilon that counts: that of the query's norm only scales scores that are nearly equal."""
    value = constant_of(node)
    small = value is not None and 1e-10 < value < 1e-3
    return small and node.target is ATEN.add.Tensor and "q_a_layernorm" not in module_path(node)


def is_square_sum(node: Node) -> bool:
    shape = node.args[0].meta["val"].shape if node.target is ATEN.sum.dim_IntList else ()
    return len(shape) == 4 and node.args[1] == [-1] and len(node.args) == 2 and shape[-1] == shape[-2]


def calls(*targets: Any) -> Callable[[Node], bool]:
    return lambda node: node.target in targets


def adds_tensors(node: Node) -> bool:
    return node.target is ATEN.add.Tensor and node.meta["val"].is_floating_point() and all(map(is_node, node.args))


def is_part(node: Node) -> bool:
    """One of several equal parts of a split."""
    source = node.args[0] if node.args else None
    parts = source.meta["val"] if is_node(source) and source.target is ATEN.split.Tensor else ()
    return len(parts) > 1 and node.args[1] == 0


WRONG: dict[str, Wrong] = {
    "dropped-scale": Wrong(is_scale, bypass),
    "swapped-operands": Wrong(calls(ATEN.sub.Tensor), swap_arguments),
    "wrong-axis": Wrong(is_square_sum, set_argument(1, lambda dims: [-2])),
    "epsilon": Wrong(is_epsilon, set_argument(1, lambda value: value / 10)),
    "dtype": Wrong(calls(ATEN.linear.default), round_to_bf16),
    "lost-mutation": Wrong(calls(ATEN.copy_.default, ATEN.index_put_.default), lose_write),
    "stale-read": Wrong(calls(ATEN.index_put_.default), read_stale),
    "off-by-one-limit": Wrong(calls(ATEN.le.Tensor), set_target(ATEN.lt.Tensor)),
    "dropped-activation": Wrong(calls(ATEN.relu.default, ATEN.silu.default, ATEN.tanh.default), bypass),
    "one-pick-less": Wrong(lambda n: n.target is ATEN.topk.default and n.args[1] > 2, set_argument(1, lambda k: k - 1)),
    "wrong-offset": Wrong(lambda n: n.target is ATEN.slice.Tensor and n.args[2] > 0, take_earlier_columns),
    "wrong-part": Wrong(is_part, set_argument(1, lambda index: index + 1)),
    "sign": Wrong(adds_tensors, set_target(ATEN.sub.Tensor)),
    "dropped-mask": Wrong(calls(ATEN.masked_fill.Scalar, ATEN.__and__.Tensor), bypass),
    "sum-for-mean": Wrong(calls(ATEN.mean.dim), set_target(ATEN.sum.dim_IntList)),
    "wrong-weight": Wrong(lambda n: n.target is ATEN.linear.default and bool(siblings(n)), other_weight),
}


def sites(program: CapturedProgram, kind: str, layer: int) -> list[str]:
    """The names of the nodes of a layer (or, with none there, of the model) at which a mistake can be made."""
    nodes = [n for n in program.graph_module.graph.nodes if n.op == "call_function" and WRONG[kind].find(n)]
    here = [n.name for n in nodes if f".layers.{layer}." in f"{module_path(n)}."]
    return here or [n.name for n in nodes]


def commutes(node: Node) -> bool:
    return node.target in (ATEN.mul.Tensor, ATEN.add.Tensor) and len(node.args) == 2 and all(map(is_node, node.args))


@dataclass(frozen=True)
class Commute(Pass):
    """Swaps the operands of products and sums, which is right, and makes the mistake ``wrong`` at the node ``at``."""

    name: ClassVar[str] = "commute"
    summary: ClassVar[str] = "swap the operands of products and sums"

    wrong: str = ""
    at: str = ""
    announce: bool = True

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        graph, count = program.graph_module.graph, 0
        for node in list(graph.nodes):
            wrong = bool(self.wrong) and node.name == self.at
            if not (wrong or commutes(node)) or (self.announce and not context.allow(node.name)):
                continue
            (WRONG[self.wrong].rewrite if wrong else swap_arguments)(graph, node)
            count += 1
        return PassResult(count > 0, statistics={"swapped": count})
