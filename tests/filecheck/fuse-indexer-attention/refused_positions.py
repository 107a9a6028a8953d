# RUN: python -m kimigraph.tools.opt %s --passes fuse-indexer-attention --remarks | filecheck --match-full-lines %s
"""The picks are also used as positions: listing rows instead would change what is gathered by them."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 1, 2, 6), (12, 12, 6, 1), "float32"),
    InputSpec("latent", "input", "latent", (9, 4, 6), (24, 6, 1), "float32"),
    InputSpec("latent_1", "input", "latent_1", (9, 4, 6), (24, 6, 1), "float32"),
    InputSpec("index_q", "input", "index_q", (2, 1, 4, 8), (32, 32, 8, 1), "float32"),
    InputSpec("index_keys", "input", "index_keys", (9, 4, 8), (32, 8, 1), "float32"),
    InputSpec("index_weights", "input", "index_weights", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("lengths", "input", "lengths", (2,), (1,), "int32", value_range=(1, 13)),
    InputSpec("table", "input", "table", (2, 3), (3, 1), "int32", value_range=(0, 9)),
)
OUTPUTS = ("add", "bigger")
CONSTANTS = {}


@torch.no_grad()
def step(q, latent, latent_1, index_q, index_keys, index_weights, lengths, table):
    picks = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, lengths, None, k=5, scale=1.0, block_table=table, descriptor="")  # int32[2, 1, 5]; selects as topk
    _to_copy = torch.ops.aten._to_copy.default(picks, dtype=torch.int64)  # int64[2, 1, 5]
    _to_copy_1 = torch.ops.aten._to_copy.default(_to_copy, dtype=torch.int32)  # int32[2, 1, 5]
    attention = torch.ops.kimigraph.sparse_attention.default(q, None, latent, None, _to_copy_1, scale=0.3, block_table=table, descriptor="")  # (float32[2, 1, 2, 6], float32[2, 1, 2])
    getitem = attention[0]  # float32[2, 1, 2, 6]
    attention_1 = torch.ops.kimigraph.sparse_attention.default(q, None, latent_1, None, picks, scale=0.3, block_table=table, descriptor="")  # (float32[2, 1, 2, 6], float32[2, 1, 2])
    getitem_1 = attention_1[0]  # float32[2, 1, 2, 6]
    add = torch.ops.aten.add.Tensor(getitem, getitem_1)  # float32[2, 1, 2, 6]
    bigger = torch.ops.aten.gt.Scalar(picks, 3)  # bool[2, 1, 5]
    return (add, bigger)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, latent, latent_1, index_q, index_keys, index_weights, lengths, table):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     picks = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, lengths, None, k=5, scale=1.0, block_table=table, descriptor='')  # int32[2, 1, 5]
# CHECK-NEXT:     _to_copy = torch.ops.aten._to_copy.default(picks, dtype=torch.int64)  # int64[2, 1, 5]
# CHECK-NEXT:     _to_copy_1 = torch.ops.aten._to_copy.default(_to_copy, dtype=torch.int32); del _to_copy  # int32[2, 1, 5]
# CHECK-NEXT:     attention = torch.ops.kimigraph.sparse_attention.default(q, None, latent, None, _to_copy_1, scale=0.3, block_table=table, descriptor=''); del _to_copy_1  # (float32[2, 1, 2, 6], float32[2, 1, 2])
# CHECK-NEXT:     getitem = attention[0]; del attention  # float32[2, 1, 2, 6]
# CHECK-NEXT:     attention_1 = torch.ops.kimigraph.sparse_attention.default(q, None, latent_1, None, picks, scale=0.3, block_table=table, descriptor='')  # (float32[2, 1, 2, 6], float32[2, 1, 2])
# CHECK-NEXT:     getitem_1 = attention_1[0]; del attention_1  # float32[2, 1, 2, 6]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(getitem, getitem_1); del getitem, getitem_1  # float32[2, 1, 2, 6]
# CHECK-NEXT:     bigger = torch.ops.aten.gt.Scalar(picks, 3); del picks  # bool[2, 1, 5]
# CHECK-NEXT:     return (add, bigger)
# CHECK: # missed fuse-indexer-attention at bigger: attention: the picks are also used as positions, by bigger
# CHECK: # missed fuse-indexer-attention at bigger: attention_1: the picks are also used as positions, by bigger
