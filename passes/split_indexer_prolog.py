"""``split-indexer-prolog``: the input preparation of an indexer becomes branches that do not wait for one another.

Three of them: the query (products behind the query latent, rotation, quantization), the index key (product, norm,
rotation, quantization, cache write) and the head weights with whatever else needs only the layer's input. What they
shared is computed in each, no later pass joins two of them, and ``assign-streams`` runs them side by side.

Merging competes with that: products of one input become one product. Both are priced with the passes that follow, and
what is slower is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from kimigraph.ir.errors import UsageError
from kimigraph.ir.launches import launches_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.pipeline import default_pipeline
from kimigraph.passes.prolog.branches import Prolog, PrologFinder, unshare
from kimigraph.passes.prolog.pricing import Prices, Pricing

FORMS = ("auto", "split", "merge")
MERGING = frozenset(("merge-horizontal", "merge-regions"))
_JOINING = ("merge-horizontal", "fuse-pointwise", "merge-regions")


@dataclass(frozen=True)
class SplitIndexerProlog(Pass):
    """Makes branches of what an indexer takes, where that is faster than merging it.

    Options: ``form``, ``split`` or ``merge`` whatever the prices; ``streams``, the streams that branches are priced for
    (0: that of ``--streams``); ``least-gain-us``, what branches must save against the merged prolog, as the model knows
    nothing of what kernels lose beside one another.
    """

    name: ClassVar[str] = "split-indexer-prolog"
    summary: ClassVar[str] = "the input preparation of an indexer becomes branches, or is left to be merged"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "query, index key and head weights of an indexer, computed from one input of the layer"
    constraints: ClassVar[tuple[str, ...]] = (
        "each has a kernel of its own behind the input",
        "no branch waits for another, by data or by the order of reads and writes; what several share is cheap enough "
        "to be computed in each",
        "three branches on the streams of the program are half a microsecond faster than the merged prolog, by the "
        "cost model and the passes that follow",
    )
    effect: ClassVar[str] = "nodes marked with their branch, which no later pass joins with another"

    form: str = "auto"
    streams: int = 0
    least_gain_us: float = 0.5

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"split-indexer-prolog{{form={self.form}}}: choose one of {', '.join(FORMS)}")

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Find, price and mark; a remark for every indexer says what won and why."""
        finder = PrologFinder(program.graph_module.graph)
        remarks: list[Remark] = []
        found: list[Prolog] = []
        for indexer in finder.indexers():
            try:
                found.append(finder.find(indexer))
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, indexer))
        pricing = self._pricing(program, context)
        split = 0
        for prolog in found:
            try:
                prices = pricing.prices(prolog, prolog.branches)
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, prolog.indexer))
                continue
            told = prices.describe(pricing.streams, context.device.name)
            wanted = self.form == "split" or (self.form == "auto" and prices.gain * 1e6 >= self.least_gain_us)
            if wanted and context.allow(f"{prolog.indexer.name} ({source_line(prolog.indexer) or 'no source line'})"):
                _mark(prolog)
                split += 1
                remarks.append(self._split(prolog, told))
            else:
                reason = self._reason(prices, pricing.streams)
                remarks.append(self._merged(prolog, f"{reason} ({prolog.describe()}): {told}"))
        if split:
            program.graph_module.graph.lint()
            program.graph_module.recompile()
        return PassResult(split > 0, tuple(remarks), {"prologs": len(found), "split": split})

    def _pricing(self, program: CapturedProgram, context: PassContext) -> Pricing:
        pipeline = default_pipeline(context.config)
        following = [item for item in pipeline if item.name in _JOINING]
        forks = any(isinstance(item, AssignStreams) and item.forks(program, context) for item in pipeline)
        streams = (self.streams or context.config.streams) if forks else 1
        return Pricing(program, context, following, MERGING, streams, {})

    def _reason(self, prices: Prices, streams: int) -> str:
        """Why there are no branches."""
        if self.form == "merge":
            return "merging, as asked for"
        if streams == 1:
            return "no branches, as there is one stream to run on"
        if prices.gain > 0:
            return f"merging: three branches gain less than {self.least_gain_us} us over it"
        return "merging wins over three branches"

    def _split(self, prolog: Prolog, told: str) -> Remark:
        reason = "as asked for" if self.form == "split" else "three branches win"
        branches = {name: list(nodes) for name, nodes in prolog.branches.items()}
        nodes = tuple(dict.fromkeys(node.name for node in _kernels(branches)))
        message = f"{reason} ({prolog.describe()}): {told}"
        node = prolog.indexer
        return Remark(
            "passed", self.name, message, node.name, source_line(node), nodes, score=1, module=module_path(node)
        )

    def _merged(self, prolog: Prolog, told: str) -> Remark:
        node = prolog.indexer
        return Remark(
            "missed",
            self.name,
            f"{node.name}: {told}",
            node.name,
            source_line(node),
            (node.name,),
            score=1,
            remedy=f"{self.name}{{form=split}} makes branches all the same; --device-file prices for another device",
            module=module_path(node),
        )


def _mark(prolog: Prolog) -> None:
    """Mark each branch, and the input that they begin at: joined with one, it would make the others wait for that."""
    for name, nodes in {**unshare(prolog), "input": [prolog.source]}.items():
        for node in nodes:
            if node.op != "placeholder":
                node.meta["branch"] = f"{name} of {prolog.indexer.name}"


def _kernels(branches: Mapping[str, Sequence[Node]]) -> Iterator[Node]:
    for nodes in branches.values():
        yield from (node for node in nodes if launches_of(node))
