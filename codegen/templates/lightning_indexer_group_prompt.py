# pyright: basic, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
# Kernel text: kernels are made by @gluon.jit, whose types say little to a checker.
"""The Lightning Indexer over many MXFP8 query rows on Hopper: keys become bf16 once a sequence, queries once a slab.

Scales of groups stand inside the sum under the ReLU, so that fp8 products would have to stop after each 32 channels.
"""

from typing import Any

import torch

from kimigraph.codegen.templates.index_launch import first_lengths, key_tiles
from kimigraph.codegen.templates.indexer_prompt_scores import score_prompt
from kimigraph.codegen.templates.indexer_selection import select_codes
from kimigraph.codegen.templates.real_groups import real_keys, real_queries

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "peaks", "kept", "picked", "entries")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, peaks, kept, picked, entries = scratch
    cache = memory.empty(CONSTANTS["cache"], dtype=torch.bfloat16, device=q.device)
    queries = memory.empty(CONSTANTS["queries"], dtype=torch.bfloat16, device=q.device)
    tiles, _ = key_tiles(cache)
    batch, tokens, slab = q.shape[0], q.shape[1], len(codes)
    firsts = first_lengths(lengths, batch, tokens, slab, memory)
    for sequence in range(batch):
        table = None if block_table is None else block_table[sequence]
        real_keys[(len(entries),)](
            keys, table, cache, entries, sequence, **CONSTANTS["real_keys"], **CONSTANTS["real_options"]
        )
        for number, start in enumerate(range(0, tokens, slab)):
            rows = slice(start, min(start + slab, tokens))
            count = rows.stop - start
            first = None if firsts is None else firsts[sequence, number]
            scales = None if q_scales is None else q_scales[sequence, rows]
            real_queries[(count,)](
                q[sequence, rows], scales, queries, **CONSTANTS["real_queries"], **CONSTANTS["real_options"]
            )
            blocks = -(-count // CONSTANTS["block"])
            score_prompt[(blocks * CONSTANTS["score_prompt"]["SPLITS"],)](
                tiles, None, queries, weights[sequence, rows], first, entries, codes, peaks, 0, count,
                **CONSTANTS["score_prompt"], **CONSTANTS["score_options"],
            )  # fmt: skip
            listed_table = block_table[sequence : sequence + 1] if CONSTANTS["rows"] else None
            select_codes[(count,)](
                codes, peaks, first, listed_table, kept, picked[sequence, rows],
                **CONSTANTS["select_codes"], **CONSTANTS["select_options"],
            )  # fmt: skip
    return picked
