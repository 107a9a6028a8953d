"""Small captured programs by hand, and how the tests run an artifact."""

import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimigraph.ir.fake import infer_all
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec

sys.path.insert(0, str(Path(__file__).parent))  # for the requests that several files share
torch.set_num_threads(1)
INFO = {"model_type": "toy", "phase": "decode", "shape_key": "B2-N1-C8", "source": "/somewhere/toy"}


def spec(name, shape, kind="input", dtype="float32", source=None, stride=None, **more):
    """An input; contiguous unless strides are given."""
    stride = stride or torch.empty(shape, device="meta").stride()
    return InputSpec(name, kind, source or name, tuple(shape), tuple(stride), dtype, **more)


def make_program(inputs, build, info=INFO, tensors=None) -> CapturedProgram:
    """A program over ``inputs`` whose graph ``build(graph, *placeholders)`` makes; it returns the output nodes."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    nodes = []
    for item in inputs:
        nodes.append(graph.placeholder(item.name))
        with mode:
            dtype = getattr(torch, item.dtype)
            nodes[-1].meta["val"] = torch.empty_strided(item.shape, item.stride, dtype=dtype)
    results = build(graph, *nodes)
    graph.output(tuple(results))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    infer_all(module)
    outputs = tuple(OutputSpec(node.name, node.name) for node in results)
    return CapturedProgram(module, tuple(inputs), outputs, tensors=tensors or {}, info=dict(info))


def call(graph, op, *args, **kwargs):
    """A node that calls a semantic operator."""
    return graph.call_function(OPERATORS[op].overload, args, kwargs)


def indexer_program(context=8):
    """LI over an index cache that the step updates first."""
    inputs = [
        spec("q", (2, 1, 4, 16)),
        spec("key", (2, 1, 16)),
        spec("weights", (2, 1, 4)),
        spec("lengths", (2,), dtype="int32", value_range=(1, context)),
        spec("cache_0_index_key", (2, context, 16), "cache", source="cache.0.index_key", mutated=True),
        spec("slot", (1,), dtype="int64", value_range=(0, context)),
    ]

    def build(graph, q, key, weights, lengths, cache, slot):
        written = graph.call_function(torch.ops.aten.index_copy_.default, (cache, 1, slot, key))
        return [call(graph, "lightning_indexer", q, written, weights, lengths, k=3, scale=0.25)]

    return make_program(inputs, build)


def attention_program():
    """Sparse attention whose two results are both outputs."""
    inputs = [
        spec("q_latent", (2, 1, 4, 16)),
        spec("q_rope", (2, 1, 4, 8)),
        spec("latent", (2, 8, 16), "cache", source="cache.0.latent"),
        spec("rope", (2, 8, 8), "cache", source="cache.0.rope"),
        spec("indices", (2, 1, 3), dtype="int32", value_range=(-1, 8)),
    ]

    def build(graph, *nodes):
        pair = call(graph, "sparse_attention", *nodes, scale=0.2)
        return [graph.call_function(operator.getitem, (pair, index)) for index in (0, 1)]

    return make_program(inputs, build)


def kda_program():
    """One KDA step; both states change in place."""
    heads, key, value, width = 2, 8, 8, 4
    channels = heads * (2 * key + value)
    inputs = [
        spec("qkv", (2, 1, channels)),
        spec("conv_weight", (channels, width), "weight", source="layers.0.conv.weight"),
        spec("conv_state", (2, channels, width - 1), "cache", source="state.0.conv", mutated=True),
        spec("gate", (2, 1, heads * key)),
        spec("dt_bias", (heads * key,), "weight", source="layers.0.dt_bias"),
        spec("a_log", (heads,), "weight", source="layers.0.A_log"),
        spec("beta", (2, 1, heads)),
        spec("state", (2, heads, key, value), "cache", source="state.0.kda", mutated=True),
    ]
    return make_program(inputs, lambda graph, *nodes: [call(graph, "kda_decode", *nodes, scale=0.3)])


def linear_program():
    """Two layers of plain ATen; the weight is stored transposed."""
    inputs = [
        spec("x", (2, 4)),
        spec("p_weight", (4, 4), "weight", source="weight", stride=(1, 4)),
        spec("c_shift", (4,), "constant", source="shift"),
    ]

    def build(graph, x, weight, shift):
        aten = torch.ops.aten
        for layer in range(2):
            product = graph.call_function(aten.mm.default, (x, weight))
            product.meta["nn_module_stack"] = {"m": (f"layers.{layer}", "Linear")}
            x = graph.call_function(aten.add.Tensor, (product, shift))
            x.meta["nn_module_stack"] = {"m": (f"layers.{layer}", "Linear")}
        limit = graph.call_function(aten.full.default, ([2, 4], float("-inf")), {"device": torch.device("cpu")})
        return [graph.call_function(aten.maximum.default, (x, limit))]

    return make_program(inputs, build, tensors={"c_shift": torch.arange(4.0)})


@pytest.fixture
def programs() -> dict[str, Callable[[], CapturedProgram]]:
    """The small programs by name."""
    return {
        "lightning_indexer": indexer_program,
        "sparse_attention": attention_program,
        "kda_decode": kda_program,
        "linear": linear_program,
    }


@pytest.fixture
def toolbox() -> SimpleNamespace:
    """What makes further programs: ``spec``, ``make_program`` and ``call``."""
    return SimpleNamespace(spec=spec, make_program=make_program, call=call)


@pytest.fixture
def run_script(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs an artifact's program.py elsewhere, in a process where importing kimigraph fails."""

    def run(artifact: Path, *options: str) -> subprocess.CompletedProcess[str]:
        trap = tmp_path / "trap"
        trap.mkdir(exist_ok=True)
        (trap / "kimigraph.py").write_text("raise ImportError('program.py must not need kimigraph')")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        environment = {"PATH": os.defpath, "HOME": str(tmp_path), "PYTHONPATH": str(trap), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(artifact / "program.py"), *options]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def artifact_directory(tmp_path) -> Path:
    """An empty directory for an artifact, with a name that is neither ASCII nor free of spaces."""
    directory = tmp_path / "Артефакт 月 1"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory
