"""Quantization policies: which format each role of tensor gets, as small TOML files (``policies/*.toml``).

    summary = "one line for people"
    rotation = "hadamard"                                  # of index queries and keys; "none" if left out

    [roles]                                                # a role that is left out keeps what the model has
    index_query = { format = "mxfp8", group = 32 }
    latent = { format = "fp8", group = 128, scales = "amax", order = "rope_scales" }

    [tolerance]                                            # what `kimigraph quant-report` lets pass
    recall = 0.9

Formats: ``keep``; ``mxfp8``, E4M3 under one power of two (E8M0) for each ``group`` elements (index roles); ``fp8``,
E4M3 under an fp32 scale for each ``group``, picked by the rule ``scales``, power2 or amax (index roles and latent);
``mxfp4``, E2M1 under one power of two for each 32 (experts); ``bfloat16`` (rope). ``order`` says where a latent row has
its scales: scales_rope (FlashMLA) or rope_scales (Ascend).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from kimigraph.ir.errors import UsageError

_DIRECTORY = Path(__file__).with_name("policies")
POLICIES = ("off", "article", "deepseek")
"""The policies that come along, by name."""
KEEP = "keep"
ROLES: dict[str, tuple[str, ...]] = {
    "index_query": (KEEP, "mxfp8", "fp8"),
    "index_key": (KEEP, "mxfp8", "fp8"),
    "latent": (KEEP, "fp8"),
    "rope": (KEEP, "bfloat16"),
    "prolog_weights": (KEEP,),
    "experts": (KEEP, "mxfp4"),
}
"""The roles of tensors, with the formats that each may have."""
ROTATIONS = ("none", "hadamard")
_GROUPS = {"mxfp8": 32, "fp8": 128, "mxfp4": 32}
_CHOICES = {"scales": ("power2", "amax"), "order": ("scales_rope", "rope_scales")}


@dataclass(frozen=True)
class Format:
    """The format of a role; fields that it has no use for are empty."""

    kind: str = KEEP
    group: int = 0
    scales: str = ""
    order: str = ""

    @property
    def quantises(self) -> bool:
        """Whether values lose bits to it."""
        return self.kind in _GROUPS

    def __str__(self) -> str:
        """For people: ``mxfp8 group 32``."""
        parts = [self.kind, f"group {self.group}" if self.group else "", self.scales]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Tolerance:
    """What a report lets pass: the least recall@k, the largest relative error (rms) of an attention's output, the
    largest divergence (KL, in nats) of the distribution over tokens."""

    recall: float = 0.0
    output: float = 1.0
    divergence: float = 1.0


@dataclass(frozen=True)
class Policy:
    """A format for each role."""

    name: str
    summary: str = ""
    rotation: str = "none"
    index_query: Format = Format()
    index_key: Format = Format()
    latent: Format = Format()
    rope: Format = Format()
    prolog_weights: Format = Format()
    experts: Format = Format()
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def quantises(self) -> bool:
        """Whether it asks for anything at all."""
        return any(self.format_of(role).quantises for role in ROLES) or self.rotation != "none"

    def format_of(self, role: str) -> Format:
        """The format of a role by its name."""
        return cast(Format, getattr(self, role))


def policy_of(text: str) -> Policy:
    """The policy that ``text`` is: the name of one that comes along, or the text of a policy file.

    UsageError for an unknown name, with the nearest one, and for a text that breaks a rule of policies.
    """
    if text in POLICIES:
        return _parse((_DIRECTORY / f"{text}.toml").read_text(encoding="utf-8"), text)
    if "\n" not in text and "=" not in text:
        near = get_close_matches(text, POLICIES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UsageError(f"policy '{text}' is not known: {hint}Use {', '.join(POLICIES)} or a policy file (*.toml).")
    return _parse(text, "custom")


def read_policy(name_or_path: str) -> str:
    """What ``--policy`` means as ``CompileConfig.policy``: the name, or the checked text of the file.

    UsageError naming the file when it cannot be read or is no policy.
    """
    path = Path(name_or_path)
    if name_or_path in POLICIES or (path.suffix != ".toml" and not path.is_file()):
        policy_of(name_or_path)
        return name_or_path
    try:
        text = path.read_text(encoding="utf-8")
        _parse(text, path.stem)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give {', '.join(POLICIES)} or a file") from None
    except (UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None
    return text if "\n" in text else text + "\n"


@lru_cache(maxsize=16)
def _parse(text: str, name: str) -> Policy:
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"policy: not TOML ({error})") from None
    _known("policy", document, ("name", "summary", "rotation", "roles", "tolerance"))
    roles, rotation = _table("roles", document), document.get("rotation", "none")
    _known("policy: roles", roles, ROLES)
    if rotation not in ROTATIONS:
        raise UsageError(f"policy: rotation is {rotation!r}, want {' or '.join(ROTATIONS)}")
    policy = Policy(
        name=str(document.get("name", name)),
        summary=str(document.get("summary", "")),
        rotation=str(rotation),
        tolerance=_tolerance(_table("tolerance", document)),
        **{role: _format(role, roles[role]) for role in roles},
    )
    query, key = policy.index_query, policy.index_key
    if (query.kind, query.group) != (key.kind, key.group):
        raise UsageError(
            f"policy: index_query is {query} and index_key {key}; a score multiplies both, so half a pair gains "
            "nothing: give both one format and group, or neither"
        )
    if policy.rotation != "none" and not key.quantises:
        raise UsageError(
            "policy: rotation is for quantised index queries and keys; give them a format, or leave it out"
        )
    return policy


def _format(role: str, value: Any) -> Format:
    given: Any = {"format": value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise UsageError(f'policy: {role} is {value!r}, want a format or {{ format = "fp8", group = 128 }}')
    kind = given.get("format")
    if kind not in ROLES[role]:
        raise UsageError(f"policy: {role} has format {kind!r}, want {', '.join(ROLES[role])}")
    quantises, latent = kind in _GROUPS, role == "latent"
    allowed = ["format", *(["group"] if quantises and kind != "mxfp4" else []), *(["scales"] if kind == "fp8" else [])]
    _known(f"policy: {role}", given, [*allowed, *(["order"] if quantises and latent else [])])
    group = given.get("group", _GROUPS.get(kind, 0))
    if not isinstance(group, int) or isinstance(group, bool) or (quantises and group < 1):
        raise UsageError(f"policy: {role} has group {group!r}, want a whole number of at least 1")
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise UsageError(f"policy: {role} has {name} {given[name]!r}, want {' or '.join(choices)}")
    scales = given.get("scales", "power2") if kind == "fp8" else ""
    return Format(str(kind), group, scales, given.get("order", "scales_rope") if quantises and latent else "")


def _tolerance(given: dict[str, Any]) -> Tolerance:
    names = [item.name for item in fields(Tolerance)]
    _known("policy: tolerance", given, names)
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"policy: tolerance {name} is {value!r}, want a number of at least 0")
    return Tolerance(**{name: float(value) for name, value in given.items()})


def _table(name: str, document: dict[str, Any]) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise UsageError(f"policy: {name} is {value!r}, want a table [{name}]")
    return cast("dict[str, Any]", value)


def _known(what: str, given: Mapping[str, Any], names: Any) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{what} has no field {unknown[0]!r}; it has {', '.join(names)}")
