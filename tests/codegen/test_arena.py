"""Programs that take their memory from a planned arena: the same bits, and nothing allocated but what is returned."""

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kimigraph.bench.branches import branches
from kimigraph.codegen import build_artifact
from kimigraph.codegen.kernel import KernelModule
from kimigraph.codegen.launch_memory import NO_MEMORY, describe_memory, memory_of
from kimigraph.codegen.support.arena import Arena
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.launch_memory import Allocation, allocations_of
from kimigraph.ir.lifetimes import new_tensors
from kimigraph.ir.memory_plan import arena_bytes, places, scratch_places
from kimigraph.ir.out_forms import out_form
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import HappensBefore
from kimigraph.passes import Pipeline, run_pipeline
from kimigraph.passes.scheduling.arena import memory_violations
from kimigraph.runtime.executor import Executor
from kimigraph.session import pass_context

torch.set_num_threads(1)
ATEN = torch.ops.aten
TEMPLATES = Path(__file__).parents[2] / "codegen" / "templates"
WIDTH = 16


_COUNTERS = """
import torch


def row_state(known, words, device):
    torch.cuda.is_current_stream_capturing()
    return known.setdefault(torch.cuda.current_stream(device), torch.zeros(words))


def launch(x, *, memory=torch):
    out = memory.empty((4,), dtype=torch.float32, device=x.device)
    scratch = memory.empty((3,), dtype=torch.int32, device=x.device)
    row_state({}, 4, x.device)
    return out
"""


def planned(program: CapturedProgram, target: str = "cpu") -> CapturedProgram:
    run_pipeline(program, Pipeline.parse("plan-memory,verify-schedule"), pass_context(CompileConfig(target=target)))
    return program


class Storages(TorchDispatchMode):
    """The storages of all results of the calls inside, views and writes in place too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor):
                self.seen[item.untyped_storage().data_ptr()] = item
        return result


def mixed(toolbox: Any) -> CapturedProgram:
    """Products, a cast, a copy, a sum with a bias, a concatenation, a strided result, and what has no form with out."""
    inputs = [
        toolbox.spec("x", (2, 3, WIDTH)),
        toolbox.spec("weight", (WIDTH, WIDTH), "weight", source="weight"),
        toolbox.spec("bias", (WIDTH,), "weight", source="bias"),
        toolbox.spec("cache_0_sum", (2, 3, WIDTH), "cache", source="cache.0.sum", mutated=True),
    ]

    def build(graph: Any, x: Any, weight: Any, bias: Any, cache: Any) -> list[Any]:
        def node(target: Any, *args: Any, **kwargs: Any) -> Any:
            return graph.call_function(target, args, kwargs)

        first = node(ATEN.linear.default, x, weight)
        second = node(ATEN.linear.default, first, weight, bias)  # three dimensions and a bias: no form with out
        turned = node(ATEN.clone.default, node(ATEN.transpose.int, second, 1, 2))
        half = node(ATEN._to_copy.default, turned, dtype=torch.bfloat16)
        back = node(ATEN._to_copy.default, half, dtype=torch.float32)
        flat = node(ATEN.view.default, first, [6, WIDTH])
        added = node(ATEN.addmm.default, bias, flat, weight)
        joined = node(ATEN.cat.default, [added, flat], 1)
        # As many columns as the table has rows.
        middle = node(ATEN.slice.Tensor, joined, 1, WIDTH // 2, WIDTH // 2 + WIDTH)
        lower = node(ATEN.embedding.default, weight, node(ATEN.argmax.default, middle, 1))
        written = node(ATEN.add_.Tensor, cache, node(ATEN.transpose.int, back, 1, 2))
        return [node(ATEN.add.Tensor, node(ATEN.view.default, lower, [2, 3, WIDTH]), written)]

    return toolbox.make_program(inputs, build)


def executors(program: CapturedProgram, target: str, tmp_path: Path, tensors: Any) -> tuple[Executor, Executor]:
    for name, made in (("plain", program.copy()), ("planned", planned(program, target))):
        (tmp_path / name).mkdir()
        build_artifact(made, target, tmp_path / name, self_test=False)
    assert not (tmp_path / "plain" / "support" / "arena.py").exists()
    return Executor(tmp_path / "planned", tensors), Executor(tmp_path / "plain", tensors)


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs here have no kernels: the target 'cpu' needs no interpreter."""
    monkeypatch.setattr("kimigraph.runtime.executor.require_runnable", lambda target: None)


@pytest.mark.usefixtures("interpreting")
def test_the_same_bits_and_nothing_allocated_but_results(toolbox: Any, tmp_path: Path) -> None:
    weights = {"weight": torch.randn(WIDTH, WIDTH), "bias": torch.randn(WIDTH)}
    ours, theirs = executors(mixed(toolbox), "cpu", tmp_path, weights)
    caches = [torch.zeros(2, 3, WIDTH) for _ in range(2)]
    for _ in range(3):
        x = torch.randn(2, 3, WIDTH)
        with Storages() as watched:
            got = ours(x, caches[0])
        wanted = theirs(x, caches[1])
        assert torch.equal(got[0], wanted[0]) and torch.equal(*caches)
    given = {item.untyped_storage().data_ptr() for item in (x, caches[0], got[0], *ours.bound.values())}
    others = {place: item for place, item in watched.seen.items() if place not in given}
    # The arena itself, and the two that have no form with out: a product with bias of a stack, and rows of a table.
    assert sorted(item.untyped_storage().nbytes() for item in others.values()) == sorted(
        [6 * WIDTH * 4, 6 * WIDTH * 4, arena_bytes(planned(mixed(toolbox)).graph_module.graph)]
    )


@pytest.mark.usefixtures("interpreting")
@pytest.mark.parametrize("streams", [1, 3])
def test_a_program_of_several_streams_in_its_arena(streams: int, tmp_path: Path) -> None:
    program = branches(streams, "cpu", WIDTH)
    (tmp_path / "program").mkdir()
    build_artifact(program, "cpu", tmp_path / "program", self_test=False)
    executor, ours, theirs = Executor(tmp_path / "program", {}), torch.zeros(WIDTH), torch.zeros(WIDTH)
    for _ in range(3):
        x = torch.randn(WIDTH, WIDTH)
        assert torch.equal(executor(x, ours)[0], program.graph_module(x, theirs)[0]) and torch.equal(ours, theirs)


@pytest.mark.usefixtures("interpreting")
def test_threads_at_one_time_have_blocks_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    program = branches(1, "cpu", WIDTH)
    build_artifact(program, "cpu", tmp_path / "program", self_test=False)
    executor, failures = Executor(tmp_path / "program", {}), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(WIDTH, WIDTH, generator=generator)
            got, wanted = executor(x, torch.zeros(WIDTH))[0], program.graph_module(x, torch.zeros(WIDTH))[0]
            failures.extend([] if torch.equal(got, wanted) else [seed])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_arena_made_under_inference_mode_serves_outside_it() -> None:
    arena = Arena(torch.device("cpu"), 4096)
    with torch.inference_mode():
        arena.memory().tensor(0, (4, 4), torch.float32).fill_(1)
    tensor = arena.memory().tensor(0, (4, 4), torch.float32)
    assert float(tensor.add_(1).sum()) == 32 and not tensor.is_inference()


def test_places_are_handed_out_in_order_and_none_is_torchs() -> None:
    memory = Arena(torch.device("cpu"), 4096).memory()
    form: Any = {"dtype": torch.int16, "device": torch.device("cpu")}
    at = memory.at(512, None, 256)
    first, second, third = at.empty((3, 5), **form), at.empty_strided((2, 3), (1, 2), **form), at.zeros(7, **form)
    begin = memory.tensor(0, (1,), torch.uint8).data_ptr()
    assert (first.data_ptr() - begin, third.data_ptr() - begin) == (512, 256)
    assert second.stride() == (1, 2) and second.untyped_storage().nbytes() == 12
    assert first.shape == (3, 5) and int(third.abs().sum()) == 0


def test_scratch_of_kernels_is_planned_and_checked(programs: Any) -> None:
    program = planned(programs["lightning_indexer"](), "cpu")
    graph = program.graph_module.graph
    [indexer] = [node for node in graph.nodes if "lightning_indexer" in str(node.target)]
    # It returns the picks, which lie outside; the codes of all keys lie in the arena while it runs.
    assert places(indexer) == () and [item.result for item in allocations_of(indexer) or ()] == [0, None]
    [(offset, nbytes)] = scratch_places(indexer)
    assert nbytes == 2 * 1 * 8 * 4 and arena_bytes(graph) >= offset + nbytes
    assert [t.name for t in new_tensors(graph) if not t.kept] == [f"{indexer.name} scratch 0"]
    assert list(memory_violations(graph, HappensBefore(graph))) == []
    indexer.meta["scratch"] = ((0, nbytes - 1),)
    [found] = memory_violations(graph, HappensBefore(graph))
    assert f"{indexer.name} scratch 0 takes {nbytes} bytes" in found.text


def test_scratch_never_lies_over_operands(programs: Any, toolbox: Any) -> None:
    """Two nodes in one place are refused even where one of them is scratch alone."""
    program = branches(1, "cpu", WIDTH)
    graph = program.graph_module.graph
    node = next(node for node in graph.nodes if node.target is ATEN.mm.default)
    node.meta["allocations"] = (*node.meta["allocations"], Allocation(64))
    node.meta["scratch"] = (node.args[0].meta["buffer"],)
    found = list(memory_violations(graph, HappensBefore(graph)))
    assert found and "scratch 0 is written to bytes" in found[0].text


def test_a_kernel_that_asks_for_other_memory_than_planned_is_an_error(programs: Any, tmp_path: Path) -> None:
    program = planned(programs["lightning_indexer"](), "cpu")
    [node] = [node for node in program.graph_module.graph.nodes if "lightning_indexer" in str(node.target)]
    node.meta["allocations"] = node.meta["allocations"][:1]
    with pytest.raises(CompileError, match="asks for other memory than was planned"):
        build_artifact(program, "cpu", tmp_path, self_test=False)


def test_a_kernel_that_cannot_be_asked_stays_outside_with_a_remark(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no device")

    monkeypatch.setattr("kimigraph.codegen.launch_memory.memory_of", fails)
    program = programs["kda_decode"]()
    [record] = run_pipeline(program, Pipeline.parse("plan-memory"), pass_context(CompileConfig(target="cpu")))
    assert record.result.statistics["tensors"] == 0
    describe_memory(program.graph_module.graph, "cpu")
    [node] = [node for node in program.graph_module.graph.nodes if "kda_decode" in str(node.target)]
    assert "cannot be asked for what it allocates (ValueError: no device)" in node.meta["outside"]


def test_kernels_with_counters_are_asked_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they keep from launch to launch is found by stream; here no stream is asked for."""
    module = KernelModule(_COUNTERS, ())

    def unreachable(*_: Any) -> None:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(torch.cuda, "current_stream", unreachable)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", unreachable)
    assert memory_of(module, [torch.empty(4, device="meta")]) == (Allocation(16, 0), Allocation(12))


def test_a_planned_tensor_that_is_returned_after_all_is_an_error(tmp_path: Path) -> None:
    program = branches(1, "cpu", WIDTH)
    graph = program.graph_module.graph
    node = next(node for node in graph.nodes if node.target is ATEN.mm.default)
    output = graph.output_node()
    output.args = ((*output.args[0], node),)
    with pytest.raises(CompileError, match=f"{node.name} has a place in the arena, and the step returns it"):
        build_artifact(program, "cpu", tmp_path, self_test=False)


def test_references_have_no_arena(programs: Any, tmp_path: Path) -> None:
    build_artifact(planned(programs["linear"](), "cpu:reference"), "cpu:reference", tmp_path)
    assert "arena" not in (tmp_path / "program.py").read_text()


def test_generated_forms_with_out_are_left_alone(toolbox: Any) -> None:
    """They compute as usual and copy: more memory, not less."""
    program = mixed(toolbox)
    found = {
        str(node.target): out_form(node) for node in program.graph_module.graph.nodes if node.op == "call_function"
    }
    assert found["aten.embedding.default"] is None and found["aten.cat.default"] is ATEN.cat.out
    describe_memory(program.graph_module.graph, "cpu")
    reasons = {str(n.target): n.meta["outside"] for n in program.graph_module.graph.nodes if "outside" in n.meta}
    assert "aten.embedding.default" in reasons and NO_MEMORY not in reasons.values()


def launches() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(TEMPLATES.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == "launch":
                yield path.stem, node


def test_templates_allocate_through_memory_alone() -> None:
    makers = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "arange", "empty_strided", "cat"}
    found: list[str] = []
    for name, launch in launches():
        for call in (node for node in ast.walk(launch) if isinstance(node, ast.Call)):
            package, _, function = ast.unparse(call.func).rpartition(".")
            if package == "torch" and function in makers and "out" not in {word.arg for word in call.keywords}:
                found.append(f"{name}: torch.{function}")
    assert found == ["lightning_indexer_hopper: torch.zeros"]  # counters, under the interpreter only
