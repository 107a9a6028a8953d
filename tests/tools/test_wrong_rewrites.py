"""Wrong rewrites drawn at random: each is named, found and reduced, and its file fails with it and passes without."""

import random
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.tools.bisect import bisect_rewrites, find_failing_pass
from kimigraph.tools.numerics import CheckNumerics, PassNumericsError
from kimigraph.tools.reduce import reduce_program
from kimigraph.tools.reproducer import write_reproducer

KINDS = """dropped-scale swapped-operands wrong-axis epsilon dtype lost-mutation stale-read off-by-one-limit
dropped-activation one-pick-less wrong-offset wrong-part sign dropped-mask sum-for-mean wrong-weight""".split()
LAYERS = (0, 2, 3)
DRAWS = [(kind, layer, seed) for kind in KINDS for layer in LAYERS for seed in range(5)]
QUICK = random.Random(0).sample(DRAWS, 3)


def silent(message: str) -> None:
    del message


def exit_code(path: Path, *arguments: str) -> Any:
    """What the file exits with, run in this process."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.code


def test_the_table_is_the_one_drawn_from(wrong: ModuleType) -> None:
    assert list(wrong.WRONG) == KINDS


@pytest.mark.parametrize(
    ("kind", "layer", "seed"), [pytest.param(*draw, marks=[] if draw in QUICK else pytest.mark.slow) for draw in DRAWS]
)
def test_a_wrong_rewrite_is_found(
    kind: str,
    layer: int,
    seed: int,
    wrong: ModuleType,
    captured: CapturedProgram,
    canonical: CapturedProgram,
    config: CompileConfig,
    tmp_path: Path,
) -> None:
    at = random.Random(f"{kind} {layer} {seed}").choice(wrong.sites(canonical, kind, layer))
    pipeline = Pipeline((Canonicalize(), wrong.Commute(wrong=kind, at=at)))

    numerics = CheckNumerics()
    with pytest.raises(PassNumericsError, match=r"pass 2 'commute' changed the result"):
        run_pipeline(captured.copy(), pipeline, PassContext(config), [numerics], verify=False)
    assert [(row["pass"], row["passed"]) for row in numerics.table] == [
        ("capture", True), ("canonicalize", True), ("commute", False)
    ]  # fmt: skip

    failing = find_failing_pass(captured, pipeline, config, silent)
    assert failing is not None and failing.index == 2 and failing.item.name == "commute"
    found = bisect_rewrites(failing, captured, config, silent)
    assert found.rewrite.name == at and found.rewrite.alone and found.rewrite.count > 100

    least = reduce_program(failing, config, silent)
    assert len(least.failing.before.graph_module.graph.nodes) <= 15
    assert least.rewrite.name == at
    for name, bisection in (("bisect.py", found), ("reduce.py", least)):
        write_reproducer(tmp_path / name, bisection, {})
        assert exit_code(tmp_path / name) == 1
        assert exit_code(tmp_path / name, "--without-rewrite") == 0
