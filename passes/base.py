"""What a pass is."""

from dataclasses import dataclass
from typing import ClassVar

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult


@dataclass(frozen=True)
class PassContext:
    """What a pass may look at besides the program."""

    config: CompileConfig


@dataclass(frozen=True)
class Pass:
    """One rewrite of the program. Options are the dataclass fields of a subclass, in text ``name{field=value}``.

    Contract: the program verifies before and after ``apply``; in between it need not. ``apply`` changes the program's
    graph in place, gives every new node ``meta["val"]`` (``kimigraph.ir.fake.infer``), leaves the graph alone when it
    refuses, and says what it did and did not do in remarks. A pass keeps no state between calls.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    fusion: ClassVar[bool] = False
    """Whether the pass counts in the report's ``fusions`` and can be named by ``--require-fusion``."""

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite ``program`` in place."""
        raise NotImplementedError
