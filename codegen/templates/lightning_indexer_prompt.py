# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# Kernel text: kernels are made by @gluon.jit, whose types say little to a checker.
"""The Lightning Indexer over many query rows on Hopper, slab by slab: scores of some rows to memory, then their top k.

All slabs use the same memory, which does not grow with the rows.
"""

from typing import Any

import torch

from kimigraph.codegen.templates.index_launch import first_lengths, key_tiles
from kimigraph.codegen.templates.indexer_prompt_scores import score_prompt
from kimigraph.codegen.templates.indexer_selection import select_codes

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "peaks", "kept", "picked")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, peaks, kept, picked = scratch
    tiles, scale_rows = key_tiles(keys)
    batch, tokens, slab = q.shape[0], q.shape[1], len(codes)
    firsts = first_lengths(lengths, batch, tokens, slab, memory)
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
