"""Masks as atoms, integer expressions as affine forms, and masks that are lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.affine import affine
from kimigraph.passes.algebra.lengths import Length, length_of_mask, length_of_node, length_operand
from kimigraph.passes.algebra.masks import Sense, atoms, hides, is_mask, mask_step, missing
from kimigraph.passes.algebra.refusal import Refused

ATEN = torch.ops.aten
Trace = Callable[..., CapturedProgram]
B, S, T = 2, 3, 6


def results(program: CapturedProgram) -> list[Node]:
    return list(next(node for node in program.graph_module.graph.nodes if node.op == "output").args[0])


def kinds(node: Node, sense: Sense) -> list[str]:
    return sorted(atom.kind for atom in atoms(node, sense))


MASKED = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("spelling", "sense"),
    [
        (lambda c, p: c & p, "keep"),
        (lambda c, p: p & c, "keep"),
        (lambda c, p: ~(c & p), "drop"),
        (lambda c, p: ~c | ~p, "drop"),
        (lambda c, p: torch.logical_not(torch.logical_or(~c, ~p)), "keep"),
        (lambda c, p: torch.where(c & p, 0.0, float("-inf")), "add"),
        (lambda c, p: torch.where(c, 0.0, MASKED) + torch.where(p, 0.0, MASKED), "add"),
        (lambda c, p: torch.where(c, 0.0, MASKED).masked_fill(~p, MASKED), "add"),
        (lambda c, p: torch.where(~(c & p), MASKED, 0.0), "add"),
        (lambda c, p: torch.where(c & p, 0.0, torch.finfo(torch.bfloat16).min) > -1e30, "keep"),
        (lambda c, p: (c & p & torch.ones_like(c)).unsqueeze(1).squeeze(1), "keep"),
    ],
)
def test_every_spelling_is_the_same_conjunction(spelling: Callable[..., Tensor], sense: Sense, trace: Trace) -> None:
    def mask(index: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        causal = (torch.arange(T) <= length).expand(B, S, T)
        picked = torch.zeros(B, S, T, dtype=torch.bool).scatter(-1, index, True)
        return spelling(causal, picked), causal & picked

    program = trace(mask, torch.zeros(B, S, 2, dtype=torch.int64), torch.tensor(3))
    node, plain = results(program)
    assert kinds(node, sense) == ["compare", "picks"]
    found, wanted = atoms(node, sense), atoms(plain, "keep")
    if sense != "add" or len({atom.node for atom in found + wanted}) == 2:
        assert not missing(found, wanted) or len({atom.node for atom in found}) == 2
    assert is_mask(node)


def test_picks_marked_as_hidden(trace: Trace) -> None:
    def mask(index: Tensor) -> Tensor:
        return torch.ones(B, S, T, dtype=torch.bool).scatter(-1, index, False)

    (node,) = results(trace(lambda i: (mask(i),), torch.zeros(B, S, 2, dtype=torch.int64)))
    assert kinds(node, "drop") == ["picks"] and kinds(node, "keep") == ["keep"]


def test_counted_lists(trace: Trace) -> None:
    def mask(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.ones_like(index, dtype=torch.int32)
        counts = torch.zeros(B, S, T, dtype=torch.int32).scatter_add(-1, index, ones)
        return counts != 0, counts == 0, counts > 1

    several, none, more = results(trace(mask, torch.zeros(B, S, 2, dtype=torch.int64)))
    assert kinds(several, "keep") == ["counted"] and kinds(none, "drop") == ["counted"]
    assert kinds(several, "drop") != ["counted"] and kinds(more, "keep") != ["counted"]


def test_a_disjunction_is_no_conjunction(trace: Trace) -> None:
    (node,) = results(trace(lambda a, b: ((a > 0) | (b > 0),), torch.randn(4), torch.randn(4)))
    assert kinds(node, "keep") == ["keep"]


def test_small_penalties_do_not_hide(trace: Trace) -> None:
    assert hides(float("-inf")) and hides(torch.finfo(torch.bfloat16).min) and not hides(-100.0) and not hides(0.0)
    (node,) = results(trace(lambda a: (torch.where(a > 0, 0.0, -100.0),), torch.randn(4)))
    assert kinds(node, "add") == ["add"] and not is_mask(node)


def test_where_with_scores_below_the_mask_is_a_step_not_a_mask(trace: Trace) -> None:
    (node,) = results(trace(lambda a, s: (torch.where(a > 0, s, float("-inf")),), torch.randn(4), torch.randn(4)))
    ((score, term),) = mask_step(node)
    assert score.op == "placeholder" and term.sense == "keep"
    assert not is_mask(node)


def test_equal_conditions_of_other_shapes_are_equal(trace: Trace) -> None:
    def masks(length: Tensor) -> tuple[Tensor, Tensor]:
        causal = torch.arange(T) <= (length + torch.arange(S)).unsqueeze(-1)
        return causal.unsqueeze(0).unsqueeze(0).expand(B, 1, S, T), causal.expand(B, S, T)

    wide, narrow = results(trace(masks, torch.tensor(3)))
    assert not missing(atoms(wide, "keep"), atoms(narrow, "keep"))


# Affine forms and lengths ------------------------------------------------------------------------------------------


def test_an_affine_form_is_the_expression(trace: Trace) -> None:
    def expression(length: Tensor) -> Tensor:
        return (length.unsqueeze(1) + torch.arange(S) - 4).unsqueeze(-1)

    given = torch.tensor([7, 9])
    program = trace(lambda x: (expression(x),), given)
    form = affine(results(program)[0], results(program)[0])
    (symbol,) = form.symbols
    assert symbol.coefficient == 1 and symbol.node.op == "placeholder"
    assert torch.equal(form.known + given.reshape(-1)[symbol.elements], expression(given))


def test_a_symbol_minus_itself_vanishes(trace: Trace) -> None:
    program = trace(lambda x: ((x + 3) - x,), torch.tensor(2))
    form = affine(results(program)[0], results(program)[0])
    assert not form.symbols and int(form.known) == 3


def test_products_of_symbols_are_symbols_of_their_own(trace: Trace) -> None:
    program = trace(lambda x: (x * x + 1,), torch.tensor(2))
    (symbol,) = affine(results(program)[0], results(program)[0]).symbols
    assert symbol.node.target is ATEN.mul.Tensor


LENGTH_SPELLINGS: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (lambda n: torch.arange(T) <= n.view(-1, 1, 1) + torch.arange(S).view(S, 1), 1),
    (lambda n: torch.arange(T) < n.view(-1, 1, 1) + torch.arange(S).view(S, 1), 0),
    (lambda n: torch.arange(T) < (n + 1).view(-1, 1, 1) + torch.arange(S).view(S, 1), 1),
    (lambda n: n.view(-1, 1, 1) + torch.arange(S).view(S, 1) >= torch.arange(T), 1),
    (lambda n: n.view(-1, 1, 1) + torch.arange(S).view(S, 1) > torch.arange(T), 0),
    (lambda n: torch.arange(T) + 2 <= n.view(-1, 1, 1) + torch.arange(5, 5 + S).view(S, 1), 4),
    (lambda n: torch.arange(T).view(1, 1, T) <= (n.reshape(-1, 1) + torch.arange(S)).unsqueeze(-1), 1),
]


def placed(tensor: Tensor) -> Tensor:
    return tensor.broadcast_to(B, S, T)


def the_length(node: Node) -> Length:
    (atom,) = atoms(node, "keep")
    return length_of_mask(atom, placed, (B, S, T))


@pytest.mark.parametrize("lengths", [torch.tensor([2, 3]), torch.tensor([2, 3], dtype=torch.int32), torch.tensor(2)])
@pytest.mark.parametrize(("spelling", "offset"), LENGTH_SPELLINGS)
def test_masks_that_are_lengths(
    spelling: Callable[[Tensor], Tensor], offset: int, lengths: Tensor, trace: Trace, run: Callable[..., Any]
) -> None:
    """Checked against the mask itself: row s sees the first length + s keys."""
    program = trace(lambda n: (spelling(n),), lengths)
    found = the_length(results(program)[0])
    assert (found.offset, found.symbol.op if found.symbol else "") == (offset, "placeholder")
    mask = run(program, lengths)[0][0].broadcast_to(B, S, T)
    limit = (lengths + found.offset).reshape(-1, 1, 1) + torch.arange(S).view(1, S, 1)
    assert torch.equal(mask, (torch.arange(T) < limit).broadcast_to(B, S, T))


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        (lambda n: torch.arange(T) <= 2 * n.view(-1, 1, 1), "one length"),
        (lambda n: 2 * torch.arange(T) <= n.view(-1, 1, 1), "not a key position"),
        (lambda n: torch.arange(T).flip(0) <= n.view(-1, 1, 1), "not a key position"),
        (lambda n: torch.arange(0, 2 * T, 2) <= n.view(-1, 1, 1), "count keys one by one"),
        (lambda n: torch.arange(T) <= n.view(-1, 1, 1) + torch.arange(0, 2 * S, 2).view(S, 1), "count rows one by one"),
        (lambda n: torch.arange(T) <= n.view(-1, 1, 1).expand(B, S, 1), "count rows one by one"),
        (
            lambda n: torch.arange(T) <= n.view(-1, 1, 1) + n.view(-1, 1, 1) + torch.arange(S).view(S, 1),
            "one length plus",
        ),
        (lambda n: torch.arange(T) == n.view(-1, 1, 1), "no comparison"),
    ],
)
def test_masks_that_are_no_lengths(spelling: Callable[[Tensor], Tensor], reason: str, trace: Trace) -> None:
    program = trace(lambda n: (spelling(n),), torch.tensor([2, 3]))
    node = results(program)[0]
    atom = atoms(node, "keep")[0]
    with pytest.raises(Refused, match=reason if reason != "one length" else "one by one|one length|no key"):
        length_of_mask(atom, placed, (B, S, T))


def test_one_length_a_row_is_no_length_a_sequence(trace: Trace) -> None:
    """B = S: lengths along the rows must not pass for lengths along the sequences."""
    program = trace(lambda n: (torch.arange(T) <= n.view(1, -1, 1),), torch.tensor([2, 3]))
    (atom,) = atoms(results(program)[0], "keep")
    with pytest.raises(Refused):
        length_of_mask(atom, lambda t: t.broadcast_to(2, 2, T), (2, 2, T))


def test_the_length_is_made_before_the_counter_steps(trace: Trace) -> None:
    def step(counter: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(T) <= counter + torch.arange(S).view(S, 1)
        counter.add_(1)
        return mask, counter + 0

    program = trace(step, torch.tensor(2))
    graph = program.graph_module.graph
    node = results(program)[0]
    before = results(program)[1]
    length = the_length(node)
    made = length_operand(graph, length, B, before)
    writer = next(n for n in graph.nodes if n.target is ATEN.add_.Tensor)
    assert made < writer and made.args == (length.symbol, 1)
    assert length_operand(graph, length, B, before) is made, "the same length is made once"
    assert length_of_node(made, made).same_as(length, graph)


def test_lengths_read_around_a_step_differ(trace: Trace) -> None:
    def step(counter: Tensor) -> tuple[Tensor, Tensor]:
        early = torch.arange(T) <= counter + torch.arange(S).view(S, 1)
        counter.add_(1)
        return early, torch.arange(T) <= counter + torch.arange(S).view(S, 1)

    program = trace(step, torch.tensor(2))
    early, late = (the_length(node) for node in results(program))
    assert not early.same_as(late, program.graph_module.graph)
    assert early.same_as(early, program.graph_module.graph)


def test_a_fixed_limit_needs_no_symbol(trace: Trace) -> None:
    def fixed(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(T) <= torch.arange(S).view(S, 1), x + 1

    program = trace(fixed, torch.tensor(1))
    node, before = results(program)
    length = the_length(node)
    assert length.symbol is None and length.offset == 1
    made = length_operand(program.graph_module.graph, length, B, before)
    assert made.meta["val"].shape == () and not made.meta["val"].is_floating_point()
