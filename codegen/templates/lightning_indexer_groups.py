# pyright: basic, reportArgumentType=false, reportIndexIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The Lightning Indexer in two launches on Hopper over MXFP8 keys: scores to memory, then the exact top k."""

from typing import Any

import torch

from kimigraph.codegen.templates.index_launch import key_tiles
from kimigraph.codegen.templates.indexer_group_scores import score_group_rows
from kimigraph.codegen.templates.indexer_selection import select_codes

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "peaks", "kept", "picked")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, peaks, kept, picked = scratch
    tiles, scale_rows = key_tiles(keys)
    score_group_rows[CONSTANTS["score_grid"]](
        tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, None, peaks,
        **CONSTANTS["score_group_rows"], **CONSTANTS["score_options"],
    )  # fmt: skip
    table = block_table if CONSTANTS["rows"] else None
    select_codes[CONSTANTS["select_grid"]](
        codes, peaks, lengths, table, kept, picked,
        **CONSTANTS["select_codes"], **CONSTANTS["select_options"],
    )  # fmt: skip
    return picked
