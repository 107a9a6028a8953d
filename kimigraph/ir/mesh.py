"""The ranks that a program is made for, by what they share out, and the names of their groups."""

from dataclasses import astuple, dataclass, fields

from kimigraph.ir.errors import UsageError

TP_GROUP = "kimigraph.tp"
"""The process group of tensor parallel ranks, as collectives in a graph name it."""
PP_GROUP = "kimigraph.pp"
"""That of the stages of one pipeline, in their order."""
SP_GROUP = "kimigraph.sp"
"""That of ranks among which a sequence is shared out."""


COLLECTIVES = "_c10d_functional"
"""The namespace of torch.distributed's functional collectives in ``torch.ops``."""


@dataclass(frozen=True)
class DeviceMesh:
    """Sizes of a mesh of ranks, the outermost dim first: neighbouring ranks are of one ``tp`` group.

    ``dp`` replicas, each of ``pp`` stages of layers, each stage on ``sp`` times ``tp`` ranks: ``sp`` share out the
    sequence, ``tp`` heads and widths. With ``over_tp`` it is the ranks of ``tp`` that share out the sequence, too, and
    ``sp`` adds none: ``docs/scale.md`` prices that form, and no pass makes it.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    over_tp: bool = False

    def __post_init__(self) -> None:
        for field, size in zip(fields(self), astuple(self), strict=True):
            if size < 1 and field.name != "over_tp":
                raise UsageError(f"{field.name} {size}: a mesh has at least one rank in each dim")
        if self.over_tp and self.tp % self.sp:
            raise UsageError(f"sp {self.sp}: it shares out the sequence over the {self.tp} ranks of tp; divide them")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim of ranks, the outermost first."""
        return {"dp": self.dp, "pp": self.pp, "sp": 1 if self.over_tp else self.sp, "tp": self.tp}

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.sizes["sp"] * self.tp

    @property
    def ways(self) -> int:
        """Ranks that run one program together: those of a stage."""
        return self.size // (self.dp * self.pp)

    def place(self, rank: int) -> tuple[int, ...]:
        """The place of a rank in each of ``sizes``."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not in a mesh of {self.size} ranks")
        found: list[int] = []
        for size in reversed(self.sizes.values()):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))
