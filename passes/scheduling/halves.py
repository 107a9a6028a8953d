"""What two interleaved half-batches would cost at least: a bound of the cost model, before anybody splits a program.

Inside one batch the layers are a chain; the KDA layers of one half could run beside the DSA layers of the other. Both
halves together move and compute at least what the whole does, and read every weight once more; what they can win is the
launches and waits of one half, which the other hides. So two halves take at least the time in which both move and
compute, and at least all launches and the moving of one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from kimigraph.ir.cost import touched_bytes, work_of
from kimigraph.ir.dependences import holds_operator, starts_work
from kimigraph.ir.device import Device
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.passes.scheduling.branches import duration_of

LEAST_SHARE = 0.95
"""Of the step as it is: from there on two half-batches are no gain."""

_PICKED = frozenset(("moe_experts",))
"""Operators that read the weights which their tokens pick: two halves read them in part only once each."""


@dataclass(frozen=True)
class Halves:
    """Seconds of a step as it is, and of two half-batches at least; bytes of weights that both halves read."""

    whole: float
    halves: float
    weights: int

    @property
    def may_pay(self) -> bool:
        """Whether the bound leaves room for a gain that is worth another program."""
        return self.halves < LEAST_SHARE * self.whole

    def describe(self, device: Device) -> str:
        """For a remark."""
        told = (
            f"two interleaved half-batches take at least {self.halves * 1e6:.1f} us, the step as it is "
            f"{self.whole * 1e6:.1f} us on one stream of {device.name}: both read {self.weights / 1e6:.1f} MB of "
            "weights, which costs "
        )
        verdict = (
            "less than the launches that one hides of the other"
            if self.may_pay
            else "as much as hidden launches save, or more"
        )
        return told + verdict


def bound_of(program: CapturedProgram, device: Device) -> Halves:
    """The bound for a program after the passes that fuse."""
    nodes = [node for node in program.graph_module.graph.nodes if starts_work(node)]
    return half_batches(nodes, {spec.name: spec for spec in program.inputs}, device)


def half_batches(nodes: Iterable[Node], specs: Mapping[str, InputSpec], device: Device) -> Halves:
    """The bound for a program whose work is ``nodes``."""
    known: dict[Node, bool] = {}
    fixed = busy = again = 0.0
    weights = 0
    for node in nodes:
        duration = duration_of(node, device)
        fixed, busy = fixed + duration.fixed, busy + duration.busy
        read = 0 if holds_operator(node, _PICKED) else _weight_bytes(node, specs, known)
        weights += min(read, work_of(node).bytes)
        again += min(read, work_of(node).bytes) / device.bytes_per_second
    moved = busy + again
    return Halves(fixed + busy, max(moved, fixed + moved / 2), weights)


def _weight_bytes(node: Node, specs: Mapping[str, InputSpec], known: dict[Node, bool]) -> int:
    operands = [argument for argument in node.all_input_nodes if _is_weight(argument, specs, known)]
    return sum(touched_bytes(argument.meta.get("val")) for argument in operands)


def _is_weight(node: Node, specs: Mapping[str, InputSpec], known: dict[Node, bool]) -> bool:
    """Whether the value is made of weights alone."""
    if node not in known:
        if node.op == "placeholder":
            known[node] = node.name in specs and specs[node.name].kind == "weight"
        else:
            inputs = node.all_input_nodes
            known[node] = bool(inputs) and all(_is_weight(argument, specs, known) for argument in inputs)
    return known[node]
