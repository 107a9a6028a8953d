"""From a kernel request to kernel text: one builder an operator."""

from collections.abc import Callable

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import kda_decode, kda_prefill, lightning_indexer, short_conv, sparse_attention

BUILDERS: dict[str, Callable[[KernelRequest], KernelModule]] = {
    "kda_decode": kda_decode.build,
    "kda_prefill": kda_prefill.build,
    "lightning_indexer": lightning_indexer.build,
    "short_conv": short_conv.build,
    "sparse_attention": sparse_attention.build,
}
