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

    ``signature`` is the schema after the name, ``reference`` the eager fp32 function, ``fake`` checks the arguments and
    gives the outputs on fake tensors, ``cost`` takes the call's arguments with fake tensors for tensors. ``summary`` is
    one line for people, ``documentation`` the whole text: formulas, shapes, dtypes, errors, source.
    """

    name: str
    signature: str
    summary: str
    documentation: str | None
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Callable[..., Cost]

    @property
    def overload(self) -> Any:
        """The callable that appears as a node's target: ``torch.ops.kimigraph.<name>.default``."""
        return getattr(torch.ops.kimigraph, self.name).default


def register(operator: Operator) -> Operator:
    """Define the operator in torch's registry; its implementation looks the reference up at each call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return operator.reference(*args, **kwargs)

    _LIBRARY.define(operator.name + operator.signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(operator.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=_LIBRARY)
    return operator


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors, None counted as nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
