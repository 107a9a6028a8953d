"""Caches with all that writes and reads them: what can be quantised as a whole, or not at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.descriptors import QUANTISED, Descriptor, IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.nodes import argument, described
from kimigraph.passes.algebra.refusal import Refused

LATENT_READERS = ("sparse_attention", "latent_attention")


@dataclass(frozen=True)
class CacheUnit:
    """One cache of one layer (with its rope part beside the latents where that is apart) and the operators on it."""

    cache: Node
    spec: InputSpec
    form: LatentDescriptor | IndexKeyDescriptor
    writers: tuple[Node, ...]
    readers: tuple[Node, ...]
    rope: Node | None = None
    rope_spec: InputSpec | None = None

    @property
    def name(self) -> str:
        """Its source names, for people."""
        return self.spec.source if self.rope_spec is None else f"{self.spec.source} and {self.rope_spec.source}"


def described_caches(program: CapturedProgram) -> Iterator[tuple[Node, InputSpec, Descriptor]]:
    """The caches with descriptors that are not quantised yet, in order; those of rope parts beside latents too."""
    for spec in program.inputs:
        form = parse_descriptor(spec.descriptor) if spec.descriptor else None
        if isinstance(form, LatentDescriptor | IndexKeyDescriptor) and form.dtype != QUANTISED:
            yield program.placeholders[spec.name], spec, form


def index_unit(program: CapturedProgram, cache: Node, spec: InputSpec, form: IndexKeyDescriptor) -> CacheUnit:
    """The unit of a cache of index keys. Refused where anything but its writers and indexers touches it."""
    writers, readers = _split(program.graph_module.graph, cache, spec, ("index_key_write",), ("lightning_indexer",))
    _require_layout(form, spec, (*writers, *readers))
    return CacheUnit(cache, spec, form, writers, readers)


def latent_unit(program: CapturedProgram, cache: Node, spec: InputSpec, form: LatentDescriptor) -> CacheUnit:
    """The unit of a latent cache. Refused where anything but its writers and attentions touches one of its parts."""
    graph = program.graph_module.graph
    writers, readers = _split(graph, cache, spec, ("latent_write",), LATENT_READERS)
    _require_layout(form, spec, (*writers, *readers))
    parts = {
        purity.storage_root(part) if isinstance(part, Node) else None
        for part in (argument(node, "rope") for node in (*writers, *readers))
    }
    if len(parts) > 1:
        raise Refused(f"the operators on {spec.source} take different rope parts", writers[-1])
    [rope] = parts
    if rope is None:
        return CacheUnit(cache, spec, form, writers, readers)
    rope_spec = next((one for one in program.inputs if one.name == rope.name), None)
    if rope_spec is None:
        raise Refused(f"the rope part beside {spec.source} is no cache", rope)
    if _split(graph, rope, rope_spec, ("latent_write",), LATENT_READERS) != (writers, readers):
        raise Refused(f"the operators on {spec.source} take different rope parts", writers[-1])
    return CacheUnit(cache, spec, form, writers, readers, rope, rope_spec)


def rope_parts(program: CapturedProgram) -> set[str]:
    """Names of the inputs that are rope parts beside latents: they go with their latent cache."""
    found: set[str] = set()
    for node in program.graph_module.graph.nodes:
        operator = operator_of(node)
        if operator is not None and operator.name in ("latent_write", *LATENT_READERS):
            rope = argument(node, "rope")
            found |= {purity.storage_root(rope).name} if isinstance(rope, Node) else set()
    return found


def _split(
    graph: Graph, cache: Node, spec: InputSpec, writing: Sequence[str], reading: Sequence[str]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    writers: list[Node] = []
    readers: list[Node] = []
    for node in _users(graph, cache):
        operator = operator_of(node)
        name = operator.name if operator is not None else ""
        if name not in (*writing, *reading):
            raise Refused(f"the cache {spec.source} is also used by {node.name} ({described(node)})", node)
        (writers if name in writing else readers).append(node)
    if not writers or not readers:
        lacking = "written" if not writers else "read"
        raise Refused(f"the cache {spec.source} is not {lacking} by an operator", cache)
    return tuple(writers), tuple(readers)


def _users(graph: Graph, cache: Node) -> list[Node]:
    """Nodes that take the cache's memory, in order; what only views it is looked through."""
    known: dict[Node, Node] = {}
    found: list[Node] = []
    for node in graph.nodes:
        takes = any(purity.storage_root(source, known) is cache for source in node.all_input_nodes)
        if takes and not (purity.is_pure(node) and purity.storage_root(node, known) is cache):
            found.append(node)
    return found


def _require_layout(form: LatentDescriptor | IndexKeyDescriptor, spec: InputSpec, users: Sequence[Node]) -> None:
    """Pages are quantised page by page and found as before: all who use them must take them for pages."""
    for node in users:
        by_rows = "rows" in bind(node) and argument(node, "rows")
        if (form.layout == "paged") != (by_rows or argument(node, "block_table") is not None):
            raise Refused(f"the cache {spec.source} is {form.layout}, and {node.name} takes it otherwise", node)
