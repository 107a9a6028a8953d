"""What goes wrong with sequence state: no room, which passes when a sequence leaves, and wrong use, which does not."""

from kimigraph.ir.errors import KimigraphError, UsageError


class PoolExhaustedError(KimigraphError):
    """A pool has less free than was wanted. Nothing was changed: every sequence goes on as it was.

    ``pool`` is "page" or "state slot"; ``wanted``, ``free`` and ``total`` count its entries.
    """

    def __init__(self, pool: str, wanted: int, free: int, total: int, setting: str) -> None:
        super().__init__(
            f"{pool} pool: {wanted} wanted, {free} of {total} free; nothing was changed. Try again when a sequence has"
            f" left, truncate one, or make the pool larger ({setting})"
        )
        self.pool, self.wanted, self.free, self.total = pool, wanted, free, total


class SequenceError(UsageError):
    """A sequence is used in a way that would read or write what is not its own; nothing was changed."""
