"""The semantic operators, one file each: schema, fake implementation, cost. Importing this package registers them.

References live in ``kimigraph.ir.reference``.
"""

from kimigraph.ir.operators import kda_decode, lightning_indexer, sparse_attention

OPERATORS = {
    module.OPERATOR.name: module.OPERATOR for module in (kda_decode, lightning_indexer, sparse_attention)
}
"""Every semantic operator by its bare name."""

__all__ = ["OPERATORS"]
