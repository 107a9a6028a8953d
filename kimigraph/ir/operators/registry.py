"""How an operator becomes ``torch.ops.kimigraph.<name>``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "kimigraph"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Cost:
    """What one call moves and computes: bytes through device memory and floating-point operations."""

    bytes: int
    flops: int


@dataclass
class Operator:
    """One semantic operator.

    ``signature`` is the schema after the name, ``reference`` the eager fp32 function, ``fake`` gives the outputs on fake
    tensors, ``cost`` takes the call's (args, kwargs) with fake tensors for tensors. ``summary`` is one line for people.
    """

    name: str
    signature: str
    summary: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Callable[..., Cost]

    @property
    def overload(self) -> Any:
        """The callable that appears as a node's target: ``torch.ops.kimigraph.<name>.default``."""
        return getattr(torch.ops.kimigraph, self.name).default


def register(operator: Operator) -> Operator:
    """Define the operator in torch's registry; its implementation looks the reference up at each call."""
    _LIBRARY.define(operator.name + operator.signature)
    _LIBRARY.impl(operator.name, lambda *args, **kwargs: operator.reference(*args, **kwargs), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=_LIBRARY)
    return operator


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors, None counted as nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
