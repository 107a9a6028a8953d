"""``insert-quantization``: caches and queries get the formats of a policy, writers and readers together.

A unit is a cache with all that writes and reads it: index keys with the queries that meet them, latents with their rope
part; or the weights of routed experts. It is quantised as a whole or left as it is. Nothing that a policy does not name
loses a bit.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.cache_formats import quantised_keys, quantised_latent, quantised_spec
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.fake import fake_mode
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.policy import Format, Policy, policy_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.frames import require_type
from kimigraph.passes.algebra.nodes import FLOATS, argument, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.quantization.calls import set_arguments, without_argument
from kimigraph.passes.quantization.experts import check_experts, experts_of, pack_experts
from kimigraph.passes.quantization.norms import private_norm
from kimigraph.passes.quantization.rotation import fold_rotation
from kimigraph.passes.quantization.units import CacheUnit, described_caches, index_unit, latent_unit, rope_parts

ATEN = torch.ops.aten
KEPT = ("prolog_weights", "experts")


@dataclass(frozen=True)
class InsertQuantization(Pass):
    """Quantises what ``policy`` says (empty: that of the compilation).

    Refused: a cache that anything but its operators touches, formats that do not fit its rows, a rope part that the
    call cannot lose.
    """

    policy: str = ""

    name: ClassVar[str] = "insert-quantization"
    summary: ClassVar[str] = "caches, index queries and experts get the formats of the policy, writers with readers"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "caches of index keys and latents with all operators that write and read them; weights of `moe_experts`"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "the policy (`--policy`) gives the role a format",
        "caches, contiguous or paged, that nothing but `index_key_write`, `lightning_indexer`, `latent_write`, "
        "`sparse_attention` and `latent_attention` touches",
        "one scale a key: keys of one group; latents: a multiple of the tile, or less than one",
        "latents and rope part become one cache: the rope part is an entry of a dict in the call",
        "experts: weights of the model that `moe_experts` alone reads, rows of a multiple of 32, bfloat16 or float32",
    )
    effect: ClassVar[str] = (
        "caches of bytes with the policy's descriptors, whose writers take the latents' RMS norm along; queries are "
        "quantised before the indexer, or inside it (MXFP8 that it alone reads); experts' weights are packed as MXFP4 "
        "when the program is bound"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Quantise every unit that the policy names."""
        policy = policy_of(self.policy or context.config.policy)
        if not policy.quantises:
            return PassResult(False)
        work = _Work(program, policy)
        remarks: list[Remark] = self._experts(work, context) if policy.experts.quantises else []
        beside = rope_parts(program)
        for cache, spec, form in list(described_caches(program)):
            role = "index_key" if isinstance(form, IndexKeyDescriptor) else "latent"
            if spec.name in beside or not policy.format_of(role).quantises:
                continue
            try:
                unit = work.checked(cache, spec, form)
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, cache))
                continue
            if context.allow(f"{cache.name} ({spec.source})"):
                remarks += work.quantise(unit)
        done = len(remarks) - sum(remark.kind == "missed" for remark in remarks)
        remarks += _left_alone(program, policy) if remarks else []
        if done:
            purity.dead_code(program.graph_module.graph)
            work.finish()
        return PassResult(done > 0, tuple(remarks), {"quantised": done})

    def _experts(self, work: "_Work", context: PassContext) -> list[Remark]:
        """Pack the weights of all experts that can be."""
        remarks: list[Remark] = []
        for node in work.experts():
            try:
                work.check_experts(node)
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, node))
                continue
            if context.allow(node.name):
                remarks.append(work.pack(node))
        return remarks


def _left_alone(program: CapturedProgram, policy: Policy) -> Iterator[Remark]:
    """Notes on what the policy could have named and did not, and on indexers whose keys no cache holds as they are."""
    name = InsertQuantization.name
    kept = ", ".join(role for role in KEPT if not policy.format_of(role).quantises).replace("_", " ")
    yield Remark("note", name, f"{kept}: they keep the format in which they are loaded")
    for role in ("index_key", "latent"):
        if not policy.format_of(role).quantises:
            yield Remark("note", name, f"{role.replace('_', ' ')}: policy '{policy.name}' keeps it, bit for bit")
    caches = {spec.name for spec in program.inputs if spec.descriptor}
    for node in program.graph_module.graph.nodes:
        if policy.index_key.quantises and node.target is OPERATORS["lightning_indexer"].overload:
            if purity.storage_root(argument(node, "keys")).name not in caches:
                refusal = Refused("its keys are computed from the cache, not read as they are stored", node, 1)
                yield refusal.remark(name, node)


class _Work:
    """One run over one program: what was quantised, and what it was made into."""

    def __init__(self, program: CapturedProgram, policy: Policy) -> None:
        self._program, self._policy = program, policy
        self._graph = program.graph_module.graph
        self._specs = {spec.name: spec for spec in program.inputs}
        self._queries: dict[Node, tuple[Node, Node]] = {}
        self._turned: set[Node] = set()
        self._records: list[dict[str, Any]] = []

    def checked(self, cache: Node, spec: InputSpec, form: Any) -> CacheUnit:
        """The unit of a cache, when the policy's format fits it."""
        if isinstance(form, IndexKeyDescriptor):
            unit = index_unit(self._program, cache, spec, form)
            self._check_keys(unit, form)
        else:
            unit = latent_unit(self._program, cache, spec, form)
            tile = self._policy.latent.group
            if form.width > tile and form.width % tile:
                raise Refused(f"rows of {form.width} are no multiple of the tile of {tile}", cache)
            if unit.rope_spec is not None:
                without_argument(self._program, unit.rope_spec, cache)
        return unit

    def _check_keys(self, unit: CacheUnit, form: IndexKeyDescriptor) -> None:
        wanted = self._policy.index_key
        if wanted.kind == "fp8" and form.width > wanted.group:
            raise Refused(f"keys of {form.width} are more than one group of {wanted.group}", unit.cache)
        if self._policy.rotation != "none" and form.width & (form.width - 1):
            raise Refused(f"keys of {form.width} have no Hadamard rotation", unit.cache)
        for reader in unit.readers:
            require_type("the query", argument(reader, "q"), FLOATS)

    def experts(self) -> list[Node]:
        """All experts whose weights are not packed yet."""
        return experts_of(self._graph)

    def check_experts(self, node: Node) -> None:
        """Refused where their weights cannot be packed."""
        check_experts(node, self._specs)

    def pack(self, node: Node) -> Remark:
        """Have experts read MXFP4."""
        new, before, after = pack_experts(self._graph, node)
        self._take_place(node, new)
        module = module_path(new)
        self._record(new, "experts", self._policy.experts, module, bytes=after, bytes_before=before)
        return Remark(
            "passed",
            InsertQuantization.name,
            f"the experts' weights became MXFP4: {after:,} bytes instead of {before:,}",
            new.name,
            source_line(new),
            (new.name,),
            score=1,
            module=module,
        )

    def quantise(self, unit: CacheUnit) -> Iterator[Remark]:
        """Rewrite a unit: its input, its writers, its readers."""
        if isinstance(unit.form, IndexKeyDescriptor):
            descriptor: Any = quantised_keys(unit.form, self._policy.index_key, self._policy.rotation)
        else:
            descriptor = quantised_latent(unit.form, self._policy.latent)
        others = () if unit.rope_spec is None else (unit.rope_spec,)
        spec = quantised_spec(unit.spec, descriptor, *others)
        if unit.rope_spec is not None:
            set_arguments(self._program, *without_argument(self._program, unit.rope_spec, unit.cache))
        before = _bytes(unit.spec) + sum(map(_bytes, others))
        self._become(unit.cache, spec)
        if unit.rope_spec is not None:
            del self._specs[unit.rope_spec.name]
            self._program.inputs = tuple(one for one in self._program.inputs if one.name != unit.rope_spec.name)
        for node in unit.writers:
            norm = private_norm(node) if isinstance(unit.form, LatentDescriptor) else None
            changed: dict[str, Any] = {"descriptor": str(descriptor)}
            if norm is None:
                self._rewrite_call(node, changed, unit.cache)
            else:
                changed |= {"norm_weight": norm.weight, "norm_eps": norm.eps}
                self._rewrite_call(node, changed, unit.cache, values=norm.values)
        for node in unit.readers:
            if isinstance(unit.form, IndexKeyDescriptor):
                self._rewrite_indexer(node, str(descriptor), unit.cache)
            else:
                self._rewrite_call(node, {"descriptor": str(descriptor)}, unit.cache)
        yield self._remark(unit, descriptor, before, _bytes(spec))

    def finish(self) -> None:
        """Drop inputs that became part of others, bring graph and records up to date."""
        for node in [node for node in self._graph.nodes if node.op == "placeholder" and node.name not in self._specs]:
            self._graph.erase_node(node)
        known = {**self._program.info, "policy": self._policy.name}
        known["quantization"] = [*self._program.info.get("quantization", ()), *self._records]
        self._program.info = known
        self._graph.lint()
        self._program.graph_module.recompile()

    def _become(self, cache: Node, spec: InputSpec) -> None:
        with fake_mode(self._graph):
            cache.meta["val"] = torch.empty(spec.shape, dtype=torch.uint8)
        self._specs[spec.name] = spec
        self._program.inputs = tuple(spec if one.name == spec.name else one for one in self._program.inputs)

    def _rewrite_call(self, node: Node, changed: dict[str, Any], cache: Node, **operands: Node) -> Node:
        """The same operator on the whole cache, without a rope part beside it, and with other ``operands``."""
        assert isinstance(node.target, OpOverload)
        names = [one.name for one in node.target._schema.arguments]
        given = [cache if _is_cache(one, cache) else one for one in node.args]
        args = [operands.get(name, None if name == "rope" else one) for name, one in zip(names, given, strict=False)]
        new = call(
            self._graph, node.target, tuple(args), {**node.kwargs, **changed}, like=node, before=node, replaces=[node]
        )
        self._take_place(node, new)
        return new

    def _rewrite_indexer(self, node: Node, descriptor: str, cache: Node) -> None:
        q, weights, form = argument(node, "q"), argument(node, "weights"), self._policy.index_query
        changed: dict[str, Any] = {"descriptor": descriptor}
        self._fold_rotation(q)
        q = argument(node, "q")
        inside = self._inside(q, form)
        values, scales = (q, None) if inside else self._quantised(q, form, node)
        if inside:
            changed["quantises_q"] = True
        elif form.kind == "mxfp8":
            changed["q_scales"] = scales
        else:
            # One positive scale a query and head may leave the ReLU; that of a key does so inside the operator.
            flat = call(self._graph, ATEN.view.default, (scales, list(shape(weights))), like=node, before=node)
            weights = call(self._graph, ATEN.mul.Tensor, (weights, flat), like=node, before=node)
        args = (values, cache, weights, *node.args[3:])
        new = call(self._graph, node.target, args, {**node.kwargs, **changed}, like=node, before=node, replaces=[node])
        self._take_place(node, new)
        if inside:
            self._record(new, "index_query", form, module_path(new))

    def _inside(self, q: Node, form: Format) -> bool:
        """Whether the indexer quantises the query itself, without a launch for it: MXFP8 that it alone reads."""
        readers = [user for user in q.users if user.target is OPERATORS["lightning_indexer"].overload]
        power = form.group & (form.group - 1) == 0
        return form.kind == "mxfp8" and power and not self._rotates(q) and len(readers) == 1

    def _rotates(self, q: Node) -> bool:
        """Whether the quantiser has to turn the query."""
        return self._policy.rotation != "none" and q not in self._turned

    def _fold_rotation(self, q: Node) -> None:
        """Have the query come rotated out of its product, where the policy wants it so and the product can."""
        if self._rotates(q) and q not in self._queries and fold_rotation(self._graph, q, self._specs):
            self._turned.add(q)

    def _quantised(self, q: Node, form: Format, like: Node) -> tuple[Node, Node]:
        """Codes and scales of a query; one that two indexers read is quantised once."""
        if q not in self._queries:
            rotate = {"rotate": True} if self._rotates(q) else {}
            mx = form.kind == "mxfp8"
            name = "mxfp8_quantize" if mx else "fp8_quantize"
            options = {"group": form.group} if mx else {"tile": shape(q)[-1], "scales": form.scales}
            pair = call(self._graph, OPERATORS[name].overload, (q,), {**options, **rotate}, like=like, after=q)
            second = call(self._graph, operator.getitem, (pair, 1), like=like, after=pair)
            first = call(self._graph, operator.getitem, (pair, 0), like=like, after=pair)
            self._queries[q] = (first, second)
            self._record(pair, "index_query", form, module_path(like))
        return self._queries[q]

    def _take_place(self, old: Node, new: Node) -> None:
        new.meta.update({key: old.meta[key] for key in ("selects", "via") if key in old.meta})
        replace(old, new)
        self._graph.erase_node(old)

    def _record(self, node: Node, role: str, form: Format, module: str, **more: Any) -> None:
        reason = f"policy '{self._policy.name}' for {role.replace('_', ' ')}"
        facts = {"node": node.name, "role": role, "format": form.kind, "group": form.group, "reason": reason}
        self._records.append({**facts, "module": module, **more})

    def _remark(self, unit: CacheUnit, descriptor: Any, before: int, after: int) -> Remark:
        latent = isinstance(unit.form, LatentDescriptor)
        form = self._policy.latent if latent else self._policy.index_key
        module, formats = module_path(unit.readers[0]), {"before": str(unit.form), "after": str(descriptor)}
        role = "latent" if latent else "index_key"
        self._record(unit.cache, role, form, module, cache=unit.spec.source, **formats)
        if unit.rope_spec is not None:
            self._record(unit.cache, "rope", Format("bfloat16"), module, cache=unit.rope_spec.source, **formats)
        saved = f"{after:,} bytes instead of {before:,}"
        return Remark(
            "passed",
            InsertQuantization.name,
            f"{unit.name} became {descriptor}: {saved}",
            unit.cache.name,
            source_line(unit.writers[0]),
            (unit.cache.name, *(node.name for node in (*unit.writers, *unit.readers))),
            score=1,
            module=module,
        )


def _is_cache(value: Any, cache: Node) -> bool:
    return isinstance(value, Node) and purity.storage_root(value) is cache


def _bytes(spec: InputSpec) -> int:
    return torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
