"""What sm_90a's compiler makes of the quantisers and of the MXFP8 writer and indexer: no spills, wide loads."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from kimigraph.codegen import cross_compile_worker
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CompileError

TARGET = "cuda:sm_90"


def tensor(*shape, dtype="bfloat16"):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorSpec(shape, tuple(strides[: len(shape)]), dtype)


def keys(rotation=None):
    return {"descriptor": str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 64, "e8m0", 32, rotation))}


def indexer(batch=8, total=32768):
    tensors = {
        "q": tensor(batch, 1, 64, 128, dtype="uint8"),
        "keys": tensor(batch * total // 64, 64, 132, dtype="uint8"),
        "weights": tensor(batch, 1, 64, dtype="float32"),
        "lengths": tensor(batch, dtype="int32"),
        "mask": None,
        "block_table": tensor(batch, total // 64, dtype="int32"),
        "q_scales": tensor(batch, 1, 64, 4, dtype="uint8"),
    }
    return KernelRequest("lightning_indexer", tensors, {"k": 2048, "scale": 0.088, **keys()}, TARGET)


def writer(rotation):
    tensors = {
        "keys": tensor(512, 64, 132, dtype="uint8"),
        "values": tensor(8, 1, 128),
        "positions": tensor(8, 1, dtype="int64"),
        "norm_weight": tensor(128),
        "norm_bias": tensor(128),
        "cos": None,
        "sin": None,
        "block_table": tensor(8, 64, dtype="int32"),
    }
    attributes = {"norm_eps": 1e-6, "rope_style": "none", **keys(rotation)}
    return KernelRequest("index_key_write", tensors, attributes, TARGET)


def quantiser(name, *shape, **attributes):
    return KernelRequest(name, {"x": tensor(*shape)}, attributes, TARGET)


REQUESTS = {
    "mxfp8": quantiser("mxfp8_quantize", 8192, 7168, group=32, rounding="rceil", rotate=False),
    "fp8": quantiser("fp8_quantize", 8192, 7168, tile=128, scales="power2", rotate=False),
    "rotated": quantiser("mxfp8_quantize", 8, 1, 64, 128, group=32, rounding="rceil", rotate=True),
    "indexer": indexer(),
    "writer": writer(None),
    "writer_rotates": writer("hadamard"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cubins")
    jobs = []
    for name, request in REQUESTS.items():
        module = BUILDERS[request.op](request)
        (directory / f"{name}.py").write_text(module.text, encoding="utf-8")
        for launch in module.launches:
            jobs.append({"source": f"{name}.py", "stem": f"{name}.{launch.function}", "arch": 90, **asdict(launch)})
    text = "\n".join(json.dumps(part) for part in ({"directory": str(directory), "arch": 90}, *jobs))
    command = [sys.executable, "-P", cross_compile_worker.__file__]
    subprocess.run(command, input=text, text=True, check=True, env=compiler_environment(), stdout=subprocess.DEVNULL)
    return directory


def instructions(directory, stem):
    command = [cross_compile_worker.tool("cuobjdump"), "-sass", str(directory / f"{stem}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_is_spilled(built, name):
    for path in built.glob(f"{name}.*.json"):
        assert json.loads(path.read_text())["stack_bytes"] == 0, path.name


@pytest.mark.parametrize("name", ["mxfp8", "fp8"])
def test_input_is_read_16_bytes_at_a_time(built, name):
    loads = [line for line in instructions(built, f"{name}.quantize_groups").splitlines() if "LDG" in line]
    assert loads and all(".128" in line for line in loads)


def test_the_mxfp8_indexer_multiplies_in_bf16(built):
    code = instructions(built, "indexer.score_keys")
    assert "HGMMA" in code and "HMMA" not in code


@pytest.mark.parametrize("name", REQUESTS)
def test_launches_need_no_triton(name):
    text = host_half("kernel_0", BUILDERS[REQUESTS[name].op](REQUESTS[name]).text)
    assert "def launch(" in text and "import triton" not in text


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (quantiser("mxfp8_quantize", 2, 16384, group=16384, rounding="rceil", rotate=False), "group of 16384"),
        (quantiser("fp8_quantize", 2, 2048, tile=128, scales="amax", rotate=True), "rows of 2048"),
    ],
)
def test_what_no_kernel_serves_is_refused(request_, complaint):
    with pytest.raises(CompileError, match=complaint):
        BUILDERS[request_.op](request_)
