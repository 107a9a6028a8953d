"""Descriptors: the types of caches and states, so that a reader cannot misread what a writer wrote.

Each has a text form that round-trips, ``latent{layout=contiguous,dtype=bfloat16,width=512,...}``; that text
is what ``InputSpec.descriptor`` and the operators' ``descriptor`` attribute hold. Fields appear in their order and
all of them are written, so two descriptors are equal exactly when their texts are.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from kimigraph.ir.errors import CompileError

_DTYPES = ("bfloat16", "float16", "float32")
_CACHE_LAYOUTS = ("contiguous", "paged")
_STATE_LAYOUTS = ("kv", "vk")


@dataclass(frozen=True)
class Descriptor:
    """Base of all descriptors; ``str()`` gives the text form and ``parse_descriptor`` reads it back."""

    kind: ClassVar[str] = ""

    def __str__(self) -> str:
        """The text form."""
        values = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.kind}{{{values}}}"


@dataclass(frozen=True)
class LatentDescriptor(Descriptor):
    """A cache of MLA rows: ``width`` latent elements and ``rope_dim`` rotary ones, each of ``dtype``.

    ``layout`` is contiguous ([B, T, .], ``page_size`` 0) or paged ([P, page_size, .] with a block table). With 2
    ``buffers`` the rope part has its own tensor; with 1 it follows the latent in the same row. ``rope_dim`` may be 0.
    """

    kind: ClassVar[str] = "latent"
    layout: str
    dtype: str
    width: int
    rope_dim: int
    page_size: int = 0
    buffers: int = 2

    def __post_init__(self) -> None:
        _check_cache(self, self.layout, self.dtype, self.page_size)
        _check(self, self.width > 0 and self.rope_dim >= 0, "width must be positive and rope_dim not negative")
        _check(self, self.buffers in (1, 2), "buffers must be 1 (rope after latent) or 2 (apart)")


@dataclass(frozen=True)
class IndexKeyDescriptor(Descriptor):
    """A cache of index keys of ``width`` elements of ``dtype``; ``layout`` and ``page_size`` as for latent caches."""

    kind: ClassVar[str] = "index_key"
    layout: str
    dtype: str
    width: int
    page_size: int = 0

    def __post_init__(self) -> None:
        _check_cache(self, self.layout, self.dtype, self.page_size)
        _check(self, self.width > 0, "width must be positive")


@dataclass(frozen=True)
class StateDescriptor(Descriptor):
    """The recurrent state of a KDA layer: [B, heads, K, V] (``layout`` kv) or [B, heads, V, K] (vk) of ``dtype``."""

    kind: ClassVar[str] = "state"
    layout: str
    dtype: str
    heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check(self, self.layout in _STATE_LAYOUTS, f"layout must be one of {', '.join(_STATE_LAYOUTS)}")
        _check(self, self.dtype in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}")
        _check(self, min(self.heads, self.key_dim, self.value_dim) > 0, "heads, key_dim and value_dim must be positive")


@dataclass(frozen=True)
class ConvDescriptor(Descriptor):
    """[B, C, columns]: the last raw inputs, newest last, of a convolution of ``width`` over ``channels``."""

    kind: ClassVar[str] = "conv"
    channels: int
    width: int
    columns: int

    def __post_init__(self) -> None:
        _check(self, self.channels > 0 and self.width > 0, "channels and width must be positive")
        _check(self, self.columns >= self.width - 1, "columns must hold at least width - 1 inputs")


DESCRIPTORS: dict[str, type[Descriptor]] = {
    cls.kind: cls for cls in (LatentDescriptor, IndexKeyDescriptor, StateDescriptor, ConvDescriptor)
}
"""The descriptor classes by the word that opens their text form."""


def parse_descriptor(text: str) -> Descriptor:
    """The descriptor that ``text`` spells.

    Raises CompileError that quotes the text and says what is wrong: an unknown kind or field, a value that is no
    number, a field without a default that is missing, or values that contradict one another.
    """
    kind, brace, rest = text.strip().partition("{")
    cls = DESCRIPTORS.get(kind.strip())
    if cls is None:
        raise CompileError(f"descriptor {text!r}: unknown kind {kind!r}; known are {', '.join(DESCRIPTORS)}")
    if not brace or not rest.endswith("}"):
        raise CompileError(f"descriptor {text!r}: want {kind}{{field=value,...}}")
    types = {field.name: field.type for field in fields(cls)}
    values: dict[str, str | int] = {}
    for item in filter(None, (part.strip() for part in rest[:-1].split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in types:
            raise CompileError(f"descriptor {text!r}: {kind} has no field {name!r}; fields are {', '.join(types)}")
        if name in values:
            raise CompileError(f"descriptor {text!r}: field {name!r} stands twice")
        values[name] = _value(text, name, value, types[name])
    try:
        return cls(**values)
    except TypeError as error:
        missing = [name for name in types if name not in values]
        raise CompileError(f"descriptor {text!r}: fields {', '.join(missing)} are missing") from error


def _value(text: str, name: str, value: str, kind: object) -> str | int:
    if kind is not int:
        return value
    try:
        return int(value)
    except ValueError:
        raise CompileError(f"descriptor {text!r}: {name} is {value!r}, want a whole number") from None


def _check_cache(descriptor: Descriptor, layout: str, dtype: str, page_size: int) -> None:
    _check(descriptor, layout in _CACHE_LAYOUTS, f"layout must be one of {', '.join(_CACHE_LAYOUTS)}")
    _check(descriptor, dtype in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}")
    _check(descriptor, (page_size > 0) == (layout == "paged"), "a paged layout has a page_size, a contiguous one has 0")


def _check(descriptor: Descriptor, holds: bool, rule: str) -> None:
    if not holds:
        raise CompileError(f"descriptor {descriptor}: {rule}")
