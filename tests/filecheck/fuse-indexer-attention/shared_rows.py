# RUN: python -m kimigraph.tools.opt %s --passes fuse-indexer-attention | filecheck --match-full-lines %s
"""Two layers attend to one list of picks over pages of one table: the indexer lists rows, and both read them."""

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
OUTPUTS = ("add",)
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
    return (add,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, latent, latent_1, index_q, index_keys, index_weights, lengths, table):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, lengths, None, k=5, scale=1.0, block_table=table, descriptor='', rows=True)  # int32[2, 1, 5]; replaces 1 nodes, picks to picks
# CHECK-NEXT:     sparse_attention = torch.ops.kimigraph.sparse_attention.default(q, None, latent, None, lightning_indexer, scale=0.3, block_table=None, descriptor='', rows=True)  # (float32[2, 1, 2, 6], float32[2, 1, 2]); replaces 1 nodes, attention to attention
# CHECK-NEXT:     getitem = sparse_attention[0]; del sparse_attention  # float32[2, 1, 2, 6]
# CHECK-NEXT:     sparse_attention_1 = torch.ops.kimigraph.sparse_attention.default(q, None, latent_1, None, lightning_indexer, scale=0.3, block_table=None, descriptor='', rows=True); del lightning_indexer  # (float32[2, 1, 2, 6], float32[2, 1, 2]); replaces 3 nodes, picks to attention_1
# CHECK-NEXT:     getitem_1 = sparse_attention_1[0]; del sparse_attention_1  # float32[2, 1, 2, 6]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(getitem, getitem_1); del getitem, getitem_1  # float32[2, 1, 2, 6]
# CHECK-NEXT:     return (add,)
