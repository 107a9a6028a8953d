"""The one Python file that ``bisect`` and ``reduce`` write: it shows a failure again, and its absence."""

import textwrap
from pathlib import Path

from kimigraph.ir.printer import PRINTED_IMPORTS, print_functions, print_heading, print_tables
from kimigraph.passes.options import print_pass
from kimigraph.tools.bisect import Bisection

_WIDTH = 120
_USAGE = """Exits 1 when the failure shows and 0 when not. --without-rewrite runs the graph as it is when the pass
leaves the wrong rewrite out; --diff prints what the pass changed. `python -m kimigraph.tools.replay FILE` runs
the pass as installed now on `before`, and exits 0 once it is right."""
_CRASH_USAGE = (
    "Runs the pass as installed now on `before`; exits 1 when it fails in the same way and 0 when it does not fail."
)
_MAIN = """if __name__ == "__main__":
    main(before, after, without, INPUTS, OUTPUTS, CONSTANTS, DATA, TOLERANCES)
"""
_CRASH_MAIN = """if __name__ == "__main__":
    main([__file__])
"""


def print_reproducer(found: Bisection, tolerances: dict[str, float]) -> str:
    """The file's text. ``tolerances`` by tensor where they are not those of fp32."""
    failing, failure = found.failing, found.failing.failure
    recorded = failure.kind == "numerics" and found.after is not None
    where = "kimigraph.ir.reproduce" if recorded else "kimigraph.tools.replay"
    heading = print_heading(
        f"Reproducer: pass '{failing.item.name}' {_verb(failure.kind)}.",
        _filled(f"Pass: {print_pass(failing.item)}"),
        _filled(f"Rewrite: {_rewrite(found)}"),
        _filled(f"Failure: {failure.message}"),
        _USAGE if recorded else _CRASH_USAGE,
    )
    imports = PRINTED_IMPORTS.replace(
        "from kimigraph.ir.program", "from kimigraph.ir.data_sets import DataSet\nfrom kimigraph.ir.program"
    ).replace("import constant, main, with_strides", f"import constant, with_strides\nfrom {where} import main")
    without = found.without or failing.before
    forms = [failing.before, found.after, without] if recorded and found.after is not None else [failing.before]
    names = ("before", "the graph that the pass gets"), ("after", "what it makes of it"), ("without", _without(found))
    functions = [
        print_functions(form, name, f"{title[0].upper()}{title[1:]}.")
        for form, (name, title) in zip(forms, names, strict=False)
    ]
    return "\n\n\n".join(
        [
            f"{heading}\n\n{imports}",
            print_tables(forms[0], *forms[1:]) + "\n" + _facts(found, tolerances),
            *functions,
            _MAIN if recorded else _CRASH_MAIN,
        ]
    )


def write_reproducer(path: Path, found: Bisection, tolerances: dict[str, float]) -> None:
    """Write the file beside its name first, then rename it."""
    staged = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged.write_text(print_reproducer(found, tolerances), encoding="utf-8")
    staged.replace(path)


def _facts(found: Bisection, tolerances: dict[str, float]) -> str:
    """What the file knows besides graphs: the pass and where it comes from, the kind of failure, the data."""
    kind, failure = type(found.failing.item), found.failing.failure
    return "\n".join(
        [
            f"PASS = {print_pass(found.failing.item)!r}",
            f"PASS_SOURCE = {f'{kind.__module__}:{kind.__qualname__}'!r}",
            f"FAILURE = {(failure.kind, failure.error)!r}",
            f"DATA = {failure.data!r}",
            f"TOLERANCES = {tolerances!r}",
        ]
    )


def _rewrite(found: Bisection) -> str:
    rewrite = found.rewrite
    return f"{rewrite.number} of {rewrite.count}: {rewrite.name}" if rewrite.number else rewrite.name


def _without(found: Bisection) -> str:
    if found.without is not None:
        return f"what the pass makes without rewrite {found.rewrite.number}"
    if not found.rewrite.number:
        return "the graph before the pass, whose rewrites cannot be left out one by one"
    return f"the graph before the pass: without rewrite {found.rewrite.number} alone, its results still differ"


def _verb(kind: str) -> str:
    return {"numerics": "changes the result", "crash": "crashes", "invalid": "leaves an invalid graph"}[kind]


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)
