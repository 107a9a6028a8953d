"""program.py: it runs without kimigraph, its text is a function of the graph, and a reader finds the graph in it."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kimigraph.codegen import build_artifact
from kimigraph.codegen.kernel_writer import build_kernels
from kimigraph.codegen.program_writer import ProgramTitle, program_text
from kimigraph.codegen.self_test import reference_checksums
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.manifest import verify_artifact
from kimigraph.ir.regions import extract_region
from kimigraph.ir.seeded import same_checksum, seeded_tensor

GOLDEN = Path(__file__).with_name("linear_program.py.expected")
NAMES = ("lightning_indexer", "sparse_attention", "kda_decode", "linear")


def parse(text: str) -> dict[str, list[float]]:
    """Checksums by name from a program's output."""
    rows = (line.rsplit(" ", 3) for line in text.splitlines())
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


def text_of(program, target="cpu:reference") -> str:
    return program_text(
        program, build_kernels(program.graph_module.graph, target), ProgramTitle("toy", "decode", "B2", target)
    )


@pytest.mark.parametrize("name", NAMES)
def test_reference_program_prints_the_checksums_of_its_manifest(name, programs, artifact_directory, run_script):
    manifest = build_artifact(programs[name](), "cpu:reference", artifact_directory, seed=3)
    result = run_script(artifact_directory)
    assert result.returncode == 0, result.stderr
    found = parse(result.stdout)
    assert list(found) == list(manifest.checksums)
    mutated = [spec.source for spec in manifest.inputs if spec.mutated]
    assert list(found)[len(manifest.outputs) :] == mutated
    for key, wanted in manifest.checksums.items():
        assert wanted[1] > 0, f"{key} is all zeros: the comparison could not fail"
        assert same_checksum(found[key], wanted, 1e-5), key


@pytest.mark.parametrize("name", NAMES[:3])
def test_interpreted_kernels_print_the_checksums_of_the_references(name, programs, artifact_directory, run_script):
    """The kernels run in a process without kimigraph, so no reference can stand in for them."""
    manifest = build_artifact(programs[name](), "cpu", artifact_directory)
    assert not (artifact_directory / "kernels" / "reference.py").exists()
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr
    assert list(parse(result.stdout)) == list(manifest.checksums)


def test_a_path_may_hold_bytes_that_are_no_text(programs, tmp_path, run_script):
    directory = tmp_path / os.fsdecode(b"caf\xe9 \xff")
    directory.mkdir()
    manifest = build_artifact(programs["lightning_indexer"](), "cpu", directory)
    verify_artifact(directory)
    result = run_script(directory, "--check")
    assert result.returncode == 0, result.stderr
    assert list(parse(result.stdout)) == list(manifest.checksums)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_a_cuda_program_says_that_there_is_no_gpu(programs, artifact_directory, run_script):
    build_artifact(programs["linear"](), "cuda", artifact_directory)
    result = run_script(artifact_directory)
    assert result.returncode == 1
    assert "finds no CUDA device" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_tells_a_wrong_result(programs, artifact_directory, run_script):
    build_artifact(programs["linear"](), "cpu:reference", artifact_directory)
    program = artifact_directory / "program.py"
    program.write_text(program.read_text().replace("aten.add.Tensor", "aten.sub.Tensor"))
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 3
    assert "maximum_default" in result.stderr


def test_weights_come_from_a_directory(programs, artifact_directory, run_script, tmp_path):
    program = programs["linear"]()
    build_artifact(program, "cpu:reference", artifact_directory, seed=1)
    weight = torch.eye(4) * 2
    (tmp_path / "weights").mkdir()
    save_file({"weight": weight, "unused": torch.ones(1)}, tmp_path / "weights" / "model.safetensors")
    result = run_script(artifact_directory, "--weights", str(tmp_path / "weights"))
    assert result.returncode == 0, result.stderr
    x, shift = seeded_tensor("x", (2, 4), torch.float32, seed=1), torch.arange(4.0)
    wanted = ((x @ weight + shift) @ weight + shift).double()
    assert parse(result.stdout)["maximum_default"][0] == pytest.approx(wanted.sum().item(), rel=1e-5)


def test_a_missing_weight_is_named(programs, artifact_directory, run_script, tmp_path):
    build_artifact(programs["linear"](), "cpu:reference", artifact_directory)
    (tmp_path / "weights").mkdir()
    save_file({"other": torch.ones(1)}, tmp_path / "weights" / "model.safetensors")
    result = run_script(artifact_directory, "--weights", str(tmp_path / "weights"))
    assert result.returncode == 1
    assert "lacks 1 weights of the program, weight among them" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_text_is_the_same_for_the_same_graph(programs, tmp_path):
    texts = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        build_artifact(programs["kda_decode"](), "cpu", directory, self_test=False)
        files = sorted(path for path in directory.rglob("*.py"))
        texts.append([(path.relative_to(directory), path.read_text()) for path in files])
    assert texts[0] == texts[1]
    assert all("/somewhere" not in text and str(tmp_path) not in text for _, text in texts[0])


def test_golden_program(programs):
    assert text_of(programs["linear"]()) == GOLDEN.read_text()


def test_a_variable_never_hides_a_name_of_the_program(toolbox, artifact_directory, run_script):
    inputs = [toolbox.spec("step", (3,)), toolbox.spec("aten", (3,))]

    def build(graph, left, right):
        total = graph.create_node("call_function", torch.ops.aten.add.Tensor, (left, right), {}, name="kernels")
        return [graph.create_node("call_function", torch.ops.aten.mul.Tensor, (total, total), {}, name="load")]

    manifest = build_artifact(toolbox.make_program(inputs, build), "cpu:reference", artifact_directory)
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr
    wanted = (seeded_tensor("step", (3,), torch.float32) + seeded_tensor("aten", (3,), torch.float32)).square()
    assert parse(result.stdout)["load"][0] == pytest.approx(wanted.sum().item(), rel=1e-5)
    assert manifest.outputs[0].name == "load"


def test_tensors_of_the_graph_module_are_constants(toolbox, artifact_directory, run_script):
    program = toolbox.make_program(
        [toolbox.spec("x", (2,))], lambda graph, x: [graph.call_function(torch.ops.aten.neg.default, (x,))]
    )
    graph, module = program.graph_module.graph, program.graph_module
    module.register_buffer("table", torch.tensor([3.0, 5.0]))
    negated = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(negated):
        table = graph.get_attr("table")
    negated.target, negated.args = torch.ops.aten.mul.Tensor, (negated.args[0], table)
    for node in (table, negated):
        infer(node)
    manifest = build_artifact(program, "cpu:reference", artifact_directory)
    assert "constants.bin" in {record.path for record in manifest.files}
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr
    wanted = seeded_tensor("x", (2,), torch.float32) * torch.tensor([3.0, 5.0])
    assert parse(result.stdout)["neg_default"][0] == pytest.approx(wanted.sum().item(), rel=1e-5)


def test_devices_of_the_capture_become_that_of_the_target(programs):
    assert 'DEVICE = torch.device("cuda")' in text_of(programs["linear"](), "cuda")
    assert "device=DEVICE" in text_of(programs["linear"](), "cuda")
    assert "device('cpu')" not in text_of(programs["linear"](), "cuda")


def test_modules_are_named_where_they_change_and_dead_variables_freed(programs):
    lines = [line.strip() for line in text_of(programs["linear"]()).splitlines()]
    assert lines.count("# layers.0") == lines.count("# layers.1") == 1
    assert "del mm_default" in lines
    assert not any(line.startswith("del") and "x" in line.split() for line in lines)


def test_names_from_outside_stay_inside_comments(toolbox, artifact_directory, run_script):
    """A tensor, a module or a model may have any name: none can end a comment or the docstring."""
    evil = 'a"""\nraise SystemExit(9)\n\\'
    inputs = [toolbox.spec("x", (2,), source=evil)]

    def build(graph, x):
        node = graph.call_function(torch.ops.aten.neg.default, (x,))
        node.meta["nn_module_stack"] = {"m": (evil, "Linear")}
        return [node]

    program = toolbox.make_program(inputs, build, info={"model": evil, "phase": "decode", "shape_key": evil})
    build_artifact(program, "cpu:reference", artifact_directory)
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("chain", "cpu", r"region_0 is a chain region.*--disable-pass merge-superkernels"),
        ("pointwise", "cpu", r"no kernel can be generated for this region.*cumsum.*--disable-pass fuse-pointwise"),
    ],
)
def test_a_region_is_refused_with_the_pass_to_switch_off(toolbox, artifact_directory, kind, target, said):
    program = toolbox.make_program(
        [toolbox.spec("x", (2, 2))],
        lambda graph, x: [graph.call_function(torch.ops.aten.cumsum.default, (x, 0))],
    )
    graph_module = program.graph_module
    [node] = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    extract_region(graph_module, [node], "region_0", kind)
    with pytest.raises(CompileError, match=said):
        build_artifact(program, target, artifact_directory, self_test=False)


def test_regions_are_functions_of_a_reference_program(toolbox, artifact_directory, run_script):
    """A region with one result and one that writes and gives several; the checksums are those of the flat graph."""

    def build(graph, x, state):
        half = graph.call_function(torch.ops.aten.mul.Tensor, (x, 0.5))
        turned = graph.call_function(torch.ops.aten.sin.default, (half,))
        total = graph.call_function(torch.ops.aten.add.Tensor, (turned, state))
        graph.call_function(torch.ops.aten.copy_.default, (state, total))
        return [total, graph.call_function(torch.ops.aten.cos.default, (total,))]

    inputs = [toolbox.spec("x", (2, 3)), toolbox.spec("state", (2, 3), kind="cache", mutated=True)]
    flat = toolbox.make_program(inputs, build)
    wanted = reference_checksums(flat, 0)
    program = toolbox.make_program(inputs, build)
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    extract_region(program.graph_module, nodes[:2], "pointwise_0", "pointwise")
    extract_region(program.graph_module, nodes[2:], "pointwise_1", "pointwise")
    manifest = build_artifact(program, "cpu:reference", artifact_directory)
    assert manifest.checksums == wanted and manifest.launches == 2
    assert {kernel.file for kernel in manifest.kernels} == {"program.py"}
    assert "def run_pointwise_1(" in (artifact_directory / "program.py").read_text()
    assert not (artifact_directory / "kernels").exists()
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr


def test_a_target_without_spelling_is_refused(toolbox):
    program = toolbox.make_program(
        [toolbox.spec("x", (2,))], lambda graph, x: [graph.call_function(torch.ops.aten.neg.default, (x,))]
    )
    node = next(node for node in program.graph_module.graph.nodes if node.op == "call_function")
    node.target = parse
    with pytest.raises(CompileError, match="neg_default"):
        text_of(program)


def test_the_manifest_lists_every_file_and_no_weight(programs, artifact_directory):
    manifest = build_artifact(
        programs["kda_decode"](), "cpu:reference", artifact_directory, cache_key="k", info={"answer": 42}
    )
    found = {
        path.relative_to(artifact_directory).as_posix() for path in artifact_directory.rglob("*") if path.is_file()
    }
    assert found == {record.path for record in manifest.files} | {"manifest.json"}
    assert not any(path.endswith((".bin", ".pkl", ".pt", ".safetensors")) for path in found)
    document = json.loads((artifact_directory / "manifest.json").read_text())
    assert document["info"]["answer"] == 42
    assert document["cache_key"] == "k"
    assert document["versions"]["torch"] == torch.__version__


def test_a_self_test_that_is_too_large_is_left_out_and_said(programs, artifact_directory, monkeypatch):
    monkeypatch.setattr("kimigraph.codegen.artifact.LARGEST", 16)
    told: list[str] = []
    manifest = build_artifact(programs["linear"](), "cpu:reference", artifact_directory, notify=told.append)
    assert manifest.checksums == {}
    assert manifest.reference == ""
    assert any("no self-test" in line for line in told)
