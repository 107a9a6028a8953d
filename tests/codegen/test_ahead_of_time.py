"""Programs with cubins: no Triton, no C compiler, and no launch that is not what was compiled."""

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimigraph.codegen import build_artifact, cross_compile_worker
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.support import cubins, cuda_driver
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import Manifest

WITHOUT_TRITON = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "kimigraph"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
from pathlib import Path
from types import ModuleType
path = Path(sys.argv[1])
module = ModuleType("program")
module.__file__ = str(path)
exec(compile(path.read_text(), str(path), "exec"), vars(module))
print(sorted(vars(module.kernels)), callable(module.step))
"""


@pytest.fixture
def built(programs: Any, artifact_directory: Path) -> Path:
    build_artifact(programs["kda_decode"](), "cuda:sm_90", artifact_directory, self_test=False)
    return artifact_directory


def test_a_program_with_cubins_loads_without_triton_and_a_c_compiler(built: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CC": "/bin/false",
        "TRITON_CACHE_DIR": str(tmp_path / "empty"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", WITHOUT_TRITON, str(built / "program.py")]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "['kda_decode_0'] True\n"
    assert not (tmp_path / "empty").exists()
    text = (built / "kernels" / "kda_decode_0_launch.py").read_text()
    assert "import triton" not in text and "@triton" not in text and 'kda_step = cubin("kda_step")' in text
    recorded = {record.path for record in Manifest.read(built).files}
    assert {"kernels/kda_decode_0_launch.py", "support/cubins.py", "support/cuda_driver.py"} <= recorded


def test_the_record_of_a_cubin_has_the_parameters_that_the_cubin_takes(built: Path) -> None:
    for image in (built / "kernels").glob("*.cubin"):
        command = [cross_compile_worker.tool("cuobjdump"), "-elf", str(image)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Ordinal\s*:\s*(0x\w+)\s+Offset\s*:\s*0x\w+\s+Size\s*:\s*(0x\w+)", text)
        sizes = {int(ordinal, 16): int(size, 16) for ordinal, size in found}
        assert sizes and [sizes[number] for number in sorted(sizes)] == variant_of(image).sizes


def variant_of(image: Path, driver: Any = cuda_driver) -> cubins.Variant:
    return cubins.Variant(image.with_suffix(".json"), driver)


class FakeDriver:
    """Records launches instead of making them."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], list[int], Any]] = []
        self.sizes: list[int] | None = None
        self.tiles: list[Any] = []

    launch_config = staticmethod(cuda_driver.launch_config)
    check = staticmethod(lambda status, what: None)

    def load_function(self, image: bytes, entry: str, shared: int, clusters: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(77)

    def parameter_sizes(self, function: Any) -> list[int] | None:
        return self.sizes

    def encode_tile(self, *arguments: Any) -> tuple[Any, int]:
        self.tiles.append(arguments)
        return object(), 4096

    def library(self) -> Any:
        return SimpleNamespace(cuLaunchKernelEx=self.launch)

    def launch(self, config: Any, function: Any, places: Any, extra: None) -> int:
        made = config._obj
        words = [ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64))[0] if place != 4096 else 4096 for place in places]
        kept = [(made.attributes[i].id, list(made.attributes[i].value[:3])) for i in range(made.count)]
        self.launches.append((tuple(made.grid), words, (tuple(made.block), made.shared, made.stream, kept)))
        return 0


FACTS: dict[str, Any] = {
    "abi": cubins.ABI,
    "entry": "f",
    "arch": 90,
    "parameters": ["tiles", "x", "maybe", "count", "scale", "N", "STRIDE"],
    "arguments": {"tiles": "tensordesc<bf16[64, 128]>", "x": "*bf16", "count": "i32", "scale": "fp32"},
    "constants": {"maybe": None, "N": 3, "STRIDE": [4, 1]},
    "divisible": ["x"],
    "options": {"num_warps": 4},
    "tiles": [{"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 128], "fp4_padded": False}],
    "shared_memory": 70000,
    "num_warps": 4,
    "num_ctas": 2,
    "launch_cooperative_grid": True,
    "launch_pdl": True,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
CONSTANTS = {"N": 3, "STRIDE": (4, 1), "num_warps": 4}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))


def kernel(tmp_path: Path, driver: FakeDriver, **changes: Any) -> cubins.Kernel:
    path = tmp_path / "k_0.f.json"
    path.write_text(json.dumps({**FACTS, **changes}))
    path.with_suffix(".cubin").write_bytes(b"cubin")
    return cubins.Kernel("k_0.f", [cubins.Variant(path, driver)])


@pytest.mark.usefixtures("gpu")
def test_a_launch_has_every_parameter_in_its_place(tmp_path: Path) -> None:
    driver = FakeDriver()
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    tiles = cubins.TensorDescriptor.from_tensor(x, [64, 128])
    function = kernel(tmp_path, driver)
    for _ in range(2):
        function[(7, 2)](tiles, x, None, -2, 1.5, **CONSTANTS)
    assert len(driver.tiles) == 1 and driver.tiles[0][:3] == (x.data_ptr(), (64, 128), (128, 1))
    grid, words, (block, shared, stream, attributes) = driver.launches[1]
    half = struct.unpack("<I", struct.pack("<f", 1.5))[0]
    assert grid == (14, 2, 1) and block == (128, 1, 1) and (shared, stream) == (70000, 5)
    assert words == [4096, 64, 128, 128, 1, x.data_ptr(), 2**64 - 2, half, 0, 0]
    names = (cuda_driver.PROGRAMMATIC_SERIALIZATION, cuda_driver.COOPERATIVE, cuda_driver.CLUSTER_DIMENSION)
    assert [number for number, _ in attributes] == [*names, cuda_driver.CLUSTER_POLICY]
    assert attributes[2][1] == [2, 1, 1]
    function[(0,)](tiles, x, None, 1, 1.0, **CONSTANTS)
    assert len(driver.launches) == 2  # an empty grid launches nothing


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "constants", "message"),
    [
        ((None, 2, 1.0), {**CONSTANTS, "N": 4}, "not compiled ahead of time for"),
        ((None, 2, 1.0), {**CONSTANTS, "num_warps": 8}, "not compiled ahead of time for"),
        ((None, 2, 1.0), {**CONSTANTS, "M": 1}, "not compiled ahead of time for"),
        ((torch.zeros(1), 2, 1.0), CONSTANTS, "without its operand maybe"),
    ],
)
def test_a_launch_that_was_not_compiled_is_an_error(
    tmp_path: Path, arguments: tuple[Any, ...], constants: dict[str, Any], message: str
) -> None:
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    tiles = cubins.TensorDescriptor.from_tensor(x, [64, 128])
    with pytest.raises(RuntimeError, match=message):
        kernel(tmp_path, FakeDriver())[(1,)](tiles, x, *arguments, **constants)


@pytest.mark.usefixtures("gpu")
def test_an_operand_that_is_not_where_it_was_compiled_to_be_is_an_error(tmp_path: Path) -> None:
    x = torch.zeros(64 * 128 + 8, dtype=torch.bfloat16)[1 : 64 * 128 + 1].view(64, 128)
    tiles = cubins.TensorDescriptor.from_tensor(x, [64, 128])
    with pytest.raises(RuntimeError, match="multiples of 16 bytes, which x is not"):
        kernel(tmp_path, FakeDriver())[(1,)](tiles, x, None, 2, 1.0, **CONSTANTS)
    driver = FakeDriver()
    kernel(tmp_path, driver, divisible=[])[(1,)](tiles, x, None, 2, 1.0, **CONSTANTS)
    assert driver.launches


@pytest.mark.usefixtures("gpu")
def test_another_contract_architecture_or_layout_of_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="runtime ABI 0, this launcher 1: compile the artifact again"):
        kernel(tmp_path, FakeDriver(), abi=0)
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    arguments = (cubins.TensorDescriptor.from_tensor(x, [64, 128]), x, None, 2, 1.0)
    with pytest.raises(RuntimeError, match="compiled for sm_80 and device 0 is sm_90"):
        kernel(tmp_path, FakeDriver(), arch=80)[(1,)](*arguments, **CONSTANTS)
    driver = FakeDriver()
    driver.sizes = [8, 8]
    with pytest.raises(RuntimeError, match="takes parameters of"):
        kernel(tmp_path, driver)[(1,)](*arguments, **CONSTANTS)


HOST = '''"""A kernel."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRET = knobs.runtime.interpret
WIDTH: tl.constexpr = tl.constexpr(4)
CONSTANTS = {"n": 5}


@triton.jit
def work(x):
    tl.store(x, 1)


@triton.jit
def unused(x):
    tl.store(x, 1)


@cache
def known(n):
    """Kept."""
    return n


def launch(x):
    grid = (triton.USED(CONSTANTS["n"], 2),)
    work[grid](x)
    return known(1)
'''


def test_the_host_half_keeps_what_runs_on_the_host() -> None:
    text = host_half("k_0", HOST.replace("USED", "cdiv"))
    assert "tl" not in re.findall(r"\w+", text) and "knobs" not in text and "unused" not in text
    calls: list[Any] = []

    class Fake:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: calls.append((grid, arguments))

    names = {**cubins.STAND_INS, "cubin": lambda name: Fake()}
    exec(text, names)
    assert names["launch"](9) == 1 and names["INTERPRET"] is False
    assert calls == [((3,), (9,))]


def test_what_the_launcher_does_not_have_of_triton_is_a_compile_error_that_names_it() -> None:
    with pytest.raises(CompileError, match=r"kernels/k_0\.py, line 32: launch\(\) uses triton\.heuristics"):
        host_half("k_0", HOST.replace("USED", "heuristics"))
