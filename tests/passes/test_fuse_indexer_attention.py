"""Indexer and attention over pages: rows instead of positions, lists that layers share, numbers as they were."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.verifier import verify
from kimigraph.passes.base import PassContext
from kimigraph.passes.fuse_indexer_attention import FuseIndexerAttention

PAGE, PAGES, COUNT = 4, 3, 9
INDEXER, ATTENTION = (OPERATORS[name].overload for name in ("lightning_indexer", "sparse_attention"))


def tensors(paged: bool = True, latent_page: int = PAGE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    table = torch.randperm(COUNT, generator=generator)[: 2 * PAGES].to(torch.int32).view(2, PAGES)
    table[1, 0] = -1
    return {
        "q": new(2, 1, 2, 6),
        "latent": new(COUNT, latent_page, 6) if paged else new(2, 12, 6),
        "index_q": new(2, 1, 4, 8),
        "keys": new(COUNT, PAGE, 8) if paged else new(2, 12, 8),
        "weights": new(2, 1, 4),
        "lengths": torch.tensor([11, 7], dtype=torch.int32),
        "table": table,
        "other_table": table.clone(),
    }


class Pair:
    """A graph built call by call."""

    def __init__(self, **options: Any) -> None:
        self.tensors = tensors(**options)
        self.paged = options.get("paged", True)
        self.graph, fake = Graph(), FakeTensorMode()
        self.inputs: dict[str, Node] = {}
        for name, tensor in self.tensors.items():
            self.inputs[name] = self.graph.placeholder(name)
            self.inputs[name].meta["val"] = fake.from_tensor(tensor)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        infer(node)
        return node

    def picks(self) -> Node:
        table = self.inputs["table"] if self.paged else None
        operands = (self.inputs[name] for name in ("index_q", "keys", "weights", "lengths"))
        return self.call(INDEXER, *operands, None, k=5, scale=1.0, block_table=table, descriptor="")

    def attend(self, picks: Node, table: str = "table") -> Node:
        operands = (self.inputs["q"], None, self.inputs["latent"], None, picks)
        table_node = self.inputs[table] if self.paged else None
        node = self.call(ATTENTION, *operands, scale=0.3, block_table=table_node, descriptor="")
        return self.call(operator.getitem, node, 0)

    def fuse(self, *outputs: Node) -> tuple[CapturedProgram, list[str]]:
        """The program after the pass, and its messages; the outputs are those of before."""
        self.graph.output(tuple(outputs))
        module = GraphModule({}, self.graph)
        specs = tuple(
            InputSpec(name, "input", name, tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."))
            for name, x in self.tensors.items()
        )
        program = CapturedProgram(module, specs, tuple(OutputSpec(f"o{n}", "") for n in range(len(outputs))))
        wanted = module(*self.tensors.values())
        result = FuseIndexerAttention().apply(program, PassContext(CompileConfig()))
        verify(program)
        module.recompile()
        for found, want in zip(module(*self.tensors.values()), wanted, strict=True):
            assert torch.equal(found, want)
        return program, [remark.message for remark in result.remarks]


def operators(program: CapturedProgram, target: Any) -> list[Node]:
    return [node for node in program.graph_module.graph.nodes if node.target is target]


def test_the_indexer_lists_rows_and_the_table_is_read_once() -> None:
    pair = Pair()
    program, messages = pair.fuse(pair.attend(pair.picks()))
    (indexer,), (attention,) = operators(program, INDEXER), operators(program, ATTENTION)
    assert indexer.kwargs["rows"] is True and attention.kwargs["rows"] is True
    assert attention.kwargs["block_table"] is None and attention.args[4] is indexer
    assert len(messages) == 1 and messages[0].endswith("became sparse_attention")


def test_layers_that_share_a_list_are_changed_together() -> None:
    """One of them through casts, as public models hand picks on."""
    pair = Pair()
    picks = pair.picks()
    first = pair.attend(picks)
    wide = pair.call(torch.ops.aten._to_copy.default, picks, dtype=torch.int64)
    narrow = pair.call(torch.ops.aten._to_copy.default, wide, dtype=torch.int32)
    program, _ = pair.fuse(first, pair.attend(narrow))
    (indexer,), attentions = operators(program, INDEXER), operators(program, ATTENTION)
    assert [node.args[4] for node in attentions] == [indexer, indexer]
    assert not operators(program, torch.ops.aten._to_copy.default)


def test_contiguous_caches_share_the_buffer_and_need_no_rows() -> None:
    pair = Pair(paged=False)
    wide = pair.call(torch.ops.aten._to_copy.default, pair.picks(), dtype=torch.int64)
    program, _ = pair.fuse(pair.attend(pair.call(torch.ops.aten._to_copy.default, wide, dtype=torch.int32)))
    (indexer,), (attention,) = operators(program, INDEXER), operators(program, ATTENTION)
    assert attention.args[4] is indexer and "rows" not in {k for k, v in indexer.kwargs.items() if v}
    assert not operators(program, torch.ops.aten._to_copy.default)


def test_a_pair_that_shares_a_buffer_already_is_left_alone() -> None:
    pair = Pair(paged=False)
    _, messages = pair.fuse(pair.attend(pair.picks()))
    assert messages == []


def test_picks_that_are_positions_too() -> None:
    pair = Pair()
    picks = pair.picks()
    _, (message,) = pair.fuse(pair.attend(picks), pair.call(torch.ops.aten.gt.Scalar, picks, 3))
    assert "the picks are also used as positions, by gt" in message


def test_pages_of_another_table() -> None:
    pair = Pair()
    _, (message,) = pair.fuse(pair.attend(pair.picks(), "other_table"))
    assert "by different block tables" in message


def test_pages_of_another_size() -> None:
    pair = Pair(latent_page=8)
    _, (message,) = pair.fuse(pair.attend(pair.picks()))
    assert "pages hold 4 index keys and 8 latent rows" in message


def test_picks_expanded_from_pools_stay() -> None:
    pair = Pair(paged=False)
    picks = pair.picks()
    doubled = pair.call(torch.ops.aten.mul.Tensor, picks, 2)
    _, (message,) = pair.fuse(pair.attend(doubled))
    assert "the picks are expanded from pools of keys, which stays ATen" in message


@pytest.mark.parametrize("name", ["lightning_indexer", "sparse_attention"])
def test_rows_are_an_attribute_with_a_default(name: str) -> None:
    declared = {a.name: a.default_value for a in OPERATORS[name].overload._schema.arguments if a.has_default_value()}
    assert declared["rows"] is False
