"""Shape checks that read like the docstrings: ``check("op", q=(q, "B S H D"), keys=(keys, "B T D"))``."""

from collections.abc import Sequence

import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor


def check(operator: str, **arguments: tuple[torch.Tensor | None, str]) -> dict[str, int]:
    """Match each tensor with its dimension letters or sizes; the same letter must be the same size everywhere.

    A tensor that is None is skipped. Returns the sizes by letter. Raises ValueError naming the operator, the argument,
    the shape it has and the one it should have.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in arguments.items():
        if tensor is None:
            continue
        letters, before = pattern.split(), dict(sizes)
        fits = len(letters) == tensor.dim() and all(
            (int(letter) if letter.isdigit() else sizes.setdefault(letter, size)) == size
            for letter, size in zip(letters, tensor.shape, strict=True)
        )
        if not fits:
            known = ", ".join(f"{letter} = {before[letter]}" for letter in letters if letter in before)
            wanted = f"[{', '.join(letters)}]" + (f" with {known}" if known else "")
            raise ValueError(f"{operator}: {name} is {list(tensor.shape)}, want {wanted}")
    return sizes


def check_integer(operator: str, **arguments: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that should hold integers and does not."""
    for name, tensor in arguments.items():
        if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype == torch.bool):
            raise ValueError(f"{operator}: {name} is {tensor.dtype}, want an integer type")


def check_layout(operator: str, state_layout: str) -> None:
    """Raise ValueError for a state layout other than ``kv`` and ``vk``."""
    if state_layout not in ("kv", "vk"):
        raise ValueError(f"{operator}: state_layout {state_layout!r}, want 'kv' ([B, H, K, V]) or 'vk' ([B, H, V, K])")


ROPE_STYLES = ("none", "half_split", "interleaved", "deinterleaved")
"""Pairs that turn together: (i, i + R / 2); (2i, 2i + 1); the latter, put to i and i + R / 2."""


def check_rotation(
    operator: str,
    style: str,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rows: tuple[int, ...],
    width: int,
    *,
    whole: bool,
) -> None:
    """Raise ValueError unless ``cos`` and ``sin`` are [B, S, R / 2] for ``rows`` (B, S), or absent under style none.

    R is ``width`` if the ``whole`` row turns, else no more than it.
    """
    if style not in ROPE_STYLES:
        raise ValueError(f"{operator}: rope_style is {style!r}, want one of {', '.join(ROPE_STYLES)}")
    if (cos is None) != (style == "none") or (sin is None) != (style == "none"):
        raise ValueError(f"{operator}: give cos and sin with a rope_style, and neither under 'none'")
    if cos is None or sin is None:
        return
    check(operator, cos=(cos, f"{rows[0]} {rows[1]} half"), sin=(sin, f"{rows[0]} {rows[1]} {cos.shape[-1]}"))
    turned = 2 * cos.shape[-1]
    if turned > width or (whole and turned != width):
        raise ValueError(f"{operator}: cos is for {turned} dims, the row has {width}")


def cache(block_table: torch.Tensor | None, width: str) -> str:
    """The pattern of a cache of rows of ``width``: [B, T, width], or pages where there is a block table."""
    return f"B T {width}" if block_table is None else f"P page {width}"


def check_table(operator: str, block_table: torch.Tensor | None, batch: int) -> None:
    """Raise ValueError for a block table that is not integer [B, N]."""
    check_integer(operator, block_table=block_table)
    if block_table is not None and (block_table.dim() != 2 or block_table.shape[0] != batch):
        raise ValueError(f"{operator}: block_table is {list(block_table.shape)}, want [B, N] with B = {batch}")


def capacity(rows: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Logical positions of one sequence in a cache: T, or pages of the table times page size."""
    return rows.shape[1] if block_table is None else block_table.shape[1] * rows.shape[1]


def key_row(operator: str, keys: torch.Tensor, width: int, descriptor: str) -> str:
    """The last dimension of a cache of index keys, for ``check``: D, or the bytes that hold a key of ``width``.

    Raises ValueError for bytes that the descriptor does not explain.
    """
    if keys.dtype != torch.uint8:
        return "D"
    packed = parse_descriptor(descriptor) if descriptor else None
    if not isinstance(packed, IndexKeyDescriptor) or packed.width != width:
        raise ValueError(f"{operator}: keys are bytes; want a descriptor of keys of {width}, not {descriptor!r}")
    return str(packed.row)


def check_groups(
    operator: str, q: torch.Tensor, keys: torch.Tensor, q_scales: torch.Tensor | None, descriptor: str
) -> None:
    """Raise ValueError unless queries in groups meet keys in the same groups, and E4M3 queries keys under one scale."""
    packed = parse_descriptor(descriptor) if descriptor and keys.dtype == torch.uint8 else None
    group = packed.group if isinstance(packed, IndexKeyDescriptor) else None
    if q_scales is None:
        if q.dtype == torch.uint8 or (q.dtype == torch.float8_e4m3fn and group is not None):
            raise ValueError(f"{operator}: q is {q.dtype} without the q_scales that keys in groups of {group} ask for")
        return
    wanted = (*q.shape[:-1], -(-q.shape[-1] // (group or q.shape[-1])))
    if group is None or q.dtype != torch.uint8 or q_scales.dtype != torch.uint8 or q_scales.shape != wanted:
        raise ValueError(
            f"{operator}: q is {q.dtype} with q_scales {q_scales.dtype} {list(q_scales.shape)}, want torch.uint8 both,"
            f" scales {list(wanted)}, and keys in groups instead of {descriptor!r}"
        )


def check_quantised_by(
    operator: str, q: torch.Tensor, keys: torch.Tensor, q_scales: torch.Tensor | None, descriptor: str
) -> None:
    """Raise ValueError unless ``operator`` can put the queries into the groups of its keys itself."""
    packed = parse_descriptor(descriptor) if descriptor and keys.dtype == torch.uint8 else None
    group = packed.group if isinstance(packed, IndexKeyDescriptor) else None
    if q_scales is not None or group is None or not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise ValueError(
            f"{operator}: quantises_q with q {q.dtype} and keys {descriptor!r}, want real queries without q_scales for "
            "keys in groups"
        )


def latent_row(
    operator: str,
    latent: torch.Tensor,
    width: int,
    rope_parts: tuple[torch.Tensor | None, torch.Tensor | None],
    descriptor: str,
) -> str:
    """The last dimension of a latent cache, for ``check``: L, or the size of a row that holds the rope part too.

    ``rope_parts`` is the rope operand beside the latent one of ``width`` (query or new values), and the rope cache:
    both or neither are given, but for rows of one buffer no rope cache is. Raises ValueError where they do not fit.
    """
    given, rope = rope_parts
    packed = parse_descriptor(descriptor) if descriptor else None
    if isinstance(packed, LatentDescriptor) and packed.buffers == 1:
        sizes = (width, 0 if given is None else given.shape[-1])
        if sizes != (packed.width, packed.rope_dim) or rope is not None:
            raise ValueError(f"{operator}: operands of {sizes[0]} + {sizes[1]} columns do not fit the cache {packed}")
        return str(packed.row)
    if latent.dtype == torch.uint8:
        raise ValueError(f"{operator}: latent is bytes; want a descriptor of one buffer, not {descriptor!r}")
    return "L"


def check_power_of_two(operator: str, width: int, rotate: bool) -> None:
    """Raise ValueError for rows that are to be rotated and are not a power of two wide."""
    if rotate and (width < 1 or width & (width - 1)):
        raise ValueError(f"{operator}: a row of {width} elements has no Hadamard rotation, want a power of two")


def check_sources(operator: str, sources: Sequence[torch.Tensor]) -> int:
    """The last size of tensors that must agree in shape and type; ValueError names the first that does not."""
    if not sources or sources[0].dim() == 0:
        raise ValueError(f"{operator}: no sources, want at least one of shape [..., D]")
    first = sources[0]
    for number, source in enumerate(sources):
        if source.shape != first.shape or source.dtype != first.dtype:
            raise ValueError(
                f"{operator}: sources[{number}] is {source.dtype} {list(source.shape)}, want {first.dtype}"
                f" {list(first.shape)} like sources[0]"
            )
    return first.shape[-1]


def check_vectors(operator: str, width: int, **vectors: torch.Tensor | None) -> None:
    """Raise ValueError for a vector that has not ``width`` elements in its last dimension and no others."""
    for name, vector in vectors.items():
        if vector is not None and (vector.numel() != width or vector.shape[-1:] != (width,)):
            raise ValueError(f"{operator}: {name} is {list(vector.shape)}, want [{width}]")
