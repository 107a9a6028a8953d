"""The prolog of an indexer: its branches, their prices, what keeps them apart, and the same results in every form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from kimigraph.bench.indexer_prolog import K31, captured_layer, forms
from kimigraph.ir.branches import branch_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.dependences import Dependences
from kimigraph.ir.device import target_device
from kimigraph.ir.errors import UsageError
from kimigraph.ir.launches import launches_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import region_module
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.schedule import stream_of
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, default_pipeline, run_pipeline
from kimigraph.passes.prolog.branches import KEY, QUERY, WEIGHTS, Prolog, PrologFinder
from kimigraph.passes.split_indexer_prolog import SplitIndexerProlog

TOY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
}
CONFIG = CompileConfig(target="cuda:sm_90", context=64)


@pytest.fixture(scope="module", params=["none", "half_split"])
def layer(request: pytest.FixtureRequest) -> CapturedProgram:
    """One DSA layer at toy width; rotated index keys share angles with the query."""
    return captured_layer(1, CONFIG, "cpu", {**K31, **TOY, "index_rope": request.param})


def split(program: CapturedProgram, config: CompileConfig = CONFIG, **options: Any) -> PassResult:
    return SplitIndexerProlog(**options).apply(program, PassContext(config))


def found(program: CapturedProgram) -> Prolog:
    finder = PrologFinder(program.graph_module.graph)
    return finder.find(next(finder.indexers()))


def weights(nodes: Sequence[Node]) -> set[str]:
    """The last words of the weights that the nodes multiply."""
    operands = {argument for node in nodes for argument in node.all_input_nodes if argument.op == "placeholder"}
    return {
        node.name.removesuffix("_weight").rpartition("self_attn_")[2] for node in operands if "proj" in node.name
    } | {
        "wq_b" if "wq_b" in node.name else "wk"
        for node in operands
        if "indexer_w" in node.name and "proj" not in node.name
    }


def test_the_branches_are_query_index_key_and_what_needs_the_input_alone(layer: CapturedProgram) -> None:
    branches = found(layer).branches
    assert list(branches) == [QUERY, KEY, WEIGHTS]
    assert weights(branches[QUERY]) == {"q_a_proj", "q_b_proj", "wq_b", "kv_b_proj"} or weights(branches[QUERY]) == {
        "q_a_proj",
        "q_b_proj",
        "wq_b",
    }
    assert weights(branches[KEY]) == {"wk"}
    assert weights(branches[WEIGHTS]) == {"indexer_weights_proj", "g_proj", "kv_a_proj_with_mqa"}
    assert any("index_key_write" in str(node.target) for node in branches[KEY])


def test_no_branch_waits_for_another(layer: CapturedProgram) -> None:
    program = layer.copy()
    split(program, form="split")
    verify(program)
    dependences = Dependences(program.graph_module.graph)
    marked = [node for node in program.graph_module.graph.nodes if branch_of(node) and "input" not in branch_of(node)]
    assert len({branch_of(node) for node in marked}) == 3
    for first in marked:
        for second in marked:
            assert branch_of(first) == branch_of(second) or not dependences.precedes(first, second)


def test_no_kernel_holds_two_branches(layer: CapturedProgram) -> None:
    program = layer.copy()
    text = str(default_pipeline(CONFIG))
    after = text[text.index("split-indexer-prolog") :].replace(
        "split-indexer-prolog", "split-indexer-prolog{form=split}"
    )
    config = replace(CONFIG, passes=after)
    run_pipeline(program, default_pipeline(config), PassContext(config))
    regions = [region_module(node) for node in program.graph_module.graph.nodes if node.op == "call_module"]
    inside = [{branch_of(node) for node in child.graph.nodes} - {""} for child in regions if child is not None]
    assert inside and all(len(branches) <= 1 for branches in inside)
    assert any(len(branches) == 1 for branches in inside)
    streams = {branch_of(node): stream_of(node) for node in program.graph_module.graph.nodes if launches_of(node)}
    assert len(set(streams.values())) >= 2


@pytest.mark.parametrize("batch", [1, 16])
def test_every_form_computes_the_same(batch: int) -> None:
    config = replace(CONFIG, batch=batch)
    program = captured_layer(batch, config, "cpu", {**K31, **TOY, "dtype": "float32"})
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name, form in forms(program, config).items():
        generator = torch.Generator().manual_seed(3)
        named = {spec.source: _value(spec.shape, spec.dtype, generator) for spec in program.inputs if not spec.bound}
        given = [
            form.tensors[spec.name]
            if spec.bound
            else named.setdefault(spec.source, _value(spec.shape, spec.dtype, generator))
            for spec in form.inputs
        ]
        form.graph_module.recompile()
        with torch.no_grad():
            outputs = form.graph_module(*given)
        results[name] = {spec.source: value.clone() for spec, value in zip(form.outputs, outputs, strict=True)}
        results[name] |= {spec.source: named[spec.source] for spec in form.inputs if spec.mutated}
    serial = results.pop("serial")
    assert len(serial) >= 6
    for name, values in results.items():
        assert values.keys() == serial.keys(), name
        for source, value in values.items():
            torch.testing.assert_close(value, serial[source], rtol=1e-5, atol=1e-5, msg=f"{name}: {source}")


def _value(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    if dtype.startswith("int"):
        return torch.full(shape, 40, dtype=getattr(torch, dtype))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def test_prices_decide_and_a_remark_says_why(layer: CapturedProgram) -> None:
    device = target_device("cuda")
    told = split(layer.copy()).remarks[0]
    assert told.kind == "missed" and "us merged" in told.message and "us as three branches on 3 streams" in told.message
    assert told.remedy.startswith("split-indexer-prolog{form=split}")
    slow_events = replace(CONFIG, device=replace(device, event_seconds=1e-5).text())
    assert "merging wins over three branches" in split(layer.copy(), slow_events).remarks[0].message
    assert "one stream to run on" in split(layer.copy(), replace(CONFIG, streams=1)).remarks[0].message
    assert "as asked for" in split(layer.copy(), form="merge").remarks[0].message


def test_branches_win_where_nothing_can_merge(layer: CapturedProgram) -> None:
    """Without the passes that merge, three branches and a fork of what is left are the same: the least gain decides."""
    config = replace(CONFIG, disabled_passes=("merge-horizontal", "merge-regions"))
    wins = split(layer.copy(), config, least_gain_us=-1.0)
    assert wins.modified and wins.statistics["split"] == 1
    assert wins.remarks[0].kind == "passed" and "three branches win (query:" in wins.remarks[0].message
    assert not split(layer.copy(), config, least_gain_us=1.0).modified


def test_the_program_stays_where_branches_lose(layer: CapturedProgram) -> None:
    program = layer.copy()
    before = [node.name for node in program.graph_module.graph.nodes]
    assert not split(program, form="merge").modified
    assert [node.name for node in program.graph_module.graph.nodes] == before
    assert not any(branch_of(node) for node in program.graph_module.graph.nodes)


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(UsageError, match="choose one of auto, split, merge"):
        SplitIndexerProlog(form="both")


def test_an_indexer_of_given_keys_has_no_prolog(layer: CapturedProgram) -> None:
    """Where nothing writes the keys in this step there is no branch for them."""
    program = layer.copy()
    graph = program.graph_module.graph
    write = next(node for node in graph.nodes if "index_key_write" in str(node.target))
    graph.erase_node(write)
    result = split(program, form="split")
    assert not result.modified and "nothing prepares it" in result.remarks[0].message and result.remarks[0].remedy
