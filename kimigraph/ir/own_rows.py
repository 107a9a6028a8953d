"""``kimigraph::own_rows``: of a tensor that all ranks have, a view of the rows that one of them works on.

    own_rows(Tensor(a) x, int ways, str group) -> Tensor(a)

``x`` [N, ...] with N a multiple of ``ways``; rank r of the group gets rows r N / ways up to the next rank's. A view, so
that no kernel runs; it is no semantic operator. Fake values are those of rank 1: what begins at a multiple of 16 bytes
there does so on every rank. Errors: ValueError for rows that ``ways`` does not divide.
"""

import torch
from torch import Tensor

from kimigraph.ir.operators.registry import NAMESPACE
from kimigraph.ir.ranks import own_rows, rows_of

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("own_rows(Tensor(a) x, int ways, str group) -> Tensor(a)")
_LIBRARY.impl("own_rows", own_rows, "CompositeExplicitAutograd")


def _fake(x: Tensor, ways: int, group: str) -> Tensor:
    return rows_of(x, ways, min(1, ways - 1))


torch.library.register_fake(f"{NAMESPACE}::own_rows", _fake, lib=_LIBRARY)

OWN_ROWS = torch.ops.kimigraph.own_rows.default
"""What nodes of a graph call."""
