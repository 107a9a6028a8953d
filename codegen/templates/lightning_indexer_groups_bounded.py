# pyright: basic, reportArgumentType=false, reportIndexIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The Lightning Indexer in two launches on Hopper over MXFP8 keys, for rows of many keys a winner: scores and the
largest of every 16, then the exact top k of each row, of whose scores few are looked at."""

from typing import Any

import torch

from kimigraph.codegen.templates.index_launch import key_tiles
from kimigraph.codegen.templates.indexer_bounded import select_bounded
from kimigraph.codegen.templates.indexer_group_scores import score_group_rows

CONSTANTS: dict[str, Any] = {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    shapes = [CONSTANTS[name] for name in ("codes", "tops", "peaks", "kept", "picked")]
    scratch = [memory.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes]
    codes, tops, peaks, kept, picked = scratch
    tiles, scale_rows = key_tiles(keys)
    score_group_rows[CONSTANTS["score_grid"]](
        tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, tops, peaks,
        **CONSTANTS["score_group_rows"], **CONSTANTS["score_options"],
    )  # fmt: skip
    table = block_table if CONSTANTS["rows"] else None
    select_bounded[CONSTANTS["select_grid"]](
        codes, tops, peaks, lengths, table, kept, picked,
        **CONSTANTS["select_bounded"], **CONSTANTS["select_options"],
    )  # fmt: skip
    return picked
