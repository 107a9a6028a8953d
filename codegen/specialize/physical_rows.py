"""Sparse attention over indices that are rows of the flattened pages: every sequence reads the pages as one cache."""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize import sparse_attention
from kimigraph.codegen.specialize.rendering import needed, refuse


def build_attention(request: KernelRequest, **options: Any) -> KernelModule:
    """The kernel of ``sparse_attention``; ``rows`` becomes a stride of 0 along the sequences."""
    if request.attributes.get("rows"):
        batch = needed(request, "q_latent").shape[0]
        tensors = dict(request.tensors)
        for name in ("latent", "rope"):
            tensors[name] = _flattened(request, tensors.get(name), batch)
        request = replace(request, tensors=tensors)
    return sparse_attention.build(request, **options)


def _flattened(request: KernelRequest, pages: TensorSpec | None, batch: int) -> TensorSpec | None:
    if pages is None:
        return None
    count, size, width = pages.shape
    if pages.stride[0] != size * pages.stride[1]:
        raise refuse(request, "pages do not lie side by side", "pass the cache itself, not a view of it")
    return replace(pages, shape=(batch, count * size, width), stride=(0, *pages.stride[1:]))
