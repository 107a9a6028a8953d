"""Several processes that run one program together."""

from kimigraph.runtime.parallel.ranks import first_then_others, gathered, join_ranks, of_all_replicas, require_joined

__all__ = ["first_then_others", "gathered", "join_ranks", "of_all_replicas", "require_joined"]
