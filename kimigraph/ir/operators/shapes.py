"""Shape checks that read like the docstrings: ``check("op", q=(q, "B S H D"), keys=(keys, "B T D"))``."""

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
