"""``python -m kimigraph.tools.replay FILE``: the pass of a reproducer, as installed now, on the reproducer's graph."""

import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.errors import KimigraphError, UsageError
from kimigraph.ir.reader import read_program
from kimigraph.passes import PassRegistry, Pipeline
from kimigraph.tools.failure import Failure, run_pass
from kimigraph.tools.numerics import Reference


def replay(path: Path) -> Failure | None:
    """Run the pass that the reproducer ``path`` names on its ``before``; what is wrong with the result, or None.

    UsageError when the file is no reproducer or the pass cannot be imported.
    """
    facts = run_path(str(path))
    if "PASS" not in facts or "before" not in facts:
        raise UsageError(f"{path} is no reproducer: it has no PASS and no function `before`.")
    name = facts["PASS"].partition("{")[0]
    (item,) = Pipeline.parse(facts["PASS"], PassRegistry({name: facts["PASS_SOURCE"]}))
    program = read_program(facts["before"], facts["INPUTS"], facts["OUTPUTS"], facts["CONSTANTS"])
    every = data_sets() if facts["FAILURE"][0] == "numerics" else data_sets()[:1]
    sets = [facts["DATA"]] if facts["DATA"] is not None else every
    return run_pass(item, program, CompileConfig(), Reference(program, sets)).failure


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay the file that the arguments name; exit 1 when the pass fails, 0 when it does not, 2 on wrong usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1:
        raise SystemExit("usage: python -m kimigraph.tools.replay FILE")
    try:
        failure = replay(Path(given[0]))
    except KimigraphError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    print(f"FAILS ({failure.kind}): {failure.message}" if failure else "same result")
    raise SystemExit(1 if failure else 0)


if __name__ == "__main__":
    main()
