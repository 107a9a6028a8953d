"""The way into a decoder as one kernel: rows of a table, their RMS norm, and the product of the normed rows."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.row_products import RowProduct, row_product
from kimigraph.ir.schemas import bind

_EMBEDDING = torch.ops.aten.embedding.default
_NORM = OPERATORS["rms_norm"].overload
_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class NormedLookup:
    """``product`` of the rows that ``norm`` makes of those that ``lookup`` finds in ``table`` at ``places``."""

    lookup: Node
    norm: Node
    product: RowProduct
    table: Node
    places: Node
    weight: Node
    eps: float
    rounds_first: bool


def normed_lookup(linear: Node) -> NormedLookup | None:
    """What the product is the end of; None where it is not, or no kernel has it.

    Several rows of 16 bits, from a table that lies in one piece; a norm with a weight, used for nothing else.
    """
    product = row_product(linear) if linear.target is _LINEAR else None
    if product is None or not product.narrow or product.rows < 2 or product.source.target is not _NORM:
        return None
    norm = product.source
    given = bind(norm)
    lookup, weight = given["x"], given["weight"]
    if given["residual"] is not None or not isinstance(weight, Node) or not isinstance(lookup, Node):
        return None
    if lookup.target is not _EMBEDDING or len(norm.users) != 1:
        return None
    table, places = lookup.args[0], lookup.args[1]
    if not isinstance(table, Node) or not isinstance(places, Node):
        return None
    values: list[Any] = [node.meta["val"] for node in (table, places, weight, lookup)]
    plain = all(value.is_contiguous() for value in values) and values[1].dtype in (torch.int64, torch.int32)
    if not plain or prod(values[1].shape) != product.rows or values[0].dtype != product.weight.meta["val"].dtype:
        return None
    found = NormedLookup(lookup, norm, product, table, places, weight, given["eps"], given["rounds_first"])
    return found if values[2].dtype.is_floating_point else None
