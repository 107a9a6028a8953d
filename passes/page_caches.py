"""``page-caches``: the contiguous caches of a step become pages, found by one block table that the step is given.

What writes and reads a cache through an operator takes the table as it is; what reads it otherwise (attention that is
dearer absorbed, over many queries) reads rows that are gathered first. The memory then belongs to a pool of pages,
which sequences of any length share, instead of rows of full length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kimigraph.ir import purity
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.fake import fake_mode
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import BLOCK_TABLE, CapturedProgram, InputSpec
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.added_inputs import add_input
from kimigraph.passes.algebra.nodes import described
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.quantization.units import described_caches

ATEN = torch.ops.aten
TAKING_TABLES = {
    "latent_write": ("latent", "rope"),
    "index_key_write": ("keys",),
    "lightning_indexer": ("keys",),
    "sparse_attention": ("latent", "rope"),
    "latent_attention": ("latent", "rope"),
}
"""The operators that find pages by themselves, with their cache operands."""


@dataclass(frozen=True)
class PageCaches(Pass):
    """Pages every described cache where the compilation's ``cache_layout`` is ``paged``; else it does nothing.

    UsageError for a cache that something other than its operators writes, and for caches of different batches.
    """

    name: ClassVar[str] = "page-caches"
    summary: ClassVar[str] = "contiguous caches become pages under one block table, where the layout asks for it"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "caches of latents and index keys [B, T, .] with all that writes and reads them"
    constraints: ClassVar[tuple[str, ...]] = (
        "`cache_layout` is `paged`",
        "only `latent_write` and `index_key_write` write the caches",
        "all caches have one batch and one context, and the caller's last argument is a dict",
    )
    effect: ClassVar[str] = (
        "caches [pages + 1, page, .] and an input `block_table` [B, ceil(T / page)]; operators find pages by it, other "
        "readers get the gathered rows"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Page all caches or, where one cannot be, none."""
        if context.config.cache_layout != "paged":
            return PassResult(False)
        caches = {
            cache: (spec, form)
            for cache, spec, form in described_caches(program)
            if isinstance(form, LatentDescriptor | IndexKeyDescriptor) and form.layout == "contiguous"
        }
        if not caches:
            return PassResult(False)
        work = _Work(program, caches, context.config.page_tokens, context.config.pages)
        gathers = work.run()
        purity.dead_code(program.graph_module.graph)
        program.graph_module.graph.lint()
        program.graph_module.recompile()
        names = tuple(node.name for node in caches)
        rows = context.config.page_tokens
        told = f"{len(caches)} caches became pages of {rows} rows; gathered for readers: {gathers}"
        return PassResult(
            True,
            (Remark("passed", self.name, told, names[0], nodes=names),),
            {"paged": len(caches), "gathered": gathers},
        )


class _Work:
    """One run over one program."""

    def __init__(
        self,
        program: CapturedProgram,
        caches: dict[Node, tuple[InputSpec, LatentDescriptor | IndexKeyDescriptor]],
        page_size: int,
        pages: int | None,
    ) -> None:
        shapes = {spec.shape[:2] for spec, _ in caches.values()}
        if len(shapes) != 1 or any(len(spec.shape) != 3 for spec, _ in caches.values()):
            raise UsageError(
                "cache_layout paged: the caches of the step are not all [B, T, .] of one batch and context; compile "
                "the model as generation does (rows of their own length), or leave the layout as the model has it"
            )
        [(self._batch, self._context)] = shapes
        self._program, self._graph, self._caches = program, program.graph_module.graph, caches
        self._page = page_size
        self._columns = -(-self._context // page_size)
        self._pages = pages or self._batch * self._columns
        self._known: dict[Node, Node] = {}
        self._rows: dict[Node, Node] = {}
        """Gathered rows of caches that nothing has written since."""

    def run(self) -> int:
        """Rewrite everything; returns how often rows are gathered."""
        users = list(self._users())
        self._refuse_writers(users)
        self._table = self._add_table()
        self._places: Node | None = None
        for cache, (spec, form) in self._caches.items():
            self._become(cache, spec, form)
        before = len(self._graph.find_nodes(op="call_function", target=ATEN.index.Tensor))
        for user in users:
            operator = operator_of(user)
            if operator is None or operator.name not in TAKING_TABLES:
                self._give_rows(user)
                continue
            for written in purity.mutated_arguments(user):
                self._rows.pop(self._root(written), None)
            self._give_table(user)
        return len(self._graph.find_nodes(op="call_function", target=ATEN.index.Tensor)) - before

    def _users(self) -> Iterator[Node]:
        """Nodes that take a cache's memory, in order; what only views it is looked through."""
        for node in list(self._graph.nodes):
            taken = any(self._root(source) in self._caches for source in node.all_input_nodes)
            if taken and not (purity.is_pure(node) and self._root(node) in self._caches):
                yield node

    def _root(self, node: Node) -> Node:
        return purity.storage_root(node, self._known)

    def _refuse_writers(self, users: list[Node]) -> None:
        for user in users:
            operator = operator_of(user)
            taking = TAKING_TABLES.get(operator.name, ()) if operator is not None else ()
            for written in purity.mutated_arguments(user):
                if self._root(written) in self._caches and not taking:
                    raise UsageError(
                        f"cache_layout paged: {user.name} ({described(user)}) writes {self._root(written).name}, and "
                        "only latent_write and index_key_write find pages; leave the layout as the model has it"
                    )
            if user.op == "output":
                raise UsageError("cache_layout paged: the step returns a cache; leave the layout as the model has it")

    def _add_table(self) -> Node:
        """The input with the block table, behind all others."""
        shape = (self._batch, self._columns)
        spec = InputSpec(
            BLOCK_TABLE, "input", BLOCK_TABLE, shape, (shape[1], 1), "int32", value_range=(1, self._pages + 1)
        )
        return add_input(self._program, spec, "cache_layout paged")

    def _become(self, cache: Node, spec: InputSpec, form: LatentDescriptor | IndexKeyDescriptor) -> None:
        shape = (self._pages + 1, self._page, spec.shape[2])
        with fake_mode(self._graph):
            cache.meta["val"] = torch.empty(shape, dtype=cache.meta["val"].dtype, device=cache.meta["val"].device)
        paged = replace(form, layout="paged", page_size=self._page)
        new = replace(spec, shape=shape, stride=(shape[1] * shape[2], shape[2], 1), descriptor=str(paged))
        self._caches[cache] = (new, paged)
        self._program.inputs = tuple(new if one.name == spec.name else one for one in self._program.inputs)

    def _give_table(self, node: Node) -> None:
        """The same operator over the pages."""
        args = tuple(
            self._root(one) if isinstance(one, Node) and self._root(one) in self._caches else one for one in node.args
        )
        cache = next(one for one in args if one in self._caches)
        kwargs = {**node.kwargs, "block_table": self._table, "descriptor": str(self._caches[cache][1])}
        new = call(self._graph, node.target, args, kwargs, like=node, before=node, replaces=[node])
        new.meta.update({key: node.meta[key] for key in ("selects", "via") if key in node.meta})
        # Results are laid out as they were; what reads them may not have its own table yet.
        node.replace_all_uses_with(new, propagate_meta=False)
        self._graph.erase_node(node)

    def _give_rows(self, user: Node) -> None:
        """Let the reader read rows that are gathered before it."""
        made: dict[Node, Node] = {}
        for source in [one for one in user.all_input_nodes if self._root(one) in self._caches]:
            user.replace_input_with(source, self._rebuilt(source, user, made))

    def _rebuilt(self, value: Node, before: Node, made: dict[Node, Node]) -> Node:
        """``value``, a cache or a view of it, over gathered rows."""
        if value not in made:
            if value in self._caches:
                if value not in self._rows:
                    self._rows[value] = self._gathered(value, before)
                made[value] = self._rows[value]
            else:
                sources = {one: self._rebuilt(one, before, made) for one in value.all_input_nodes}
                args, kwargs = map_arg((value.args, value.kwargs), lambda one: sources.get(one, one))
                made[value] = call(self._graph, value.target, args, kwargs, like=value, before=before)
        return made[value]

    def _gathered(self, cache: Node, before: Node) -> Node:
        """The rows [B, T, .] of all sequences; unmapped pages read as the scratch page, whose rows nobody sees."""
        if self._places is None:
            self._places = call(self._graph, ATEN.clamp_min.default, (self._table, 0), like=before, after=self._table)
        spec = self._caches[cache][0]
        pages = call(self._graph, ATEN.index.Tensor, (cache, [self._places]), like=before, before=before)
        shape = [self._batch, self._columns * self._page, spec.shape[2]]
        rows = call(self._graph, ATEN.view.default, (pages, shape), like=before, before=before)
        if shape[1] == self._context:
            return rows
        return call(self._graph, ATEN.slice.Tensor, (rows, 1, 0, self._context), like=before, before=before)
