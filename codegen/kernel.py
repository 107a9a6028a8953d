"""What codegen asks of a kernel template, and what it gets."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a kernel sees it: sizes and strides in elements, dtype as in ``torch.<dtype>`` without the prefix.

    ``aligned``: its first element lies at a multiple of 16 bytes, as in every tensor of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    aligned: bool = True


@dataclass(frozen=True)
class KernelRequest:
    """One call of a semantic operator that wants a kernel.

    ``tensors`` maps the schema's tensor arguments to their specifications (None where the call gives none), in schema
    order; the tensors of a list are ``<name>_0``, ``<name>_1`` and so on. ``attributes`` holds the other arguments,
    defaults filled in. ``target`` may allow a form of the kernel that runs there alone.
    """

    op: str
    tensors: dict[str, TensorSpec | None]
    attributes: dict[str, Any]
    target: str = "cpu"


@dataclass(frozen=True)
class KernelLaunch:
    """One ``@triton.jit`` function of a kernel module as it is compiled ahead of time.

    ``signature`` maps run-time arguments to Triton types (``*bf16``, ``i32``), in order; ``constants`` the constexpr
    ones; ``divisible`` names the run-time arguments that are multiples of 16 (pointers included); ``options`` goes to
    Triton as it is (num_warps, num_stages).
    """

    function: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: {})


@dataclass(frozen=True)
class KernelModule:
    """The text of ``kernels/<name>.py`` below its header, and its launches for ahead-of-time builds.

    Modules of one ``identity`` are the same kernel, whatever names their texts use; empty: the text is the identity.
    ``route`` says in words which of an operator's forms was chosen; empty where there is one alone.
    """

    text: str
    launches: tuple[KernelLaunch, ...]
    identity: str = ""
    route: str = ""
