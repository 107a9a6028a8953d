"""From a kernel request to kernel text: one builder an operator."""

from collections.abc import Callable

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize import kda_decode, lightning_indexer, sparse_attention

BUILDERS: dict[str, Callable[[KernelRequest], KernelModule]] = {
    "kda_decode": kda_decode.build,
    "lightning_indexer": lightning_indexer.build,
    "sparse_attention": sparse_attention.build,
}
