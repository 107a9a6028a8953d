# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# Kernel text: kernels are made by @gluon.jit, whose types say little to a checker.
"""The Lightning Indexer over many query rows on Hopper, slab by slab: scores of some rows to memory, then their top k.

All slabs use the same memory, which does not grow with the rows.
"""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimigraph.codegen.templates.indexer_prompt_scores import score_prompt
from kimigraph.codegen.templates.indexer_selection import select_codes

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "peaks", "kept", "picked")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, peaks, kept, picked = scratch
    cache_rows, scale_rows = keys.view(-1, 128), None
    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    if keys.dtype == torch.uint8:
        cache_rows = cache_rows.view(torch.float8_e4m3fn)
        layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float8e4nv)
        pages = keys.view(keys.shape[0], -1).view(torch.float32)
        unswizzled = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        scale_rows = TensorDescriptor(pages, list(pages.shape), [pages.shape[1], 1], [1, 64], unswizzled)
    tiles = TensorDescriptor(cache_rows, list(cache_rows.shape), [128, 1], [64, 128], layout)
    batch, tokens, slab = q.shape[0], q.shape[1], len(codes)
    firsts = None
    if lengths is not None:
        # What the first row of each slab sees, 16 bytes apart: one alignment is one kernel.
        starts = memory.empty((-(-tokens // slab),), dtype=torch.int32, device=q.device)
        torch.arange(0, tokens, slab, out=starts)
        firsts = memory.empty((batch, len(starts), 4), dtype=torch.int32, device=q.device)
        torch.add(lengths.reshape(-1, 1, 1), starts.view(1, -1, 1).expand(-1, -1, 4), out=firsts)
    for sequence in range(batch):
        table = None if block_table is None else block_table[sequence]
        for number, start in enumerate(range(0, tokens, slab)):
            rows = slice(start, min(start + slab, tokens))
            count = rows.stop - start
            first = None if firsts is None else firsts[sequence, number]
            blocks = -(-count // CONSTANTS["block"])
            score_prompt[(blocks * CONSTANTS["score_prompt"]["SPLITS"],)](
                tiles, scale_rows, q[sequence, rows], weights[sequence, rows], first, table, codes, peaks, sequence,
                count, **CONSTANTS["score_prompt"], **CONSTANTS["score_options"],
            )  # fmt: skip
            listed_table = block_table[sequence : sequence + 1] if CONSTANTS["rows"] else None
            select_codes[(count,)](
                codes, peaks, first, listed_table, kept, picked[sequence, rows],
                **CONSTANTS["select_codes"], **CONSTANTS["select_options"],
            )  # fmt: skip
    return picked
