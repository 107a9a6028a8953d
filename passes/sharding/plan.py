"""The plan: which part of each weight and state a rank has, by its role in the model.

Roles are told by the names that weights have outside, which the published families share. What has no role is
replicated: norms, low-rank first legs, routers, the indexer, caches of latents and of index keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kimigraph.ir.errors import UsageError
from kimigraph.ir.shares import Share


@dataclass(frozen=True)
class Role:
    """Tensors whose outside name matches ``pattern``: ranks share out ``dim``, which has so many equal ``blocks``."""

    name: str
    pattern: str
    dim: int
    blocks: int = 1


ROLES = (
    Role("heads", r"self_attn\.([qkvbg]_proj|q_b_proj|kv_b_proj|g_b_proj|(forget_gate\.)?f_b_proj)\.weight", 0),
    Role("heads", r"self_attn\.(forget_gate\.)?(A_log|dt_bias)", 0),
    Role("heads", r"self_attn\.conv1d\.weight", 0, 3),
    Role("heads", r"state\.\d+\.kda", 1),
    Role("heads", r"state\.\d+\.conv", 1, 3),
    Role("heads", r"log\.\d+\.(keys|decays|deltas)", 2),
    Role("heads", r"log\.\d+\.inputs", 2, 3),
    Role("rows", r"self_attn\.o_proj\.weight", 1),
    Role("columns", r"(mlp|shared_experts)\.(gate|up)_proj\.weight", 0),
    Role("rows", r"(mlp|shared_experts)\.down_proj\.weight", 1),
    Role("experts", r"experts\.gate_up_proj", 1, 2),
    Role("experts", r"experts\.down_proj", 2),
    Role("vocabulary", r"lm_head\.weight", 0),
    Role("vocabulary", r"embed_tokens\.weight", 1),
)
"""The roles of the published families. Each expert is shared out by its width, so that ranks read as much whichever
experts a step picks; the table of embeddings by its columns, so that a lookup is one of each rank."""


def role_of(source: str) -> Role | None:
    """The role of the tensor of that outside name; None for what each rank has whole."""
    return next((role for role in ROLES if re.search(rf"(^|\.){role.pattern}$", source)), None)


def share_of(source: str, shape: tuple[int, ...], ways: int) -> Share | None:
    """The part of a tensor that each of ``ways`` ranks has; None for the whole. UsageError where it has no parts."""
    role = role_of(source)
    if role is None or ways == 1:
        return None
    # Per-head numbers may come with dims of size 1 around them.
    dim = role.dim if shape[role.dim] > 1 else max(range(len(shape)), key=lambda each: shape[each])
    share = Share(dim, role.blocks, ways)
    if not share.divides(shape[dim]):
        blocks = f", {role.blocks} blocks of {shape[dim] // role.blocks}" if role.blocks > 1 else ""
        raise UsageError(
            f"tp {ways}: dim {dim} of {source} {list(shape)} ({role.name}{blocks}) does not divide among {ways} ranks; "
            f"possible here: {listed(divisors(shape[dim] // role.blocks))}"
        )
    return share


SIZES = {
    "heads of MLA": ("num_attention_heads",),
    "heads of KDA": ("linear_attn_config.num_heads", "linear_num_heads", "linear_num_value_heads"),
    "width of the dense MLP": ("intermediate_size",),
    "width of an expert": ("moe_intermediate_size",),
    "vocabulary": ("vocab_size",),
    "hidden size": ("hidden_size",),
}
"""What ranks share out, with the fields of a configuration that give its size."""


def sizes_of(document: Mapping[str, object]) -> dict[str, int]:
    """What ranks share out of a model of that configuration, with its size, as far as the configuration says."""
    found = {name: [_field(document, each) for each in fields] for name, fields in SIZES.items()}
    return {name: next(iter(filter(None, values))) for name, values in found.items() if any(values)}


def require_divisible(document: Mapping[str, object], ways: int) -> None:
    """UsageError, with the sizes that are possible, where ``ways`` ranks cannot share out a model evenly."""
    sizes = sizes_of(document) if ways > 1 else {}
    wrong = [f"{name} ({size})" for name, size in sizes.items() if size % ways]
    if wrong:
        valid = [each for each in divisors(min(sizes.values())) if all(size % each == 0 for size in sizes.values())]
        raise UsageError(f"tp {ways} does not divide {', '.join(wrong)}; possible for this model: tp {listed(valid)}")


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def listed(numbers: list[int]) -> str:
    """Numbers for a message, the first dozen of them."""
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def _field(document: Mapping[str, object], path: str) -> int:
    overrides = cast("list[tuple[str, str]]", document.get("overrides", []))
    if text := dict(overrides).get(path):
        return int(text)
    value: object = document.get("text_config", document)
    for name in path.split("."):
        value = cast("Mapping[str, object]", value).get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else 0
