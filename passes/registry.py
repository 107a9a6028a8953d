"""Which passes exist, by name. A built-in pass is imported when it is first asked for, so that start-up stays fast."""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kimigraph.ir.errors import UsageError
from kimigraph.passes.base import Pass

ENTRY_POINT_GROUP = "kimigraph.passes"

BUILT_IN = {
    "canonicalize": "kimigraph.passes.canonicalize:Canonicalize",
    "split-stages": "kimigraph.passes.split_stages:SplitStages",
    "raise-kda": "kimigraph.passes.raise_kda:RaiseKda",
    "log-states": "kimigraph.passes.log_states:LogStates",
    "defer-states": "kimigraph.passes.defer_states:DeferStates",
    "raise-attention-residual": "kimigraph.passes.raise_attention_residual:RaiseAttentionResidual",
    "raise-cache-writes": "kimigraph.passes.raise_cache_writes:RaiseCacheWrites",
    "raise-norms": "kimigraph.passes.raise_norms:RaiseNorms",
    "raise-moe": "kimigraph.passes.raise_moe:RaiseMoe",
    "fuse-lightning-indexer": "kimigraph.passes.fuse_lightning_indexer:FuseLightningIndexer",
    "fuse-sparse-attention": "kimigraph.passes.fuse_sparse_attention:FuseSparseAttention",
    "page-caches": "kimigraph.passes.page_caches:PageCaches",
    "fuse-indexer-attention": "kimigraph.passes.fuse_indexer_attention:FuseIndexerAttention",
    "shard": "kimigraph.passes.shard:Shard",
    "insert-quantization": "kimigraph.passes.insert_quantization:InsertQuantization",
    "share-tokens": "kimigraph.passes.share_tokens:ShareTokens",
    "prune-index-exchange": "kimigraph.passes.prune_index_exchange:PruneIndexExchange",
    "balance-indexer": "kimigraph.passes.balance_indexer:BalanceIndexer",
    "interleave-halves": "kimigraph.passes.interleave_halves:InterleaveHalves",
    "split-indexer-prolog": "kimigraph.passes.split_indexer_prolog:SplitIndexerProlog",
    "share-indexer-rows": "kimigraph.passes.share_indexer_rows:ShareIndexerRows",
    "fuse-collectives": "kimigraph.passes.fuse_collectives:FuseCollectives",
    "merge-horizontal": "kimigraph.passes.merge_horizontal:MergeHorizontal",
    "fuse-pointwise": "kimigraph.passes.fuse_pointwise:FusePointwise",
    "merge-regions": "kimigraph.passes.merge_regions:MergeRegions",
    "overlap-communication": "kimigraph.passes.overlap_communication:OverlapCommunication",
    "assign-streams": "kimigraph.passes.assign_streams:AssignStreams",
    "plan-memory": "kimigraph.passes.plan_memory:PlanMemory",
    "verify-schedule": "kimigraph.passes.verify_schedule:VerifySchedule",
}
"""The passes of the default pipeline, in the order in which it runs them, with where each is defined."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def unknown_name(kind: str, name: str, known: list[str]) -> UsageError:
    """The error for a name that is not among ``known``: it says the nearest one and lists all."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return UsageError(f"{kind} '{name}' is not known{hint} Known: {', '.join(known) or 'none'}.")


@dataclass
class PassRegistry:
    """Pass names and where their classes come from: a ``module:Class`` path, an entry point, or the class itself."""

    sources: dict[str, str | EntryPoint | type[Pass]] = field(default_factory=lambda: {})

    def add(self, name: str, source: str | EntryPoint | type[Pass]) -> None:
        """Make a pass known under ``name``. Two passes of one name are an error, the same one twice is not."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{name}' is no name for a pass: use lower-case words joined by dashes, such as 'my-pass'."
            )
        if name in self.sources and self.sources[name] != source:
            raise UsageError(
                f"two passes are called '{name}': {_origin(self.sources[name])} and {_origin(source)}. "
                "Rename one of them."
            )
        self.sources[name] = source

    @property
    def names(self) -> list[str]:
        """All known names: built-in ones in pipeline order, then the others in the order of their registration."""
        return list(self.sources)

    def load(self, name: str) -> type[Pass]:
        """The class of the pass called ``name``, imported now if it was not yet."""
        if name not in self.sources:
            raise unknown_name("pass", name, self.names)
        source = self.sources[name]
        loaded = source if isinstance(source, type) else _import(name, source)
        if not (isinstance(loaded, type) and issubclass(loaded, Pass)):
            raise UsageError(f"{_origin(source)}, registered as pass '{name}', is not a subclass of Pass.")
        if getattr(loaded, "name", None) != name:
            raise UsageError(
                f"{_origin(source)} is registered as pass '{name}' but calls itself '{getattr(loaded, 'name', '')}': "
                "make its `name` and the registered name agree."
            )
        return loaded


def _origin(source: str | EntryPoint | type[Pass]) -> str:
    if isinstance(source, str):
        return source
    return source.value if isinstance(source, EntryPoint) else f"{source.__module__}:{source.__qualname__}"


def _import(name: str, source: str | EntryPoint) -> object:
    try:
        if isinstance(source, EntryPoint):
            return source.load()
        module, _, attribute = source.partition(":")
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"pass '{name}' cannot be imported from {_origin(source)}: {error}") from error


@cache
def default_registry() -> PassRegistry:
    """The registry of this process: the built-in passes and those of installed packages (entry points)."""
    registry = PassRegistry(dict(BUILT_IN))
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        registry.add(entry.name, entry)
    return registry


def register(pass_class: type[Pass]) -> type[Pass]:
    """Make a pass known to pipelines of this process under its ``name``; may be used as a class decorator.

    Packages that are installed use the entry point group ``kimigraph.passes`` instead, and need no call.
    """
    if not getattr(pass_class, "name", "") or not getattr(pass_class, "summary", ""):
        raise UsageError(f"{pass_class.__qualname__} needs class attributes `name` and `summary` to be registered.")
    default_registry().add(pass_class.name, pass_class)
    return pass_class


def registered_passes() -> dict[str, type[Pass]]:
    """Every known pass by name, imported."""
    registry = default_registry()
    return {name: registry.load(name) for name in registry.names}
