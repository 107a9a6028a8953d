"""Of the pieces that fill a model's tensors, what one rank reads of those that several ranks share out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kimigraph.ir.shares import Share
from kimigraph.weights.plan import Copy, Wanted


@dataclass(frozen=True)
class RankParts:
    """``shares`` of tensors by name, whole as ``wanted`` says, and the ``rank`` that reads.

    Ranks have parts in turn: of two, rank 3 has the second one.
    """

    shares: Mapping[str, Share]
    wanted: Mapping[str, Wanted]
    rank: int

    def of(self, copies: Iterable[Copy]) -> list[Copy]:
        """The copies that fill the rank's own tensors, in the order given."""
        return [part for copy in copies for part in self._parts(copy)]

    def _parts(self, copy: Copy) -> Iterator[Copy]:
        share = self.shares.get(copy.name)
        if share is None:
            yield copy
            return
        shape, put = self.wanted[copy.name].shape, copy.piece.put
        at = put[share.dim] if share.dim < len(put) else slice(None)
        first, behind = (at, at + 1) if isinstance(at, int) else at.indices(shape[share.dim])[:2]
        outer = [put[dim] if dim < len(put) else slice(None) for dim in range(share.dim)]
        dim = sum(isinstance(each, slice) for each in outer)
        own = 0
        for begin, end in share.spans(shape[share.dim], self.rank % share.ways):
            low, high = max(first, begin), min(behind, end)
            if low < high:
                here = own + low - begin
                place = (*outer, here if isinstance(at, int) else slice(here, own + high - begin))
                part = None if isinstance(at, int) else (dim, low - first, high - first)
                yield replace(copy, place=(*place, *put[share.dim + 1 :]), part=part)
            own += end - begin
