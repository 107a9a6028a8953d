"""What a pass is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import Graph

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import Device, device_for
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.gate import RewriteGate


@dataclass(frozen=True)
class PassContext:
    """What a pass may look at besides the program."""

    config: CompileConfig
    gate: RewriteGate = field(default_factory=RewriteGate)
    describe_memory: Callable[[Graph], None] | None = None
    """Writes at each node what it allocates (``kimigraph.ir.launch_memory``): code generation knows, passes do not."""

    @property
    def device(self) -> Device:
        """The device that decisions about profit are priced for (``kimigraph.ir.cost``)."""
        return device_for(self.config)

    def allow(self, rewrite: str) -> bool:
        """Ask before each rewrite, naming pass-internal rule and node; False means to leave that place as it is.

        True but for ``kimigraph bisect``, which narrows a fault down to one rewrite of the passes that ask.
        """
        return self.gate.allow(rewrite)


@dataclass(frozen=True)
class Pass:
    """One rewrite of the program. Options are the dataclass fields of a subclass, in text ``name{field=value}``.

    Contract: the program verifies before and after ``apply``; in between it need not. ``apply`` changes the program's
    graph in place, gives every new node ``meta["val"]`` (``kimigraph.ir.fake.infer``), leaves the graph alone when it
    refuses, and says what it did and did not do in remarks. A pass keeps no state between calls.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    level: ClassVar[int] = 1
    """The lowest optimization level whose default pipeline has the pass."""
    fusion: ClassVar[bool] = False
    """Whether the pass counts in the report's ``fusions`` and can be named by ``--require-fusion``."""
    changes_formats: ClassVar[bool] = False
    """Whether the pass may give the program's caches other formats: other inputs, and a call of another form."""
    analysis: ClassVar[bool] = False
    """Whether the pass only looks: a CompileError of its own is a verdict on the program, not a fault of the pass."""
    pattern: ClassVar[str] = ""
    """What the pass looks for, for the table in ``docs/fusions.md``."""
    constraints: ClassVar[tuple[str, ...]] = ()
    """What must hold for a place that looks like it, one condition each."""
    effect: ClassVar[str] = ""
    """What comes instead."""

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite ``program`` in place."""
        raise NotImplementedError
