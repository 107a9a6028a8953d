"""Kernel files: what a template is asked for, shared files, headers, and operators that have no kernel."""

import ast
import re

import pytest
import torch

from kimigraph.codegen import build_artifact
from kimigraph.codegen.kernel import TensorSpec
from kimigraph.codegen.kernel_writer import build_kernels
from kimigraph.codegen.reference_writer import reference_text
from kimigraph.codegen.request import kernel_request, semantic_operator
from kimigraph.codegen.specialize import BUILDERS
from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators import OPERATORS


def semantic_nodes(program):
    return [node for node in program.graph_module.graph.nodes if semantic_operator(node)]


def two_layers(toolbox, scales=(0.25, 0.25)):
    """Two indexers over one key cache."""
    inputs = [toolbox.spec("q", (2, 1, 4, 16)), toolbox.spec("keys", (2, 8, 16)), toolbox.spec("weights", (2, 1, 4))]

    def build(graph, *nodes):
        found = []
        for layer, scale in enumerate(scales):
            found.append(toolbox.call(graph, "lightning_indexer", *nodes, k=3, scale=scale))
            found[-1].meta["replaces"] = (f"mm_{layer}", f"topk_{layer}")
            found[-1].meta["nn_module_stack"] = {"m": (f"model.layers.{layer}.indexer", "Indexer")}
        return found

    return toolbox.make_program(inputs, build)


def test_a_request_has_shapes_strides_and_defaults(toolbox):
    inputs = [
        toolbox.spec("q", (2, 1, 4, 16), stride=(64, 4, 1, 4), dtype="bfloat16"),
        toolbox.spec("keys", (2, 8, 16), dtype="bfloat16"),
        toolbox.spec("weights", (2, 1, 4)),
    ]

    def build(graph, *nodes):
        return [toolbox.call(graph, "lightning_indexer", *nodes, k=3, scale=0.5)]

    request = kernel_request(semantic_nodes(toolbox.make_program(inputs, build))[0])
    assert request.op == "lightning_indexer"
    assert list(request.tensors) == ["q", "keys", "weights", "lengths", "mask", "block_table", "q_scales"]
    assert request.tensors["q"] == TensorSpec((2, 1, 4, 16), (64, 4, 1, 4), "bfloat16")
    assert request.tensors["lengths"] is None
    assert request.attributes == {"k": 3, "scale": 0.5, "rows": False, "quantises_q": False, "descriptor": ""}


def test_equal_layers_share_a_file(toolbox, artifact_directory):
    manifest = build_artifact(two_layers(toolbox), "cpu", artifact_directory)
    assert [path.name for path in (artifact_directory / "kernels").glob("*.py")] == ["lightning_indexer_0.py"]
    assert [kernel.file for kernel in manifest.kernels] == ["kernels/lightning_indexer_0.py"] * 2
    assert [kernel.replaces for kernel in manifest.kernels] == [("mm_0", "topk_0"), ("mm_1", "topk_1")]


def test_layers_that_differ_have_files_of_their_own(toolbox, artifact_directory):
    manifest = build_artifact(two_layers(toolbox, (0.25, 0.5)), "cpu", artifact_directory)
    assert [kernel.file for kernel in manifest.kernels] == [f"kernels/lightning_indexer_{n}.py" for n in (0, 1)]


def test_the_header_says_what_the_kernel_stands_for_and_costs(toolbox, artifact_directory):
    manifest = build_artifact(two_layers(toolbox), "cpu", artifact_directory)
    header = ast.get_docstring(ast.parse((artifact_directory / manifest.kernels[0].file).read_text()))
    cost = manifest.kernels[0]
    assert f"{cost.bytes:,} bytes and {cost.flops:,} FLOPs" in header
    assert cost.bytes >= 4 * (2 * 4 * 16 + 2 * 8 * 16)
    for name in ("mm_0", "topk_1", "model.layers.1.indexer"):
        assert name in header


def test_kernel_files_import_torch_and_triton_alone(programs, artifact_directory):
    for name in ("lightning_indexer", "sparse_attention", "kda_decode"):
        for file in build_kernels(programs[name]().graph_module.graph, "cpu").files:
            modules = re.findall(r"^(?:from|import) (\w+)", file.text(), re.MULTILINE)
            assert set(modules) <= {"typing", "torch", "triton", "math", "os"}, name


@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda:sm_90"])
def test_an_operator_without_kernel_names_the_way_out(toolbox, target, artifact_directory, monkeypatch):
    monkeypatch.delitem(BUILDERS, "short_conv")
    inputs = [toolbox.spec("x", (2, 4, 8)), toolbox.spec("weight", (8, 3))]
    program = toolbox.make_program(inputs, lambda graph, *nodes: [nodes[0]])
    graph = program.graph_module.graph
    nodes = list(program.placeholders.values())
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        node = graph.call_function(OPERATORS["short_conv"].overload, tuple(nodes))
    node.meta["val"] = nodes[0].meta["val"]
    with pytest.raises(CompileError, match=r"short_conv has no kernel yet.*--target cpu:reference"):
        build_artifact(program, target, artifact_directory, self_test=False)
    assert list(artifact_directory.iterdir()) == []


def test_references_combine_into_one_module_without_kimigraph():
    """All of them at once: no name twice, no import of kimigraph, and each computes what the operator does."""
    text = reference_text(OPERATORS)
    assert not re.search(r"^\s*(from|import) kimigraph", text, re.MULTILINE)
    namespace: dict = {}
    exec(compile(text, "reference.py", "exec"), namespace)
    assert set(OPERATORS) <= set(namespace)
    torch.manual_seed(0)
    q, keys, weights = torch.randn(1, 1, 2, 4), torch.randn(1, 9, 4), torch.randn(1, 1, 2)
    found = namespace["lightning_indexer"](q, keys, weights, k=3, scale=0.5)
    scores = torch.einsum("bsh,bsht->bst", weights, (torch.einsum("bshd,btd->bsht", q, keys) * 0.5).relu())
    assert found.tolist() == scores.topk(3).indices.sort().values.tolist()


def test_two_references_with_one_name_are_refused(monkeypatch):
    texts = {"left": "def helper():\n    return 1\n", "right": "def helper():\n    return 2\n"}
    monkeypatch.setattr("kimigraph.codegen.reference_writer._source", texts.__getitem__)
    with pytest.raises(CompileError, match="both define helper"):
        reference_text(["left", "right"])
