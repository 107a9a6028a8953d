"""Every reason that a rule can give has a remedy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimigraph.passes.algebra.remedies import REMEDIES, remedy_for

PASSES = Path(__file__).parents[2] / "passes"


def words(node: ast.expr) -> str:
    """The text of a literal or an f-string, with ``1`` for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), ast.unparse(node)
    return "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)


def reasons() -> Iterator[tuple[str, str]]:
    """(place, words) of every refusal written in the passes."""
    for path in sorted(PASSES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id == "reason"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused":
                reason = node.args[0]
                if isinstance(reason, ast.Name) and reason.id in named:
                    reason = named[reason.id]
                if not isinstance(reason, ast.Attribute):  # handed on from another refusal
                    yield f"{path.name}:{node.lineno}", words(reason)


REASONS = list(reasons())


def test_refusals_are_found_in_the_source() -> None:
    assert len(REASONS) > 60


@pytest.mark.parametrize(("place", "reason"), REASONS, ids=[place for place, _ in REASONS])
def test_a_reason_has_a_remedy(place: str, reason: str) -> None:
    assert remedy_for(reason), f"{place}: '{reason}' is in no row of passes/algebra/remedies.py"


def test_no_row_is_idle() -> None:
    """A row that answers no reason is out of date. What a pattern expected is not written out in the source."""
    texts = [*(reason for _, reason in REASONS), "expected relu, found aten.sigmoid", "expected mul, found aten.add"]
    texts += ["expected a positive factor instead of -0.5, found aten.mul"]
    used = {remedy_for(text) for text in texts}
    idle = [pattern for pattern, remedy in REMEDIES if "{" not in remedy and remedy not in used]
    assert idle == []


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("the intermediate relu_1 is used elsewhere, by output", "compute what output needs without relu_1"),
        ("expected relu, found aten.sigmoid", "put relu between"),
        ("weight and latent differ in type", "--dtype"),
        ("the values of the top-k are used", "use the indices alone"),
        ("the query is float64, wanted bfloat16", "use one of the types named"),
    ],
)
def test_the_remedy_is_that_of_the_reason(reason: str, part: str) -> None:
    assert part in remedy_for(reason)
