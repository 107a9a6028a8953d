"""What a policy costs layer by layer: each operator once more on the same inputs, in the policy's formats."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Interpreter, Node

from kimigraph.ir import purity
from kimigraph.ir.cache_formats import pack, rounded
from kimigraph.ir.operators import operator_of
from kimigraph.ir.operators.shapes import capacity
from kimigraph.ir.policy import Policy
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import module_path
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_dequantize
from kimigraph.ir.schemas import bind

ATTENTIONS = ("sparse_attention", "latent_attention")


@dataclass
class Noise:
    """Squares of a signal and of what is lost of it, added up over steps."""

    signal: float = 0.0
    error: float = 0.0

    def add(self, want: torch.Tensor, got: torch.Tensor) -> None:
        """Count ``got`` in the place of ``want``."""
        want, got = want.double(), got.double()
        self.signal += want.square().sum().item()
        self.error += (want - got).square().sum().item()

    @property
    def relative(self) -> float | None:
        """Root of lost over signal power; None without a signal."""
        return math.sqrt(self.error / self.signal) if self.signal else None

    @property
    def decibels(self) -> float | None:
        """The signal to quantisation noise ratio; None where nothing is lost."""
        return 10 * math.log10(self.signal / self.error) if self.signal and self.error else None


@dataclass
class LayerCost:
    """The figures of one layer. ``kept`` and ``picks`` count picks of rows that see more keys than they pick.

    ``output`` is what the attention's result loses, ``experts`` what that of its routed experts does.
    """

    module: str
    noise: dict[str, Noise] = field(default_factory=lambda: {})
    output: Noise = field(default_factory=Noise)
    experts: Noise = field(default_factory=Noise)
    kept: int = 0
    picks: int = 0

    @property
    def recall(self) -> float | None:
        """Recall@k of the quantised indexer; None where no row had a choice."""
        return self.kept / self.picks if self.picks else None


class LayerProbe(Interpreter):
    """Runs the plain program, and at its indexers and attentions the quantised operators on the same values.

    ``quantised`` are the inputs that a policy made of the program's, ``experts_in`` the modules whose experts it
    packed; ``costs`` by the module's path.
    """

    def __init__(
        self, program: CapturedProgram, quantised: Sequence[InputSpec], policy: Policy, experts_in: AbstractSet[str]
    ) -> None:
        super().__init__(program.graph_module)
        specs = {source: spec for spec in quantised for source, _ in spec.parts}
        self._formats = {spec.name: specs[spec.source] for spec in program.inputs if spec.source in specs}
        self._policy, self._experts_in = policy, experts_in
        self._picks: dict[Node, torch.Tensor] = {}
        self._packed: dict[Node, dict[str, torch.Tensor]] = {}
        self.costs: dict[str, LayerCost] = {}

    def run_node(self, n: Node) -> Any:
        """One node, as it is; what the policy makes of it is added to its layer's figures."""
        result = super().run_node(n)
        operator = operator_of(n)
        name = operator.name if operator is not None else ""
        if name == "lightning_indexer":
            self._indexer(n, result)
        elif name in ATTENTIONS:
            self._attention(n, result, name)
        elif name == "moe_experts" and module_path(n) in self._experts_in:
            self._experts(n, result)
        return result

    def _bound(self, node: Node) -> dict[str, Any]:
        return {name: self.env[value] if isinstance(value, Node) else value for name, value in bind(node).items()}

    def _format(self, operand: Any) -> InputSpec | None:
        return self._formats.get(purity.storage_root(operand).name) if isinstance(operand, Node) else None

    def _cost(self, node: Node) -> LayerCost:
        path = module_path(node).removesuffix(".indexer") or node.name
        return self.costs.setdefault(path, LayerCost(path))

    def _indexer(self, node: Node, picks: torch.Tensor) -> None:
        spec = self._format(bind(node)["keys"])
        if spec is None:
            return
        cost, given, [(source, _)] = self._cost(node), self._bound(node), spec.parts
        keys, q = given["keys"], given["q"]
        cost.noise.setdefault("index_key", Noise()).add(keys, rounded(spec, {source: keys})[source])
        changed, query = self._query(q, given["weights"])
        cost.noise.setdefault("index_query", Noise()).add(*query)
        cache = {"keys": pack(spec, {source: keys}), "descriptor": spec.descriptor}
        self._picks[node] = torch.ops.kimigraph.lightning_indexer(**{**given, **changed, **cache})
        visible = _visible(given, picks)
        choice = visible > given["k"]
        cost.picks += int(choice.sum()) * given["k"]
        cost.kept += int(_common(picks, self._picks[node])[choice].sum())

    def _query(
        self, q: torch.Tensor, weights: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Operands that carry the quantised query, and the query (rotated, if asked) beside what is left of it."""
        form, ops = self._policy.index_query, torch.ops.kimigraph
        rotate = self._policy.rotation != "none"
        turned = q.float()
        if rotate:
            from kimigraph.ir.reference.hadamard import hadamard_rotated

            turned = hadamard_rotated(q)
        if form.kind == "mxfp8":
            from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize

            codes, scales = ops.mxfp8_quantize(q, group=form.group, rotate=rotate)
            return {"q": codes, "q_scales": scales}, (turned, mxfp8_dequantize(codes, scales, group=form.group))
        values, scales = ops.fp8_quantize(q, tile=q.shape[-1], scales=form.scales, rotate=rotate)
        return {"q": values, "weights": weights * scales.squeeze(-1)}, (turned, values.float() * scales)

    def _attention(self, node: Node, result: tuple[torch.Tensor, ...], name: str) -> None:
        operands = bind(node)
        spec = self._format(operands["latent"])
        picked = operands.get("indices")
        if spec is None and picked not in self._picks:
            return
        cost, given = self._cost(node), self._bound(node)
        if spec is not None:
            values = {source: given[part] for (source, _), part in zip(spec.parts, ("latent", "rope"), strict=False)}
            for role, (source, kept) in zip(("latent", "rope"), rounded(spec, values).items(), strict=False):
                cost.noise.setdefault(role, Noise()).add(values[source], kept)
            given |= {"latent": pack(spec, values), "rope": None, "descriptor": spec.descriptor}
        if isinstance(picked, Node) and picked in self._picks:
            given["indices"] = self._picks[picked]
        cost.output.add(result[0], getattr(torch.ops.kimigraph, name)(**given)[0])

    def _experts(self, node: Node, result: tuple[torch.Tensor, ...]) -> None:
        path = module_path(node)
        cost, given = self.costs.setdefault(path, LayerCost(path)), self._bound(node)
        if node not in self._packed:
            weights = {name: given[name] for name in ("gate_up", "down")}
            self._packed[node] = {name: torch.ops.kimigraph.mxfp4_quantize(one) for name, one in weights.items()}
            for name, one in weights.items():
                cost.noise.setdefault("experts", Noise()).add(one, mxfp4_dequantize(self._packed[node][name]))
        cost.experts.add(result[0], torch.ops.kimigraph.moe_experts(**{**given, **self._packed[node]})[0])


def _visible(given: Mapping[str, Any], picks: torch.Tensor) -> torch.Tensor:
    """How many keys each query row sees, [B, S]."""
    batch, tokens, total = *picks.shape[:2], capacity(given["keys"], given["block_table"])
    if given["mask"] is not None:
        return given["mask"].expand(batch, tokens, total).sum(-1)
    if given["lengths"] is None:
        return torch.full((batch, tokens), total)
    rows = torch.arange(tokens).view(1, tokens)
    return (given["lengths"].reshape(-1, 1) + rows).clamp_max(total).expand(batch, tokens)


def _common(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How many picks of each row both lists have."""
    return ((first.unsqueeze(-1) == second.unsqueeze(-2)) & (first >= 0).unsqueeze(-1)).any(-1).sum(-1)
