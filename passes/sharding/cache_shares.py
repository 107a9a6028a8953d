"""Caches of which ranks share out the tokens: what touches them, and what they become on a rank."""

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import fake_mode, infer
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.shares import Share
from kimigraph.passes.algebra.nodes import argument, described, packet, shape
from kimigraph.passes.sharding.sequence import holds_tokens, shared_tokens
from kimigraph.passes.sharding.stretches import Stretches

ATEN = torch.ops.aten
CACHE_OPERANDS = {
    "latent_write": "latent",
    "index_key_write": "keys",
    "lightning_indexer": "keys",
    "sparse_attention": "latent",
}
"""The operators that work on part of a sequence, and the operand that says whose cache it is."""
CACHES = "cache."
"""What the names of caches begin with; states and their logs are alike on all ranks."""
_TARGETS = {OPERATORS[name].overload: operand for name, operand in CACHE_OPERANDS.items()}


@dataclass
class CacheShares:
    """The latent and index caches of a program, which ``ways`` ranks are to share out; ``step`` as in ``InputSpec``."""

    program: CapturedProgram
    ways: int
    step: int
    shares: dict[Node, Share] = field(default_factory=lambda: {})
    whole: dict[Node, tuple[int, ...]] = field(default_factory=lambda: {})
    descriptors: dict[Node, str] = field(default_factory=lambda: {})
    _known: dict[Node, Node] = field(default_factory=lambda: {})

    def take(self) -> list[tuple[Node, Node]]:
        """Give caches and views of them a rank's shapes; the operators on them with their caches, in graph order.

        CompileError, with nothing changed, where anything else touches a cache.
        """
        specs = {spec.name: spec for spec in self.program.inputs}
        nodes = self.program.placeholders
        caches = [nodes[spec.name] for spec in specs.values() if self._holds_tokens(spec, nodes[spec.name])]
        users = self._users(set(caches))
        views = [node for node in self.program.graph_module.graph.nodes if self._is_view(node, caches)]
        for view in views:
            self._require_view(view, specs)
        for cache in caches:
            specs[cache.name] = self._become(cache, specs[cache.name])
        self.program.inputs = tuple(specs[spec.name] for spec in self.program.inputs)
        for view in views:
            self._fit(view)
        return users

    def run(self, cache: Node) -> int:
        """Tokens of a run: consecutive ones that a rank has."""
        return self.whole[cache][-2] // (self.shares[cache].blocks * self.ways)

    def describe(self, node: Node, cache: Node) -> None:
        """Let the operator know the cache as it is now."""
        node.update_kwarg("descriptor", self.descriptors[cache])

    def rows_of_all(self, operand: Node, table: Node | None, before: Node) -> Node:
        """The rows of all ranks [B, T, .] of a cache, or of a view of one, in the order of the sequence.

        CompileError for bytes, whose scales lie behind the rows of a page.
        """
        cache, ranks = self._root(operand), Stretches(before, self.ways)
        if operand.meta["val"].dtype == torch.uint8:
            raise CompileError(
                f"sp {self.ways}: {cache.name} is quantised, and rows of bytes are not put together from several "
                "ranks: compile with --disable-pass share-tokens"
            )
        if table is not None:
            operand = ranks.make(ATEN.index.Tensor, operand, [ranks.make(ATEN.clamp_min.default, table, 0)])
            batch, rounds, run, width = shape(operand)
        else:
            (batch, tokens, width), rounds = shape(operand), self.shares[cache].blocks
            run = tokens // rounds
        parts = ranks.make(ATEN.view.default, ranks.all(operand), [self.ways, batch, rounds, run, width])
        turns = ranks.make(ATEN.permute.default, parts, [1, 2, 0, 3, 4])
        return ranks.make(ATEN.reshape.default, turns, [batch, rounds * self.ways * run, width])

    def contiguous(self, cache: Node) -> str:
        """The descriptor of such rows."""
        form = parse_descriptor(self.descriptors[cache])
        assert isinstance(form, LatentDescriptor | IndexKeyDescriptor)
        return str(replace(form, layout="contiguous", page_size=0))

    def _holds_tokens(self, spec: InputSpec, node: Node) -> bool:
        if spec.kind != "cache" or node.meta["val"].dim() < 2:
            return False
        if not spec.descriptor and not spec.source.startswith(CACHES):
            return False  # logs of recurrent states
        if not spec.descriptor:
            raise CompileError(
                f"sp {self.ways}: {spec.source} has no descriptor, so it is not known which tokens of a sequence it "
                "holds, and ranks cannot share it out: leave out --sp"
            )
        return holds_tokens(spec.descriptor)

    def _root(self, node: Node) -> Node:
        return purity.storage_root(node, self._known)

    def _is_view(self, node: Node, caches: list[Node]) -> bool:
        """Pure nodes over a cache's memory, and nothing else: operators on it give no views."""
        return node not in caches and purity.is_pure(node) and self._root(node) in caches

    def _users(self, caches: set[Node]) -> list[tuple[Node, Node]]:
        found: list[tuple[Node, Node]] = []
        for node in self.program.graph_module.graph.nodes:
            touched = [source for source in node.all_input_nodes if self._root(source) in caches]
            if not touched or (purity.is_pure(node) and self._root(node) in caches):
                continue
            if node.target not in _TARGETS:
                raise CompileError(
                    f"sp {self.ways}: {node.name} ({described(node)}) touches {self._root(touched[0]).name}, and is "
                    f"not known to work on a part of a sequence ({', '.join(CACHE_OPERANDS)} are): leave out --sp, or "
                    "let the passes that find these operators run"
                )
            found.append((node, self._root(argument(node, _TARGETS[node.target]))))
        return found

    def _become(self, cache: Node, spec: InputSpec) -> InputSpec:
        form = parse_descriptor(spec.descriptor)
        paged = isinstance(form, LatentDescriptor | IndexKeyDescriptor) and form.layout == "paged"
        share = shared_tokens(spec.shape, self.ways, paged, spec.source)
        self.whole[cache], self.shares[cache] = spec.shape, share
        value, local = cache.meta["val"], share.local(spec.shape)
        with fake_mode(self.program.graph_module.graph):
            cache.meta["val"] = torch.empty(local, dtype=value.dtype, device=value.device)
        if paged:
            form = replace(form, page_size=local[-2])
        self.descriptors[cache] = str(form)
        self.program.tensors.pop(spec.name, None)
        stride = tuple(cache.meta["val"].stride())
        return replace(spec, shape=local, stride=stride, descriptor=str(form), share=tuple(share), share_step=self.step)

    def _require_view(self, view: Node, specs: dict[str, InputSpec]) -> None:
        """A view must leave tokens and row as they are: the last two dims."""
        cache = self._root(view)
        if packet(view) not in ("view", "reshape", "squeeze", "unsqueeze", "alias", "detach") or (
            shape(view)[-2:] != tuple(specs[cache.name].shape)[-2:]
        ):
            raise CompileError(
                f"sp {self.ways}: {view.name} ({described(view)}) views {cache.name} {list(specs[cache.name].shape)} "
                f"as {list(shape(view))}, and which tokens a rank has of that is not known: leave out --sp"
            )

    def _fit(self, view: Node) -> None:
        cache = self._root(view)
        local = self.shares[cache].local(self.whole[cache])
        if packet(view) in ("view", "reshape"):
            view.update_arg(1, [*shape(view)[:-2], *local[-2:]])
        infer(view)
