"""How the kernels of KDA see operands whose heads and channels models lay out in several ways."""

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import refuse


def by_head(spec: TensorSpec, width: int) -> tuple[int, ...]:
    """Strides (sequence, token, head, channel) of ``[B, S, H * width]`` or ``[B, S, H, width]``."""
    if len(spec.shape) == 4:
        return spec.stride
    return (spec.stride[0], spec.stride[1], width * spec.stride[2], spec.stride[2])


def per_channel(request: KernelRequest, spec: TensorSpec, heads: int, width: int) -> tuple[int, int]:
    """Strides (head, channel) of ``[H * width]``, ``[H, width]`` or either with leading ones."""
    axes = [(size, stride) for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1]
    if [size for size, _ in axes] == [heads, width]:
        return axes[0][1], axes[1][1]
    if len(axes) == 1:
        return (width * axes[0][1], axes[0][1])
    if not axes:
        return (0, 0)
    raise refuse(request, f"dt_bias has the shape {list(spec.shape)}", f"want [{heads * width}] or [{heads}, {width}]")


def per_head(request: KernelRequest, spec: TensorSpec) -> int:
    """Stride along the one axis of ``a_log`` that is not 1."""
    strides = [stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1]
    if len(strides) > 1:
        raise refuse(request, f"a_log has the shape {list(spec.shape)}", "want one axis of heads, others 1")
    return strides[0] if strides else 0
