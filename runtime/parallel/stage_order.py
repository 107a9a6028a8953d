"""In which order a stage of a pipeline receives, computes and sends the parts of a step, and proof that all meet.

The order is a list that depends on the stage's place alone, never on what is ready first: so messages between two
stages come in the same order on both, and no stage waits for one that waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kimigraph.ir.errors import CompileError

Kind = Literal["post", "await", "compute", "send"]


@dataclass(frozen=True)
class Action:
    """What is done with one part of a step: make room for what arrives (``post``), wait for it, compute, send."""

    kind: Kind
    part: int

    def __str__(self) -> str:
        return f"{self.kind} {self.part}"


def order_of(stage: int, stages: int, parts: int) -> list[Action]:
    """The actions of a stage in a step of ``parts`` parts.

    The next part may arrive while one is computed, and what is sent leaves while the next is computed.
    """
    order = [Action("post", 0)] if stage > 0 else []
    for part in range(parts):
        if stage > 0:
            order.append(Action("await", part))
        if stage > 0 and part + 1 < parts:
            order.append(Action("post", part + 1))
        order.append(Action("compute", part))
        if stage < stages - 1:
            order.append(Action("send", part))
    return order


def prove_orders(orders: Sequence[Sequence[Action]]) -> None:
    """CompileError unless all stages get through their orders, each message goes to the part that it is for, and each
    part is computed once, behind its arrival and before it is sent."""
    for stage, order in enumerate(orders):
        _prove_parts(stage, stage < len(orders) - 1, order)
    reached = [0] * len(orders)
    sent = [list[int]() for _ in orders]
    posted = [list[int]() for _ in orders]
    moving = True
    while moving:
        moving = False
        for stage, order in enumerate(orders):
            while reached[stage] < len(order) and _can(order[reached[stage]], stage, sent, posted):
                action = order[reached[stage]]
                if action.kind == "post":
                    posted[stage].append(action.part)
                if action.kind == "send":
                    sent[stage].append(action.part)
                reached[stage], moving = reached[stage] + 1, True
    stuck = [stage for stage, order in enumerate(orders) if reached[stage] < len(order)]
    if stuck:
        told = "; ".join(f"stage {stage} at '{orders[stage][reached[stage]]}'" for stage in stuck)
        raise CompileError(f"the stages of the pipeline wait for one another: {told}")
    for stage in range(1, len(orders)):
        if sent[stage - 1] != posted[stage]:
            raise CompileError(
                f"stage {stage - 1} sends the parts {sent[stage - 1]} and stage {stage} takes them as "
                f"{posted[stage]}: both must have one order"
            )


def _can(action: Action, stage: int, sent: list[list[int]], posted: list[list[int]]) -> bool:
    """Whether an action goes through: a part can be awaited once there is room for it and as many were sent as it
    takes for its message to be among them."""
    if action.kind != "await":
        return True
    return action.part in posted[stage] and len(sent[stage - 1]) > posted[stage].index(action.part)


def _prove_parts(stage: int, sends: bool, order: Sequence[Action]) -> None:
    places = {(action.kind, action.part): place for place, action in enumerate(order)}
    if len(places) < len(order):
        raise CompileError(f"stage {stage} does something twice in one step: {', '.join(map(str, order))}")
    for part in {action.part for action in order}:
        wanted: list[Kind] = [*(("post", "await") if stage else ()), "compute", *(("send",) if sends else ())]
        found = [places.get((kind, part), -1) for kind in wanted]
        if -1 in found or found != sorted(found):
            raise CompileError(
                f"stage {stage} handles part {part} of a step in the wrong order ({', '.join(map(str, order))}): "
                f"it has to be {', '.join(f'{kind} {part}' for kind in wanted)}"
            )
