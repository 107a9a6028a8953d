"""``raise-cache-writes``: writes of new rows into described caches become ``latent_write`` and ``index_key_write``.

Anchored at ``index_copy_`` and ``index_put_`` on a cache input with a descriptor. A layer norm of index keys, an RMS
norm of latents and rotary positions right before a write are taken along. Where positions are a tensor's elements as
they are, the write reads those, and waits for no kernel that only turns them into another type.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.passes.algebra.affine import affine
from kimigraph.passes.algebra.cache_writes import WRITES, RowWrite, row_write
from kimigraph.passes.algebra.frames import Operand, require_type
from kimigraph.passes.algebra.nodes import FLOATS, argument, dtype, is_cast, packet, shape, widens
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.algebra.rms import Norm, norm_around
from kimigraph.passes.algebra.rotation import Angles, Rotation, rotation_of
from kimigraph.passes.algebra.rule import FusionPass, require_unwritten
from kimigraph.passes.algebra.strips import through

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Prepared:
    """New rows before norm and rotation: ``values`` as [B, S, D], what is done to them, the nodes that do it."""

    values: Node
    rotation: Rotation | None = None
    norm: Node | None = None
    path: tuple[Node, ...] = ()
    rms: Norm | None = None

    @property
    def norms(self) -> tuple[Node, ...]:
        """What of the path is a norm."""
        return self.rms.path if self.rms is not None else () if self.norm is None else (self.norm,)

    @property
    def norm_weights(self) -> dict[str, Node | None]:
        """The norm's weight and bias."""
        if self.rms is not None:
            return {"weight": self.rms.weight}
        return {} if self.norm is None else {name: argument(self.norm, name) for name in ("weight", "bias")}


@dataclass(frozen=True)
class WriteSite:
    """Checked writes that become one operator, before ``place``; the second one is that of the rope part."""

    writes: tuple[RowWrite, ...]
    prepared: tuple[Prepared, ...]
    descriptor: str
    place: Node


@dataclass(frozen=True)
class RaiseCacheWrites(FusionPass):
    """Names the writes to latent and index-key caches, so that one launch prepares and stores the new rows.

    Refused: writes that are no rows [B, S, D] of a contiguous cache, positions that may repeat, a rope part written at
    other positions than its latent part or read in between.
    """

    name: ClassVar[str] = "raise-cache-writes"
    summary: ClassVar[str] = "writes of new cache rows, with their norm and rotation, become latent_write and such"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "an `index_copy_` or `index_put_` of new rows into a described cache, behind a layer norm (index keys), an RMS "
        "norm (latents) and rotary positions or not"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "a contiguous cache [B, T, D] or [B, 1, T, D] of bfloat16, float16 or float32",
        "positions count up from token to token",
        "latent and rope part are written at the same positions, and not read between the two writes",
        "norm and rotation are taken along where nothing else uses them, a norm where it rounds once, last",
    )
    effect: ClassVar[str] = "`latent_write` or `index_key_write`, which update the caches in place"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The writes by position."""
        return [node for node in graph.nodes if node.target in WRITES]

    def check(self, program: CapturedProgram, anchor: Node) -> WriteSite:
        """The cache write that this is; a rope part belongs to its latent part, the later of the two is the anchor."""
        spec = _spec(program, anchor)
        descriptor = parse_descriptor(spec.descriptor) if spec is not None and spec.descriptor else None
        if spec is None or not isinstance(descriptor, LatentDescriptor | IndexKeyDescriptor):
            raise Refused("the write is not to a described cache", anchor)
        try:
            if descriptor.layout != "contiguous":
                raise Refused("the written cache is paged and the write is by rows", anchor)
            write = row_write(anchor, spec)
            if isinstance(descriptor, IndexKeyDescriptor):
                site = WriteSite((write,), (_prepared(write, with_norm=True),), spec.descriptor, anchor)
            else:
                site = _latent_site(program, write, descriptor)
            if site is not None:
                _require_operands(program.graph_module.graph, site)
        except Refused as refusal:
            raise refusal.raised_to(1, [anchor]) from refusal
        if site is None:
            raise Refused("the write is not to a described cache, or to the first part of one", anchor)
        return site

    def note(self, site: WriteSite) -> str:
        """What is taken for granted: that positions lie in the cache."""
        return f"positions of {site.writes[0].positions.name} are taken to lie in the cache, none below 0"

    def rewrite(self, program: CapturedProgram, site: WriteSite) -> Node:
        """Put the operator in the place of the last write and hand readers the cache itself."""
        graph, first = program.graph_module.graph, site.writes[0]
        batch, tokens, _ = first.sizes
        emit = _Emitter(graph, site.place)
        plain = _plain_positions(graph, first, site.place)
        positions = emit.shaped(plain or first.positions, (batch, tokens), expand=plain is None)
        caches = [emit.three_dims(write.cache) for write in site.writes]
        values = [emit.shaped(one.values, write.sizes) for write, one in zip(site.writes, site.prepared, strict=True)]
        turned = site.prepared[-1]
        rotation = turned.rotation
        angles = (
            []
            if rotation is None
            else [emit.angles(found, rotation, first.sizes) for found in (rotation.cos, rotation.sin)]
        )
        style = "none" if rotation is None else rotation.style
        kwargs: dict[str, Any] = {"rope_style": style, "descriptor": site.descriptor}
        if isinstance(parse_descriptor(site.descriptor), IndexKeyDescriptor):
            norm, weights = site.prepared[0].norm, list(site.prepared[0].norm_weights.values()) or [None, None]
            kwargs["norm_eps"] = 1e-6 if norm is None else argument(norm, "eps")
            name, args = "index_key_write", (*caches, *values, positions, *weights, *(angles or [None, None]))
        else:
            rope = [caches[1], values[1]] if len(caches) > 1 else [None, None]
            name = "latent_write"
            args = (caches[0], rope[0], values[0], rope[1], positions, *(angles or [None, None]))
            rms = site.prepared[0].rms
            kwargs |= {} if rms is None else {"norm_weight": rms.weight, "norm_eps": rms.eps}
        replaced = [write.node for write in site.writes]
        replaced += [node for one in site.prepared for node in one.norms]
        node = call(
            graph, OPERATORS[name].overload, args, kwargs, like=first.node, before=site.place, replaces=replaced
        )
        for write in site.writes:
            write.node.replace_all_uses_with(write.cache, propagate_meta=False)
            graph.erase_node(write.node)
        return node


def _spec(program: CapturedProgram, write: Node) -> InputSpec | None:
    """The input whose memory a write changes."""
    root = purity.storage_root(write)
    return next((spec for spec in program.inputs if spec.name == root.name), None)


def _prepared(write: RowWrite, *, with_norm: bool) -> Prepared:
    """Norm and rotation that only serve this write, else the values as they are."""
    plain = Prepared(_uncast(write.values, write))
    rotation = rotation_of(write.values)
    if rotation is not None and not (_private(rotation.path, write.node) and _rounds_once(rotation.path, write)):
        rotation = None
    below = write.values if rotation is None else rotation.x
    norm = through(below) if with_norm else None
    if norm is not None and _is_norm(norm.node, write.sizes[2]):
        path = (*(() if rotation is None else rotation.path), *norm.path, norm.node)
        if _private(path, write.node) and _rounds_once(path, write):
            source = norm.node.args[0]
            assert isinstance(source, Node)
            return Prepared(_uncast(source, write), rotation, norm.node, path)
    return plain if rotation is None else Prepared(_uncast(rotation.x, write), rotation, None, rotation.path)


def _prepared_latent(write: RowWrite) -> Prepared:
    """An RMS norm that only serves this write and rounds once, at its end; else the values as they are."""
    plain = Prepared(_uncast(write.values, write))
    below = through(write.values)
    near = [*below.node.all_input_nodes, *(node for one in below.node.all_input_nodes for node in one.all_input_nodes)]
    root = next((node for node in near if packet(node) == "rsqrt"), None)
    try:
        norm = None if root is None else norm_around(root)
    except Refused:
        return plain
    if norm is None or norm.weight is None or norm.residual is not None or norm.rounds_first:
        return plain
    path = tuple(dict.fromkeys((*below.path, *norm.path)))
    ends = norm.out in (below.node, *below.path) and norm.weight.meta["val"].is_contiguous()
    if (
        not ends
        or shape(norm.x)[-1] != write.sizes[2]
        or not _private(path, write.node)
        or not _rounds_once(path, write)
    ):
        return plain
    return Prepared(norm.x, None, None, path, norm)


def _plain_positions(graph: Graph, write: RowWrite, place: Node) -> Node | None:
    """The tensor whose elements the positions of single tokens are, in order, if it is not written before ``place``."""
    batch, tokens, _ = write.sizes
    try:
        form = affine(write.positions, write.node)
        known, [symbol] = form.known, form.symbols
        elements = symbol.elements.broadcast_to(batch, tokens).flatten().tolist()
        require_unwritten(graph, "the position", Operand(symbol.node, (), symbol.reader), place)
    except (Refused, ValueError, RuntimeError):
        return None
    plain = tokens == 1 and symbol.coefficient == 1 and not bool(known.any()) and elements == list(range(batch))
    return symbol.node if plain and torch.Size(shape(symbol.node)).numel() == batch else None


def _uncast(node: Node, write: RowWrite) -> Node:
    """Below casts that widen or round to the cache's type: the operator computes in fp32 and rounds once."""
    while is_cast(node) and isinstance(node.args[0], Node) and _rounds_once([node], write):
        node = node.args[0]
    return node


def _rounds_once(path: Iterable[Node], write: RowWrite) -> bool:
    """Whether the casts among these nodes lose nothing that the cache would hold."""
    kept = dtype(write.cache)
    for node in path:
        source = node.args[0] if is_cast(node) else None
        if isinstance(source, Node):
            kinds = {dtype(source), dtype(node)}
            if not kinds <= set(FLOATS) or not (widens(node) or dtype(node) is kept):
                return False
    return True


def _is_norm(node: Node, width: int) -> bool:
    """Whether a layer norm over rows of that width, with a weight."""
    if node.target is not ATEN.layer_norm.default or list(argument(node, "normalized_shape")) != [width]:
        return False
    weight, bias = argument(node, "weight"), argument(node, "bias")
    return isinstance(weight, Node) and all(part is None or part.meta["val"].is_contiguous() for part in (weight, bias))


def _private(path: Iterable[Node], write: Node) -> bool:
    """Whether nothing but the write uses what these nodes compute."""
    inside = {*path, write}
    return all(user in inside for node in path for user in node.users)


def _latent_site(program: CapturedProgram, write: RowWrite, descriptor: LatentDescriptor) -> WriteSite | None:
    """The writes of both parts of a row, seen from the later one; None from the earlier."""
    if descriptor.buffers == 1 or not descriptor.rope_dim:
        return WriteSite((write,), (_prepared(write, with_norm=False),), str(descriptor), write.node)
    nodes = _both_parts(program, write, descriptor)
    if write.node is min(nodes):
        return None
    first, last = min(nodes), max(nodes)
    parts: list[RowWrite] = []
    for node in nodes:
        spec = _spec(program, node)
        assert spec is not None
        parts.append(row_write(node, spec))
    latent, rope = parts
    if latent.positions is not rope.positions or latent.sizes[:2] != rope.sizes[:2]:
        raise Refused("latent and rope part are written at different positions", write.node)
    earlier = latent.cache if latent.node is first else rope.cache
    between = _touched_between(earlier, first, last)
    if between is not None:
        raise Refused(f"{earlier.name} is used between the writes of latent and rope part", between)
    prepared = (_prepared_latent(latent), _prepared(rope, with_norm=False))
    return WriteSite((latent, rope), prepared, str(descriptor), write.node)


def _both_parts(program: CapturedProgram, write: RowWrite, descriptor: LatentDescriptor) -> tuple[Node, Node]:
    """The writes of latent and rope part: the n-th of each kind, whatever their caches are called."""
    described = [
        node
        for node in program.graph_module.graph.nodes
        if node.target in WRITES and (spec := _spec(program, node)) and spec.descriptor == write.spec.descriptor
    ]
    widths = [shape(node)[-1] for node in described]
    latents = [node for node, width in zip(described, widths, strict=True) if width == descriptor.width]
    ropes = [node for node, width in zip(described, widths, strict=True) if width == descriptor.rope_dim]
    if descriptor.width == descriptor.rope_dim:
        latents, ropes = described[0::2], described[1::2]
    for latent, rope in zip(latents, ropes, strict=False):
        if write.node in (latent, rope):
            return latent, rope
    raise Refused("the other part of the cache is not written", write.node)


def _touched_between(cache: Node, first: Node, last: Node) -> Node | None:
    """A node strictly between two that reads or writes the cache, through its write's result as well."""
    node = first.next
    while node is not last:
        if any(purity.storage_root(source) is cache for source in node.all_input_nodes) and not _only_views(node):
            return node
        node = node.next
    return None


def _only_views(node: Node) -> bool:
    return purity.is_pure(node) and purity.storage_root(node) is not node


def _require_operands(graph: Graph, site: WriteSite) -> None:
    """Refuse types that the operator does not take, and operands that change before its place or by its writes."""
    caches = {purity.storage_root(write.cache) for write in site.writes}
    for write, prepared in zip(site.writes, site.prepared, strict=True):
        require_type("the cache", write.cache, FLOATS)
        require_type("what is written", prepared.values, FLOATS)
        if shape(prepared.values)[-1] != write.sizes[2]:
            raise Refused(f"what is written is {list(shape(prepared.values))}, not [B, S, D]", write.node)
        for what, node in _operands(write, prepared):
            readers = [user for user in node.users if user in {*prepared.path, write.node} or is_cast(user)]
            require_unwritten(graph, what, Operand(node, (), min(readers, default=node)), site.place)
            if purity.storage_root(node) in caches:
                raise Refused(f"{what} {node.name} is read from the cache that is written", write.node)


def _operands(write: RowWrite, prepared: Prepared) -> Iterable[tuple[str, Node]]:
    """What the operator reads in place of the nodes that vanish, with what to call it."""
    yield "the position", write.positions
    yield "what is written", prepared.values
    if prepared.rotation is not None:
        yield "the cosine", prepared.rotation.cos.node
        yield "the sine", prepared.rotation.sin.node
    for name, found in prepared.norm_weights.items():
        if isinstance(found, Node):
            yield f"the norm's {name}", found


@dataclass(frozen=True)
class _Emitter:
    """Makes views before a place."""

    graph: Graph
    place: Node

    def __call__(self, target: Any, *args: Any) -> Node:
        return call(self.graph, target, args, like=self.place, before=self.place)

    def three_dims(self, cache: Node) -> Node:
        """A cache [B, 1, T, D] as [B, T, D]: a view whatever its strides are, since it is written through."""
        return self(ATEN.squeeze.dim, cache, 1) if len(shape(cache)) == 4 else cache

    def shaped(self, node: Node, sizes: Sequence[int], *, expand: bool = False) -> Node:
        """``node`` as a tensor of those sizes; it may be repeated."""
        if shape(node) == tuple(sizes):
            return node
        return self(ATEN.expand.default if expand else ATEN.reshape.default, node, list(sizes))

    def angles(self, found: Angles, rotation: Rotation, sizes: tuple[int, int, int]) -> Node:
        """Cosines or sines as [B, S, pairs]."""
        node = found.node
        if found.halved:
            node = self(ATEN.slice.Tensor, node, len(shape(node)) - 1, 0, shape(node)[-1] // 2)
        pairs = shape(node)[-1]
        small = self.shaped(node, (*_angle_rows(shape(node), shape(rotation.x), sizes), pairs))
        return self.shaped(small, (*sizes[:2], pairs), expand=True)


def _angle_rows(angles: tuple[int, ...], x: tuple[int, ...], sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Rows of the angles along B and S, 1 where they repeat; ``x`` has the rows B and S and dims of size 1."""
    aligned = (1,) * (len(x) - len(angles)) + angles
    rows = [size for size, whole in zip(aligned[:-1], x[:-1], strict=True) if whole != 1]
    if sizes[0] == 1:
        rows = [1, *rows]
    if sizes[1] == 1:
        rows = [*rows, 1]
    return rows[0], rows[1]
