# pyright: basic, reportArgumentType=false, reportIndexIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The Lightning Indexer in two launches on Hopper: scores to memory, which hardly leave the L2 cache, then the exact
top k of each row. The programs of the second take their places while the first still runs.

What the launches share is theirs alone: graphs that hold them may run side by side.
"""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimigraph.codegen.templates.indexer_scores import score_rows
from kimigraph.codegen.templates.indexer_selection import select_codes

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "peaks", "kept", "picked")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, peaks, kept, picked = scratch
    rows, scale_rows = keys.view(-1, 128), None
    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    if keys.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn)
        layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float8e4nv)
        pages = keys.view(keys.shape[0], -1).view(torch.float32)
        unswizzled = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        scale_rows = TensorDescriptor(pages, list(pages.shape), [pages.shape[1], 1], [1, 64], unswizzled)
    tiles = TensorDescriptor(rows, list(rows.shape), [128, 1], [64, 128], layout)
    score_rows[CONSTANTS["score_grid"]](
        tiles, scale_rows, q, weights, lengths, block_table, codes, peaks,
        **CONSTANTS["score_rows"], **CONSTANTS["score_options"],
    )  # fmt: skip
    table = block_table if CONSTANTS["rows"] else None
    select_codes[CONSTANTS["select_grid"]](
        codes, peaks, lengths, table, kept, picked,
        **CONSTANTS["select_codes"], **CONSTANTS["select_options"],
    )  # fmt: skip
    return picked
