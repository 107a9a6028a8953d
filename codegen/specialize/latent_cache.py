"""The parts of a latent cache as kernels see them: views of one tensor where its rows hold several."""

from dataclasses import replace

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import needed, refuse
from kimigraph.ir.descriptors import QUANTISED, LatentDescriptor, parse_descriptor

Columns = tuple[tuple[int, int] | None, ...]


def cache_parts(
    request: KernelRequest,
) -> tuple[TensorSpec, TensorSpec | None, TensorSpec | None, Columns | None]:
    """Latent, rope part and scales, and the columns by which ``cache_parts`` of the kernel text cuts them out.

    Columns are None when the tensors are the parts. Raises CompileError for a cache of bytes that cannot be cut.
    """
    latent, rope = needed(request, "latent"), request.tensors.get("rope")
    text = str(request.attributes.get("descriptor", ""))
    form = parse_descriptor(text) if text else None
    if not isinstance(form, LatentDescriptor) or form.buffers != 1:
        if latent.dtype == "uint8":
            raise refuse(request, "the cache is bytes that no descriptor explains", "give its descriptor")
        return latent, rope, None, None
    width, turns = form.width, form.rope_dim
    if form.dtype != QUANTISED:
        rope_at = (width, width + turns) if turns else None
        return part(latent, latent.dtype, 1, (0, width)), optional(latent, latent.dtype, 1, rope_at), None, (
            (0, width), rope_at, None,
        )  # fmt: skip
    count = width // (form.tile or width)
    scales_first = form.order == "scales_rope"
    scales_begin = width if scales_first else width + 2 * turns
    rope_begin = width + 4 * count if scales_first else width
    if form.row % 4 or scales_begin % 4 or any(stride % 4 for stride in latent.stride[:-1]):
        raise refuse(request, "scales do not stand at multiples of 4 bytes", "use a row of a multiple of 4 bytes")
    rope_at = (rope_begin // 2, rope_begin // 2 + turns) if turns else None
    scales_at = (scales_begin // 4, scales_begin // 4 + count)
    columns = ((0, width), rope_at, scales_at)
    return (
        part(latent, "uint8", 1, columns[0]),
        optional(latent, "bfloat16", 2, rope_at),
        part(latent, "float32", 4, scales_at),
        columns,
    )


def part(whole: TensorSpec, dtype: str, size: int, columns: tuple[int, int]) -> TensorSpec:
    """Columns of a cache read as elements of ``size`` of its own elements."""
    strides = (*(stride // size for stride in whole.stride[:-1]), whole.stride[-1])
    return replace(whole, shape=(*whole.shape[:-1], columns[1] - columns[0]), stride=strides, dtype=dtype)


def optional(whole: TensorSpec, dtype: str, size: int, columns: tuple[int, int] | None) -> TensorSpec | None:
    """The same where there may be no such columns."""
    return None if columns is None else part(whole, dtype, size, columns)


def length_stride(lengths: TensorSpec | None) -> int:
    """Elements between the lengths of two sequences: 0 where one serves all."""
    return lengths.stride[0] if lengths is not None and lengths.shape and lengths.shape[0] > 1 else 0
