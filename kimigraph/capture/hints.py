"""What a source knows about its tensors and the graph does not say."""

from dataclasses import dataclass, field

from kimigraph.ir.program import InputKind


@dataclass(frozen=True)
class InputHint:
    """Facts of one caller-given tensor: its kind, the bounds of its integers, its cache descriptor's text form."""

    kind: InputKind = "input"
    value_range: tuple[int, int] | None = None
    descriptor: str = ""
    is_length: bool = False
    """Whether the tensor counts the tokens before the step."""


@dataclass(frozen=True)
class CaptureHints:
    """What to call things and what they are.

    ``inputs`` is keyed by the outside name (``InputSpec.source``). ``outputs`` names the tensors that the step returns,
    in order; when empty they are named by their place in the result. ``prefix`` is cut off the front of parameter and
    buffer names, so that a wrapper leaves the model's own state-dict names.
    """

    inputs: dict[str, InputHint] = field(default_factory=lambda: {})
    outputs: tuple[str, ...] = ()
    prefix: str = ""
