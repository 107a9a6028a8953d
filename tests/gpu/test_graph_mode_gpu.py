"""Graph mode on a GPU: replays equal steps without graphs bit for bit, and nothing is stale, left behind or shared."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.bench.branches import WIDTH, branches
from kimigraph.bench.delays import Delays
from kimigraph.codegen import build_artifact
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import seeded_input
from kimigraph.run import run_artifact, seeded, seeded_weights
from kimigraph.runtime.executor import Executor, laid_out
from kimigraph.runtime.graphs import GraphCaptureError, GraphMode, GraphModeWarning, graph_mode

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
STEPS = 16


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem + "_tools", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bound(directory: Path) -> Executor:
    manifest = Manifest.read(directory)
    buffers = {s.source: seeded(s, manifest) for s in manifest.bound if s.kind == "buffer"}
    return Executor(directory, seeded_weights(manifest) | buffers)


def graphed(directory: Path, mode: GraphMode | None = None) -> tuple[Executor, GraphMode]:
    executor, mode = bound(directory), mode or graph_mode("cuda")
    mode.adopt(executor)
    return executor, mode


def first_value(spec: InputSpec) -> torch.Tensor:
    """Caches and states at random; what counts tokens begins at 0."""
    value = seeded_input(spec, 5) if spec.dtype.startswith(("float", "bfloat")) else torch.zeros(spec.shape)
    return laid_out(value.to(getattr(torch, spec.dtype)), spec).cuda()


def caches_of(executor: Executor) -> dict[str, torch.Tensor]:
    return {s.source: first_value(s) for s in executor.caller_inputs if s.kind == "cache"}


def call(executor: Executor, caches: dict[str, torch.Tensor], number: int) -> tuple[torch.Tensor, ...]:
    """Step ``number``, on ids, lengths and so on of its own, in tensors that are made for it."""
    given = [
        caches[s.source] if s.kind == "cache" else seeded_input(s, 100 + number).cuda() for s in executor.caller_inputs
    ]
    return executor(*given)


def equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def k31(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("k31") / "program"
    config = CompileConfig(target="cuda", batch=2, context=256, cache="off", report=False)
    compile_source(str(ROOT / "examples" / "k31_tiny"), [config], out, lambda _: None)
    return out


@pytest.fixture(scope="module")
def k31_cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On three streams, wherever it is legal."""
    out = tmp_path_factory.mktemp("k31") / "cubins"
    config = CompileConfig(target="cuda:sm_90", batch=2, context=256, cache="off", report=False, force_streams=True)
    compile_source(str(ROOT / "examples" / "k31_tiny"), [config], out, lambda _: None)
    return out


@pytest.fixture(scope="module")
def glm5_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers.models.glm5_next")
    document = _module(ROOT / "tests" / "acceptance" / "test_public_models.py").CONFIGS["glm5_next"]
    folder = tmp_path_factory.mktemp("glm5_next")
    (folder / "config.json").write_text(json.dumps({**document, "random_weights": {"seed": 0}}))
    config = CompileConfig(target="cuda", batch=2, context=21, cache="off", report=False)
    try:
        compile_source(str(folder), [config], folder / "program", lambda _: None)
    except UsageError as error:  # releases before 5.24 know the model under another configuration
        pytest.skip(str(error))
    return folder / "program"


def check_steps(directory: Path) -> None:
    eager, (replayed, mode) = bound(directory), graphed(directory)
    ours, theirs = caches_of(replayed), caches_of(eager)
    kept: list[Any] = []
    for number in range(STEPS):
        kept.append((call(replayed, ours, number), call(eager, theirs, number)))
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == [], number
    assert [number for number, pair in enumerate(kept) if not equal(*pair)] == []
    assert mode.captured == 1


@pytest.mark.parametrize("name", ["k31", "k31_cubins", "glm5_next"])
def test_steps_equal_those_without_graphs_bit_for_bit(name: str, request: pytest.FixtureRequest) -> None:
    check_steps(request.getfixturevalue(name))


def check_trace(directory: Path) -> None:
    executor, mode = graphed(directory)
    caches = caches_of(executor)
    before = {name: tensor.clone() for name, tensor in caches.items()}
    weights = {name: tensor.clone() for name, tensor in executor.bound.items()}
    given = [caches.get(s.source, seeded_input(s, 100).cuda()) for s in executor.caller_inputs]
    mode.capture(executor, given)
    assert all(torch.equal(caches[name], before[name]) for name in caches)
    assert all(torch.equal(executor.bound[name], weights[name]) for name in weights)
    eager = bound(directory)
    assert equal(call(executor, caches, 0), call(eager, before, 0))
    assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_a_capture_leaves_no_trace(k31: Path) -> None:
    check_trace(k31)


def test_caches_may_be_replaced_between_replays(k31: Path) -> None:
    eager, (replayed, mode) = bound(k31), graphed(k31)
    ours, theirs = caches_of(replayed), caches_of(eager)
    held = [ours]  # else a new set may lie where an old one lay, and find its graph again
    for number in range(12):
        if number % 4 == 3:
            held.append(ours)
            ours = {name: tensor.clone() for name, tensor in ours.items()}
        assert equal(call(replayed, ours, number), call(eager, theirs, number)), number
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), number
    assert mode.captured >= 3 and any("other tensors than before" in remark for remark in mode.remarks)


def test_a_capture_at_short_lengths_replays_long_ones_and_rows_without_tokens(k31: Path) -> None:
    """Nothing that depends on lengths is decided at the capture: not what is read, nor which rows live."""
    eager, (replayed, mode) = bound(k31), graphed(k31)
    ours, theirs = caches_of(replayed), caches_of(eager)
    for number, lengths in enumerate(([0, 0], [0, 0], [1, 0], [250, 3], [0, 254], [254, 254])):
        tokens = torch.tensor(lengths, dtype=torch.int32, device="cuda")

        def given(caches: dict[str, torch.Tensor], tokens: torch.Tensor = tokens, number: int = number) -> Any:
            made = {s.source: seeded_input(s, 100 + number).cuda() for s in eager.caller_inputs if s.kind != "cache"}
            return [(caches | made | {"lengths": tokens.clone()})[s.source] for s in eager.caller_inputs]

        assert equal(replayed(*given(ours)), eager(*given(theirs))), lengths
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), lengths
    assert mode.captured == 1


def test_an_artifact_replays_its_own_checksums(k31: Path) -> None:
    assert run_artifact(k31, None, None, 3, cuda_graph=True)["passed"] is True


class Toy(torch.nn.Module):
    """A projection whose sum goes into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        y = x @ self.weight
        cache["cache.0.sum"].add_(y.sum(0))
        return y.relu() + cache["cache.0.sum"]


def toy(rows: int = 4, **more: Any) -> tuple[kimigraph.Compiled, Toy]:
    model = Toy().cuda()
    config = CompileConfig(target="cuda", cache="off", report=False, cuda_graph=True, **more)
    return kimigraph.optimize(model, (torch.randn(rows, 64, device="cuda"), cache()), config), model


def cache() -> dict[str, torch.Tensor]:
    return {"cache.0.sum": torch.zeros(64, device="cuda")}


def test_shapes_that_alternate_have_a_graph_each_and_no_more_than_asked_for() -> None:
    compiled, model = toy()
    ours, theirs = cache(), cache()
    for number in range(40):
        x = torch.randn(4 if number % 2 else 2, 64, device="cuda")
        torch.testing.assert_close(compiled(x, ours), model(x, theirs), rtol=1e-4, atol=1e-4)
    assert compiled.graphs is not None and compiled.graphs.captured == 2
    small, _ = toy(max_graphs=1)
    x, others = torch.randn(4, 64, device="cuda"), [cache(), cache()]
    with pytest.warns(GraphModeWarning, match="max_graphs"):
        for number in range(6):
            small(x, others[number % 2])
    assert small.graphs is not None and small.graphs.captured == 1


class HostTable(torch.nn.Module):
    """Makes a tensor of numbers of the host in every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def test_numbers_of_the_host_are_not_read_again_by_replays() -> None:
    """Another shape runs in between, and the host's memory is used again."""
    config = CompileConfig(target="cuda", cache="off", report=False, cuda_graph=True)
    small, large = torch.zeros(2, 4, device="cuda"), torch.zeros(8, 4, device="cuda")
    compiled = kimigraph.optimize(HostTable(), (small,), config)
    wanted = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")
    for _ in range(6):
        for x in (small, small, large):
            assert torch.equal(compiled(x), wanted.expand_as(x))
        torch.full((64, 4), 9.0).pin_memory().to("cuda", non_blocking=True)
    assert compiled.graphs is not None and compiled.graphs.captured == 2


def test_replaced_caches_leave_memory() -> None:
    compiled, _ = toy()
    x, held = torch.randn(4, 64, device="cuda"), torch.zeros(2**24, device="cuda")
    for _ in range(3):
        compiled(x, {"cache.0.sum": held[:64]})
    before = torch.cuda.memory_allocated()
    del held
    assert before - torch.cuda.memory_allocated() >= 2**26


def test_replays_allocate_nothing_where_results_are_reused(k31: Path) -> None:
    executor, _ = graphed(k31, graph_mode("cuda", reuse_outputs=True))
    caches = caches_of(executor)
    given = [caches.get(s.source, seeded_input(s, 100).cuda()) for s in executor.caller_inputs]
    for _ in range(3):
        executor(*given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        executor(*given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_caller_may_change_streams() -> None:
    """Each step waits for the one before it, though nobody but graph mode says so."""
    compiled, model = toy()
    ours, theirs = cache(), cache()
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(4, 64, device="cuda") for _ in range(30)]
    torch.cuda.synchronize()
    found = []
    for number, x in enumerate(xs):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(int(torch.randint(1, 400_000, ())))
            found.append(compiled(x, ours))
    torch.cuda.synchronize()
    for x, value in zip(xs, found, strict=True):
        torch.testing.assert_close(value, model(x, theirs), rtol=1e-4, atol=1e-4)


def test_a_capture_of_the_callers_is_refused() -> None:
    compiled, _ = toy()
    x, held = torch.randn(4, 64, device="cuda"), cache()
    compiled(x, held)
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match="capture of the caller's"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        compiled(x, held)
    torch.cuda.synchronize()


@torch.library.custom_op("graph_mode_tests::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Reads a value on the host."""
    return x * (2.0 if float(x.sum()) > 0 else 3.0)


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Waits(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return waits(x + 1) - 1


def test_what_cannot_be_captured_is_refused_by_node_and_leaves_the_device_as_it_was() -> None:
    config = CompileConfig(target="cuda", cache="off", report=False, cuda_graph=True)
    x = torch.ones(8, device="cuda")
    compiled = kimigraph.optimize(Waits(), (x,), config)
    assert torch.equal(compiled(x), 2 * (x + 1) - 1)
    for _ in range(2):
        with pytest.raises(GraphCaptureError, match=r"node waits\w* \(program.py, line \d+"):
            compiled(x)
    assert torch.rand(4, device="cuda").isfinite().all()
    other, model = toy()
    ours, theirs = cache(), cache()
    for _ in range(4):
        y = torch.randn(4, 64, device="cuda")
        torch.testing.assert_close(other(y, ours), model(y, theirs), rtol=1e-4, atol=1e-4)
    assert other.graphs is not None and other.graphs.captured == 1


@pytest.mark.parametrize("streams", [2, 3])
def test_streams_with_delays_give_the_same_bits(streams: int, tmp_path: Path) -> None:
    """Ten captures, 40 replays each, all with delays of their own; and 40 steps on one stream without a graph."""
    for name, count in (("one", 1), ("many", streams)):
        (tmp_path / name).mkdir()
        build_artifact(branches(count), "cuda", tmp_path / name, self_test=False)
    assert Manifest.read(tmp_path / "many").streams == streams
    alone, free = Executor(tmp_path / "one", {}), Executor(tmp_path / "many", {})
    beside, mode = graphed(tmp_path / "many", graph_mode("cuda", max_graphs=1))
    delays = Delays(beside)
    theirs, unused = torch.zeros(WIDTH, device="cuda"), torch.zeros(WIDTH, device="cuda")
    for capture in range(10):
        ours = theirs.clone()
        mode.forget(beside)
        mode.capture(beside, [torch.zeros(WIDTH, WIDTH, device="cuda"), ours])
        for number in range(40):
            delays.draw()
            x = torch.randn(WIDTH, WIDTH, device="cuda")
            (wanted,) = alone(x, theirs)
            assert torch.equal(beside(x, ours)[0], wanted) and torch.equal(ours, theirs), (capture, number)
            if number % 10 == 0:
                assert torch.equal(free(x, unused)[0], wanted), (capture, number)
    assert delays.count > 100


def test_delays_show_a_wait_that_is_missing(tmp_path: Path) -> None:
    """Else equal bits would say nothing: without one of its waits the same program gives others."""
    (tmp_path / "one").mkdir()
    build_artifact(branches(1), "cuda", tmp_path / "one", self_test=False)
    alone = Executor(tmp_path / "one", {})
    (tmp_path / "many").mkdir()
    build_artifact(branches(3), "cuda", tmp_path / "many", self_test=False)
    beside, mode = graphed(tmp_path / "many")
    step: Any = beside.step
    lanes = step.__wrapped__.__globals__["streams"].Lanes
    lanes.wait = lambda held, *names: None
    delays = Delays(beside)
    x, sums = torch.randn(WIDTH, WIDTH, device="cuda"), torch.zeros(WIDTH, device="cuda")
    (wanted,) = alone(x, sums.clone())
    mode.capture(beside, [x, sums])
    found = 0
    for _ in range(50):
        delays.draw()
        found += not torch.equal(beside(x, sums)[0], wanted)
    assert found
