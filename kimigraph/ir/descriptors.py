"""Descriptors: the types of caches and states, so that a reader cannot misread what a writer wrote.

Each has a text form that round-trips, ``latent{layout=contiguous,dtype=bfloat16,width=512,...}``; that text
is what ``InputSpec.descriptor`` and the operators' ``descriptor`` attribute hold. Fields appear in their order, those
of quantised caches only there, so two descriptors are equal exactly when their texts are.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from kimigraph.ir.errors import CompileError

_DTYPES = ("bfloat16", "float16", "float32")
QUANTISED = "float8_e4m3fn"
"""The element type of quantised caches; their tensors are bytes, uint8, because a row mixes types."""
_SCALE_RULES = ("power2", "amax")
GROUP_SCALES = "e8m0"
"""The scales of index keys in groups: one byte each."""
_ORDERS = ("scales_rope", "rope_scales")
_CACHE_LAYOUTS = ("contiguous", "paged")
_STATE_LAYOUTS = ("kv", "vk")


@dataclass(frozen=True)
class Descriptor:
    """Base of all descriptors; ``str()`` gives the text form and ``parse_descriptor`` reads it back."""

    kind: ClassVar[str] = ""

    def __str__(self) -> str:
        """The text form."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        values = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"{self.kind}{{{values}}}"


@dataclass(frozen=True)
class LatentDescriptor(Descriptor):
    """A cache of MLA rows: ``width`` latent elements and ``rope_dim`` rotary ones, each of ``dtype``.

    ``layout`` is contiguous ([B, T, .], ``page_size`` 0) or paged ([P, page_size, .] with a block table). With 2
    ``buffers`` the rope part has its own tensor; with 1 it follows the latent in the same row. ``rope_dim`` may be 0.

    Quantised (``dtype`` float8_e4m3fn, 1 buffer): a row is ``width`` bytes e4m3, one fp32 scale for each ``tile``
    elements and ``rope_dim`` bf16 elements, in ``order`` scales_rope (FlashMLA, "fp8_ds_mla") or rope_scales (Ascend,
    tile 128 in combined mode). A writer picks a tile's scale as amax / 448 (``scales`` amax) or the power of two above
    (power2); readers do not care.
    """

    kind: ClassVar[str] = "latent"
    layout: str
    dtype: str
    width: int
    rope_dim: int
    page_size: int = 0
    buffers: int = 2
    tile: int | None = None
    order: str | None = None
    scales: str | None = None

    def __post_init__(self) -> None:
        _check_cache(self, self.layout, self.dtype, self.page_size)
        _check(self, self.width > 0 and self.rope_dim >= 0, "width must be positive and rope_dim not negative")
        _check(self, self.buffers in (1, 2), "buffers must be 1 (rope after latent) or 2 (apart)")
        _check_scales(self, self.dtype, self.scales)
        if self.dtype != QUANTISED:
            _check(self, self.tile is None and self.order is None, f"tile and order belong to {QUANTISED} caches")
            return
        _check(self, self.buffers == 1, "a quantised row holds its rope part: buffers must be 1")
        _check(self, self.order in _ORDERS, f"order must be one of {', '.join(_ORDERS)}")
        tile = self.tile or 0
        _check(self, tile > 0 and self.width % tile == 0, "tile must divide width")

    @property
    def row(self) -> int:
        """Elements of the row of the tensor that holds the latent part; bytes when quantised."""
        if self.dtype == QUANTISED:
            return self.width + 4 * (self.width // (self.tile or 1)) + 2 * self.rope_dim
        return self.width + (self.rope_dim if self.buffers == 1 else 0)


@dataclass(frozen=True)
class IndexKeyDescriptor(Descriptor):
    """A cache of index keys of ``width`` elements of ``dtype``; ``layout`` and ``page_size`` as for latent caches.

    Quantised (``dtype`` float8_e4m3fn): [P, page_size, row] bytes (or [B, T, row]), where each page (or sequence) is
    planar: all its keys e4m3, then their scales: one fp32 a key (``row`` is width + 4), picked by the rule ``scales``
    as for latents; or with a ``group`` one byte for each group of elements, E8M0 (``scales`` e8m0, MXFP8). Under
    ``rotation`` hadamard it holds keys times the Hadamard matrix over sqrt(width), for queries that are turned alike.
    """

    kind: ClassVar[str] = "index_key"
    layout: str
    dtype: str
    width: int
    page_size: int = 0
    scales: str | None = None
    group: int | None = None
    rotation: str | None = None

    def __post_init__(self) -> None:
        _check_cache(self, self.layout, self.dtype, self.page_size)
        _check(self, self.width > 0, "width must be positive")
        turned = self.rotation is not None
        _check(self, not turned or self.dtype == QUANTISED, f"rotation belongs to {QUANTISED} caches")
        _check(self, not turned or self.rotation == "hadamard", "rotation must be hadamard")
        _check(self, not turned or self.width & (self.width - 1) == 0, "a rotated width must be a power of two")
        if self.group is None:
            _check_scales(self, self.dtype, self.scales)
            return
        _check(self, self.dtype == QUANTISED, f"group belongs to {QUANTISED} caches")
        _check(self, self.group > 0, "group must be positive")
        _check(self, self.scales == GROUP_SCALES, f"scales of groups must be {GROUP_SCALES}")

    @property
    def row(self) -> int:
        """Elements of a row of the tensor; bytes when quantised."""
        if self.dtype != QUANTISED:
            return self.width
        return self.width + (4 if self.group is None else -(-self.width // self.group))


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
    if "int" not in str(kind):
        return value
    try:
        return int(value)
    except ValueError:
        raise CompileError(f"descriptor {text!r}: {name} is {value!r}, want a whole number") from None


def _check_cache(descriptor: Descriptor, layout: str, dtype: str, page_size: int) -> None:
    _check(descriptor, layout in _CACHE_LAYOUTS, f"layout must be one of {', '.join(_CACHE_LAYOUTS)}")
    known = (*_DTYPES, QUANTISED)
    _check(descriptor, dtype in known, f"dtype must be one of {', '.join(known)}")
    _check(descriptor, (page_size > 0) == (layout == "paged"), "a paged layout has a page_size, a contiguous one has 0")


def _check_scales(descriptor: Descriptor, dtype: str, scales: str | None) -> None:
    if dtype == QUANTISED:
        _check(descriptor, scales in _SCALE_RULES, f"scales must be one of {', '.join(_SCALE_RULES)}")
    else:
        _check(descriptor, scales is None, f"scales belongs to {QUANTISED} caches")


def _check(descriptor: Descriptor, holds: bool, rule: str) -> None:
    if not holds:
        raise CompileError(f"descriptor {descriptor}: {rule}")
