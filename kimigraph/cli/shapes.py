"""From options to configurations: one per shape that was asked for."""

from dataclasses import replace
from itertools import product

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError


def one_per_shape(
    base: CompileConfig, batches: list[int], tokens: list[int], contexts: list[int]
) -> list[CompileConfig]:
    """``base`` with every combination of the given sizes, in the given order, each once; no size keeps the default."""
    shapes = dict.fromkeys(product(batches or [base.batch], tokens or [base.tokens], contexts or [base.context]))
    if len(shapes) > base.max_shapes:
        raise UsageError(f"{len(shapes)} shapes were asked for, at most {base.max_shapes} may be: raise --max-shapes")
    if len(shapes) > 1 and base.dump_passes is not None:
        raise UsageError(
            f"--dump-passes holds the dumps of one shape, and {len(shapes)} were asked for: compile one at a time"
        )
    return [replace(base, batch=batch, tokens=count, context=context) for batch, count, context in shapes]


def parse_overrides(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """``FIELD=VALUE`` texts as pairs; a field given twice keeps its last value."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {text}: write FIELD=VALUE, such as --set num_hidden_layers=4")
        pairs[name.strip()] = value
    return tuple(pairs.items())
