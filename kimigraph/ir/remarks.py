"""What a pass did and did not do, and why: the records behind ``remarks.jsonl``, ``explain`` and the summary."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Via = Literal["pattern", "mark"]


@dataclass(frozen=True)
class Remark:
    """One thing a pass has to say.

    ``kind`` is ``passed`` (a rewrite happened), ``missed`` (it came near and did not: ``message`` gives the reason and
    ``node`` the node at fault) or ``note``. ``source`` is the user's file and line where the node came from, if known.
    ``score`` counts the evidence that held before a miss, so that the nearest miss can be told from the far ones.
    ``matched`` names that evidence, as ``node (operator)``, and ``remedy`` the change to the model or the option that
    would make the rule match. ``module`` is the path of the module that the node came from.
    """

    kind: Literal["passed", "missed", "note"]
    pass_name: str
    message: str
    node: str = ""
    source: str = ""
    nodes: tuple[str, ...] = ()
    via: Via = "pattern"
    score: int = 0
    matched: tuple[str, ...] = ()
    remedy: str = ""
    module: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PassResult:
    """What ``Pass.apply`` returns: whether the graph changed, its remarks, and counts worth printing."""

    modified: bool
    remarks: tuple[Remark, ...] = ()
    statistics: dict[str, int] = field(default_factory=lambda: {})
