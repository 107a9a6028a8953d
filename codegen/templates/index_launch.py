# pyright: basic, reportArgumentType=false
# Host text of kernel files: descriptors and starts that several forms of the indexer hand to their launches.
"""What the indexer's forms on Hopper prepare on the host alike: descriptors of the keys, what slabs of rows see."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def key_tiles(keys):
    """Descriptors of 64 keys, and of the four bytes of scales that each key of a page of bytes has (bf16: None)."""
    if keys.dtype != torch.uint8:
        rows = keys.view(-1, 128)
        layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
        return TensorDescriptor(rows, list(rows.shape), [128, 1], [64, 128], layout), None
    rows = keys.view(-1, 128).view(torch.float8_e4m3fn)
    layout = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float8e4nv)
    planes = keys.view(keys.shape[0], -1).view(torch.float32)
    unswizzled = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    scales = TensorDescriptor(planes, list(planes.shape), [planes.shape[1], 1], [1, 64], unswizzled)
    return TensorDescriptor(rows, list(rows.shape), [128, 1], [64, 128], layout), scales


def first_lengths(lengths, batch, tokens, slab, memory):
    """What the first row of each slab sees, 16 bytes apart: one alignment is one kernel. None without ``lengths``."""
    if lengths is None:
        return None
    starts = memory.empty((-(-tokens // slab),), dtype=torch.int32, device=lengths.device)
    torch.arange(0, tokens, slab, out=starts)
    firsts = memory.empty((batch, len(starts), 4), dtype=torch.int32, device=lengths.device)
    torch.add(lengths.reshape(-1, 1, 1), starts.view(1, -1, 1).expand(-1, -1, 4), out=firsts)
    return firsts
