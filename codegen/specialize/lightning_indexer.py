"""Which of the Lightning Indexer's kernels serves a request, and its shapes, strides and tiles.

On Hopper, at the published sizes: two launches that overlap for a few query rows (or one, which is slower at every
shape measured), one for many. Two launches of plain Triton for everything else.
"""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize import (
    lightning_indexer_group_prompt,
    lightning_indexer_groups,
    lightning_indexer_hopper,
    lightning_indexer_prefill,
    lightning_indexer_prompt,
    lightning_indexer_split,
)
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, expanded, needed, padded, refuse, render
from kimigraph.ir.descriptors import IndexKeyDescriptor, parse_descriptor

TILE = (128, 64, 256)  # keys, heads and channels of one product
TILE_FP32 = (64, 64, 32)
MOST_CODES = 1 << 27  # of the scores in memory at once, 512 MiB
SELECT_BLOCK = 4096  # codes a step of the selection; the packed running counts need it below 2 ** 15


FORMS = {
    "group slabs": lightning_indexer_group_prompt,
    "groups": lightning_indexer_groups,
    "two launches": lightning_indexer_split,
    "one launch": lightning_indexer_hopper,
    "slabs": lightning_indexer_prompt,
    "running": lightning_indexer_prefill,
}
# What is chosen unasked, first come first served: forms whose present text has passed tests/gpu (decision 0007).
PROVEN = ("group slabs", "groups", "two launches", "one launch", "slabs", "running")


def build(
    request: KernelRequest,
    *,
    form: str | None = None,
    select_block: int = SELECT_BLOCK,
    ctas: int | None = None,
    selects: str | None = None,
    splits: int | None = None,
    most_codes: int = MOST_CODES,
) -> KernelModule:
    """``[B, S, H, D]`` queries over ``[B, T, D]`` keys or pages, any sizes.

    ``form`` asks for one of ``FORMS`` by name, which must serve the request. ``select_block`` codes make a selection
    step of the plain kernel, which keeps ``most_codes`` in memory; ``ctas`` programs select from a row in the form of
    two launches, by the kernel named ``selects``; ``splits`` programs share a row in that of one.
    """
    if (form == "two launches" or ctas is not None) and lightning_indexer_split.serves(request):
        return lightning_indexer_split.build(request, ctas=ctas, selects=selects)
    if splits is not None and lightning_indexer_hopper.serves(request):
        return lightning_indexer_hopper.build(request, splits=splits)
    for name in PROVEN if form is None else (form,):
        if FORMS[name].serves(request) and (form is not None or FORMS[name].wins(request)):
            return FORMS[name].build(request)
    if form is not None:
        raise refuse(request, f"the form '{form}' does not serve these operands", "leave the form to the rule")
    return build_plain(request, select_block, most_codes)


def key_group(request: KernelRequest) -> int:
    """Elements of a group of quantised keys that share a scale; 0 where a key has one, or none."""
    text = str(request.attributes.get("descriptor", ""))
    form = parse_descriptor(text) if text and needed(request, "keys").dtype == "uint8" else None
    return form.group or 0 if isinstance(form, IndexKeyDescriptor) else 0


def byte_form(request: KernelRequest) -> int:
    """``key_group`` of what the plain kernels read; CompileError for bytes that they cannot."""
    keys, group = needed(request, "keys"), key_group(request)
    if keys.dtype == "float8_e4m3fn":
        raise refuse(request, "keys are e4m3 without scales", "keep them as bytes under a quantised descriptor")
    if keys.dtype == "uint8" and tuple(keys.stride) != (keys.shape[1] * keys.shape[2], keys.shape[2], 1):
        raise refuse(request, "pages of bytes are not contiguous", "pass the cache itself, not a view of it")
    if request.attributes.get("quantises_q") and group & (group - 1):
        raise refuse(request, f"groups of {group} are no power of two", "quantise queries before, by mxfp8_quantize")
    return group


def mixed_types(*operands: TensorSpec) -> bool:
    """Whether the operands of a product must be brought to fp32: what is not bf16 after decoding is."""
    return len({"bfloat16" if spec.dtype in ("uint8", "float8_e4m3fn") else spec.dtype for spec in operands}) > 1


def build_plain(request: KernelRequest, select_block: int, most_codes: int) -> KernelModule:
    """Scores in one launch, the selection in another; over and over where a sequence has many rows."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    lengths, mask, table = (request.tensors.get(name) for name in ("lengths", "mask", "block_table"))
    batch, tokens, heads, width = q.shape
    page = keys.shape[1] if table is not None else 0
    total = keys.shape[1] if table is None else table.shape[1] * page
    top = int(request.attributes["k"])
    group, q_scales, mixed = byte_form(request), request.tensors.get("q_scales"), mixed_types(q, keys)
    if q.dtype == "float8_e4m3fn":
        q = replace(q, dtype="uint8")
    itemsize = 4 if mixed or q.dtype == "float32" else 2
    # fp32 products run on the plain cores with operands in registers: larger tiles spill.
    block_t, block_h, block_d = TILE if itemsize == 2 else TILE_FP32
    if width > block_d:
        block_d = min(block_d, 128)  # a loop over channels is pipelined: its stages must fit shared memory together
    block_t, block_h, block_d = (
        min(padded(total, 16), block_t),
        min(padded(heads, 16), block_h),
        min(padded(width, 16), block_d),
    )
    all_tokens, tokens = tokens, min(tokens, max(most_codes // max(batch * total, 1), 1))
    block_s = min(max(tokens, 1), 8)
    length_stride = 0
    if lengths is not None and len(lengths.shape) > 0 and lengths.shape[0] > 1:
        length_stride = lengths.stride[0]
    score: dict[str, Any] = {
        "S": tokens,
        "H": heads,
        "D": width,
        "T": total,
        "PAGE": page,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "KEY_STRIDE": keys.stride,
        "WEIGHT_STRIDE": weights.stride,
        "LENGTH_STRIDE": length_stride,
        "MASK_STRIDE": (0, 0, 0) if mask is None else expanded(mask, (batch, all_tokens, total)),
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "BLOCK_S": block_s,
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "UPCAST": mixed,
        "PLANE": keys.shape[1] if keys.dtype == "uint8" else 0,
        "GROUP": group,
        "Q_SCALE_STRIDE": (0, 0, 0, 0) if q_scales is None else q_scales.stride,
        "QUANTISES": bool(request.attributes.get("quantises_q", False)),
        "INTERPRET": False,
    }
    select: dict[str, Any] = {
        "S": tokens,
        "T": total,
        "K": top,
        "LENGTH_STRIDE": length_stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "PAGE": page,
        "ROWS": bool(request.attributes.get("rows", False)),
        "BLOCK": min(padded(total, 16), select_block),
    }
    score_options = {"num_warps": 4 if block_t >= 64 else 2, "num_stages": 1 if block_s == 1 else 2}
    select_options = {"num_warps": min(max(select["BLOCK"] // 256, 1), 16), "num_stages": 1}
    text = render(
        "lightning_indexer",
        {
            "codes": (batch * tokens, total),
            "picked": (batch, all_tokens, top),
            "score_grid": (ceil_div(total, block_t), batch, ceil_div(tokens, block_s)),
            "select_grid": (batch * tokens,),
            "score_keys": score,
            "score_options": score_options,
            "select_row": select,
            "select_options": select_options,
        },
    )
    launches = (
        ahead_of_time(
            "score_keys",
            {
                "q": q,
                "keys": keys,
                "weights": weights,
                "lengths": lengths,
                "mask": mask,
                "block_table": table,
                "q_scales": q_scales,
                "codes": "int32",
            },
            score,
            score_options,
        ),
        ahead_of_time(
            "select_row",
            {"codes": "int32", "lengths": lengths, "block_table": table, "picked": "int32"},
            select,
            select_options,
        ),
    )
    return KernelModule(text, launches)
