"""Pictures of a program at three distances: which boxes there are, what stands in them, what is joined."""

import re
from pathlib import Path
from typing import Any

import pytest

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.launches import launches_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.report.picture import Arrow, Box, Picture, Zoom, draw
from kimigraph.report.picture_text import as_dot, as_mermaid
from kimigraph.session import pass_context

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")


@pytest.fixture(scope="module")
def program() -> CapturedProgram:
    config = CompileConfig(target="cpu:reference", context=32, overrides=(("num_hidden_layers", "4"),))
    captured = capture(load_source(EXAMPLE, config), config, weights=False)
    run_pipeline(captured, default_pipeline(config), pass_context(config), [])
    return captured


def boxes(picture: Picture) -> dict[str, Box]:
    found = {box.name: box for box in picture.boxes}
    assert len(found) == len(picture.boxes)
    for arrow in picture.arrows:
        assert arrow.source in found and arrow.target in found and arrow.source != arrow.target
    return found


def test_the_model_is_its_layers_with_their_states(program: CapturedProgram) -> None:
    picture = draw(program, "model")
    found = boxes(picture)
    layers = [f"layer {number}" for number in range(4)]
    assert set(layers) <= set(found) and {"input_ids", "lengths", "output"} <= set(found)
    assert "kda_decode" in found["layer 0"].lines and "lightning_indexer" not in found["layer 0"].lines
    assert {"lightning_indexer", "sparse_attention", "moe_experts"} <= set(found["layer 3"].lines)
    assert found["states of layer 3"] == Box("states of layer 3", ("states of layer 3", "3 tensors"), "state")
    joined = {(arrow.source, arrow.target): arrow.far for arrow in picture.arrows}
    assert not joined["layer 0", "layer 1"] and joined["layer 0", "layer 3"]  # the latter passes over two layers
    joined = joined.keys()
    assert {("input_ids", "layer 0"), ("layer 0", "layer 1"), ("states of layer 3", "layer 3")} <= joined
    assert ("states of layer 3", "layer 0") not in joined


def test_a_layer_is_its_modules(program: CapturedProgram) -> None:
    found = boxes(draw(program, "layer", 3))
    assert {"layer 3: self_attn", "layer 3: block_sparse_moe", "lengths", "cache.3.latent"} <= set(found)
    assert not any("layer 0" in name or "state.0" in name for name in found)
    assert "sparse_attention" in found["layer 3: self_attn"].lines
    assert found["layer 3: self_attn"].frame == "layer 3"
    assert found["cache.3.latent"].lines[1] == "float32[1, 32, 32]"
    with pytest.raises(UsageError, match="--layer 7: the program has layers 0, 1, 2, 3"):
        draw(program, "layer", 7)


def test_kernels_are_what_is_launched(program: CapturedProgram) -> None:
    graph = program.graph_module.graph
    launched = {node.name for node in graph.nodes if launches_of(node)}
    found = boxes(draw(program, "kernel", costs=dict.fromkeys(launched, 2e-6)))
    drawn = {name for name, box in found.items() if box.kind in ("operator", "region", "call")}
    assert drawn == launched
    indexer = next(box for box in found.values() if "lightning_indexer" in box.name)
    assert indexer.kind == "operator" and indexer.lines[-1] == "2.00 us" and indexer.frame == "layer 3"
    joined = {(arrow.source, arrow.target) for arrow in draw(program, "kernel").arrows}
    attention = next(name for name in found if "sparse_attention" in name)
    assert (indexer.name, attention) in joined and ("cache.3.index_key", indexer.name) in joined


@pytest.mark.parametrize("zoom", ["model", "layer", "kernel"])
def test_both_texts_hold_every_box_and_arrow(zoom: Zoom, program: CapturedProgram) -> None:
    picture = draw(program, zoom)
    dot, mermaid = as_dot(picture), as_mermaid(picture)
    strings = r'"(?:[^"\\\\]|\\\\.)*"'
    assert len(re.findall(rf"^ +{strings} \[label=", dot, re.M)) == len(picture.boxes)
    assert len(re.findall(rf"^  {strings} -> {strings}", dot, re.M)) == len(picture.arrows)
    assert dot.count("{") == dot.count("}") and dot.count("subgraph") == len({b.frame for b in picture.boxes} - {""})
    assert len(re.findall(r"^ +n\d+\[.*\]:::\w+$", mermaid, re.M)) == len(picture.boxes)
    assert len(re.findall(r"^  n\d+ -\.?->", mermaid, re.M)) == len(picture.arrows)
    assert mermaid.count("subgraph") == len(re.findall(r"^  end$", mermaid, re.M))


def test_names_that_mean_something_to_a_renderer_are_quoted() -> None:
    odd = 'a"]; x -> y <b> #1'
    picture = Picture(odd, (Box(odd, (odd, "two"), "state", odd), Box("b", ("b",), "call")), (Arrow(odd, "b", odd),))
    dot, mermaid = as_dot(picture), as_mermaid(picture)
    assert dot.count('\\"]; x') == 5 and 'a"]' not in dot
    assert "<b>a&quot;]; x -&gt; y &lt;b&gt; #1</b><br/>two" in dot
    assert mermaid.count("<b>") == 1 and 'a"]' not in mermaid
    assert mermaid.count("#quot;]; x -#gt; y #lt;b#gt; #35;1") == 4
    # Mermaid reads "call" alone as the begin of a callback, and refuses the whole picture.
    assert "classDef call_box" in mermaid and ":::call_box" in mermaid


def test_the_command_writes_a_file_or_prints(tmp_path: Path, capsys: Any) -> None:
    from typer.testing import CliRunner

    from kimigraph.cli.app import make_app

    common = [EXAMPLE, "--context", "32", "--set", "num_hidden_layers=1", "--target", "cpu:reference"]
    done = CliRunner().invoke(make_app(), ["export", "mermaid", *common, "--zoom", "model"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("---\ntitle: k31_tiny decode-b1-t1-c32, by model\n---\nflowchart TD\n")
    out = tmp_path / "graph.dot"
    done = CliRunner().invoke(make_app(), ["export", "dot", *common, "-O", "0", "--zoom", "kernel", "--out", str(out)])
    assert done.exit_code == 0 and done.stdout == "", done.stderr
    assert out.read_text().startswith("digraph program {") and "kimigraph" not in out.read_text()
