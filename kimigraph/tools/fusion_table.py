"""The table of ``docs/fusions.md``, out of what the passes declare about themselves."""

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.passes import Pass, default_pipeline
from kimigraph.passes.registry import BUILT_IN, default_registry

BEGIN = "<!-- table of passes: written by scripts/write_fusions.py -->"
END = "<!-- end of the table -->"
HEADINGS = ("rule", "pattern", "effect", "constraints", "level")


def fusion_table() -> str:
    """A Markdown table with a row for each built-in pass, in the order of the pipeline."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    rows += [_row(default_registry().load(name)) for name in BUILT_IN]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(page: str) -> str:
    """``page`` with the table between its two marks written anew."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the page has no place for the table: it needs the lines {BEGIN} and {END}")
    return f"{before}{begin}\n{fusion_table()}\n{end}{after}"


def _row(kind: type[Pass]) -> tuple[str, ...]:
    cells = (f"`{kind.name}`", kind.pattern, kind.effect, "; ".join(kind.constraints), _level(kind.name))
    return tuple(cell.replace("|", "\\|") for cell in cells)


def _level(name: str) -> str:
    """The first optimization level whose pipeline holds the pass."""
    levels = [level for level in range(4) if name in default_pipeline(CompileConfig(opt_level=level)).names]
    return f"`-O{levels[0]}` and up" if levels else "by `--passes` only"
