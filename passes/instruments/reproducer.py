"""What a pass that fails leaves to repeat it: the graph that it got, in a script that runs the pass on it again."""

from kimigraph.ir.errors import NumericsError
from kimigraph.ir.printer import print_heading
from kimigraph.passes.base import Pass
from kimigraph.passes.options import print_pass

REPRODUCER = "reproducer.py"
_USAGE = """Runs the pass as installed now on the graph `before`; exits 1 when it fails and 0 when it does not.
`kimigraph reduce` with the options of the compilation writes one of a few nodes."""


def print_failure(before: str, item: Pass, error: Exception) -> str:
    """The script, made of the dump ``before`` the pass: the same tables and functions, another ``main``.

    It has the form of what ``kimigraph bisect`` writes for a crash, so that ``kimigraph.tools.replay`` reads both.
    """
    _, _, program = before.partition('\n"""\n')
    program, _, _ = program.partition('\n\n\nif __name__ == "__main__":')
    program = program.replace(
        "import constant, main, with_strides",
        "import constant, with_strides\nfrom kimigraph.tools.replay import main",
    )
    tables, mark, step = program.rpartition("\n\n\n@torch.no_grad()\ndef step(")
    kind = "numerics" if isinstance(error, NumericsError) else "crash"
    facts = [
        f"PASS = {print_pass(item)!r}",
        f"PASS_SOURCE = {f'{type(item).__module__}:{type(item).__qualname__}'!r}",
        f"FAILURE = {(kind, type(error).__name__)!r}",
        "DATA = None",
    ]
    heading = print_heading(
        f"Reproducer: pass '{item.name}' failed.", f"Failure: {type(error).__name__}: {error}", _USAGE
    )
    main = '\n\n\nif __name__ == "__main__":\n    main([__file__])\n'
    return heading + "\n" + tables + "\n" + "\n".join(facts) + mark.replace("step", "before") + step + main
