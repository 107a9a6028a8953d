"""The ranks that a program is made for, by what they share out, and the names of their groups."""

from dataclasses import astuple, dataclass, fields

from kimigraph.ir.errors import UsageError

TP_GROUP = "kimigraph.tp"
"""The process group of tensor parallel ranks, as collectives in a graph name it."""


COLLECTIVES = "_c10d_functional"
"""The namespace of torch.distributed's functional collectives in ``torch.ops``."""


@dataclass(frozen=True)
class DeviceMesh:
    """Sizes of a mesh of ranks, the outermost dim first: neighbouring ranks are of one ``tp`` group.

    ``dp`` replicas, each of ``pp`` stages of layers, each stage on ``tp`` ranks that share out heads and widths. ``sp``
    shares out the sequence over ranks of the ``tp`` dim, and adds none.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for field, size in zip(fields(self), astuple(self), strict=True):
            if size < 1:
                raise UsageError(f"{field.name} {size}: a mesh has at least one rank in each dim")
        if self.tp % self.sp:
            raise UsageError(f"sp {self.sp}: it shares out the sequence over the {self.tp} ranks of tp; divide them")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """The place (dp, pp, tp) of a rank."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not in a mesh of {self.size} ranks")
        outer, tp = divmod(rank, self.tp)
        return (*divmod(outer, self.pp), tp)
