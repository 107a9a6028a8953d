"""Kernels compiled ahead of time, launched as Triton launches its own: ``kernel[grid](tensors, **constants)``.

An artifact carries this file's text as ``support/cubins.py``. It needs torch and the CUDA driver: no Triton, no C
compiler. ``kernels/<name>_launch.py`` is the half of a kernel file that runs on the host; it finds here what it takes
from Triton.
"""

import ctypes
import json
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ABI = 1
"""The contract between cubins with their JSON and this file: parameters in order, then two pointers to scratch."""

MOST_TILES = 64
WORDS = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8}


class TensorDescriptor:
    """A matrix that a kernel reads or writes by tiles, as ``triton.tools.tensor_descriptor`` has it."""

    def __init__(
        self,
        base: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any = None,
        padding: str = "zero",
    ) -> None:
        self.base, self.shape, self.strides = base, tuple(shape), tuple(strides)
        self.block_shape, self.padding = tuple(block_shape), padding

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: Sequence[int], layout: Any = None) -> "TensorDescriptor":
        """The descriptor of all of ``tensor``."""
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout)


class SharedLayout:
    """Stands for a layout of shared memory: the cubin has it already."""

    def __init__(self, *sizes: Any, **named: Any) -> None:
        """Takes what Triton's takes, and keeps nothing."""

    @classmethod
    def get_default_for(cls, block_shape: Sequence[int], dtype: str) -> None:
        """Nothing: whoever asks hands it to a ``TensorDescriptor``."""


TRITON = SimpleNamespace(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length())
LANGUAGE = SimpleNamespace(
    NVMMASharedLayout=SharedLayout, **{name: name for name in ("bfloat16", "float16", "float32", "float8e4nv", "uint8")}
)
STAND_INS: dict[str, Any] = {
    "triton": TRITON,
    "tl": LANGUAGE,
    "gl": LANGUAGE,
    "TensorDescriptor": TensorDescriptor,
}
"""What a host half may use of Triton, by the name that kernel files import it under."""


def load_host_half(path: Path, driver: ModuleType) -> ModuleType:
    """``kernels/<name>_launch.py`` as a module; the kernels it launches are the cubins beside it."""
    module = ModuleType(f"kimigraph_host_half_{path.stem}")
    module.__file__ = str(path)
    stem = path.stem.removesuffix("_launch")

    def cubin(function: str) -> Kernel:
        pattern = re.compile(re.escape(f"{stem}.{function}") + r"(\.\d+)?\.json")
        files = sorted(file for file in path.parent.iterdir() if pattern.fullmatch(file.name))
        return Kernel(f"{stem}.{function}", [Variant(file, driver) for file in files])

    vars(module).update(STAND_INS, cubin=cubin)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module


class Kernel:
    """A function of a kernel file: one cubin for each set of constants that it is launched with."""

    def __init__(self, name: str, variants: list["Variant"]) -> None:
        self.name, self.variants = name, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        for variant in self.variants:
            if variant.serves(constants):
                return variant.launch(grid, arguments)
        built = [variant.expected for variant in self.variants]
        raise RuntimeError(f"{self.name} was not compiled ahead of time for {constants}; built are {built}")


class Variant:
    """One cubin with its JSON. Safe to launch from several threads, on any device of its architecture."""

    def __init__(self, record: Path, driver: ModuleType) -> None:
        self.facts: dict[str, Any] = json.loads(record.read_bytes())
        self.name, self.driver = record.stem, driver
        if self.facts.get("abi") != ABI:
            raise RuntimeError(
                f"{record} has runtime ABI {self.facts.get('abi')}, this launcher {ABI}: compile the artifact again"
            )
        self.image = record.with_suffix(".cubin")
        self.expected: dict[str, Any] = {**_tuples(self.facts["constants"]), **self.facts["options"]}
        self.known: dict[str, Any] | None = None
        self.lock = threading.Lock()
        self.functions: dict[int, ctypes.c_void_p] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        """Places of all parameters: a word each, or the address of a tile with the words of its shape and strides."""
        facts = self.facts
        forms = iter(facts["tiles"])
        self.fields: list[tuple[int, str, int, Any]] = []  # argument, type, first parameter, form of a tile
        self.sizes: list[int] = []
        self.absent: list[int] = []
        for index, name in enumerate(facts["parameters"]):
            kind = facts["arguments"].get(name)
            if kind is None:
                if name in facts["constants"] and facts["constants"][name] is None:
                    self.absent.append(index)
            elif kind.startswith("tensordesc"):
                form = next(forms)
                rank = len(form["block_size"])
                self.fields.append((index, "tile", len(self.sizes), form))
                self.sizes += [128, *[4] * rank, *[8] * rank]
            else:
                pointer = "aligned" if name in facts["divisible"] else "pointer"
                self.fields.append((index, pointer if kind.startswith("*") else kind, len(self.sizes), None))
                self.sizes.append(8 if kind.startswith("*") else WORDS[kind])
        self.sizes += [8, 8]  # global and profile scratch
        self.words = (ctypes.c_uint64 * len(self.sizes))()
        first = ctypes.addressof(self.words)
        self.places = (ctypes.c_void_p * len(self.sizes))(*(first + 8 * place for place in range(len(self.sizes))))
        self.tiles: dict[tuple[Any, ...], tuple[Any, int]] = {}
        self.clusters: int = facts["num_ctas"]
        self.config = self.driver.launch_config(
            facts["num_warps"],
            facts["shared_memory"],
            self.clusters,
            bool(facts["launch_cooperative_grid"]),
            bool(facts["launch_pdl"]),
        )

    def serves(self, constants: dict[str, Any]) -> bool:
        """Whether the cubin was built with these constants and options."""
        if constants == self.known:
            return True
        plain = _tuples(constants)
        if any(plain[name] != self.expected.get(name, _MISSING) for name in plain):
            return False
        self.known = constants
        return True

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launch on torch's current stream."""
        if 0 in grid:
            return
        device = torch.cuda.current_device()
        with self.lock:
            function = self.functions.get(device) or self._load(device)
            self._fill(arguments)
            config = self.config
            x, y, z = (*grid, 1, 1)[:3]
            config.grid[0], config.grid[1], config.grid[2] = x * self.clusters, y, z
            scratch = self._scratch(grid)  # held until the launch is queued; then the allocator orders its reuse
            config.stream = torch.cuda.current_stream(device).cuda_stream
            status = self.driver.library().cuLaunchKernelEx(ctypes.byref(config), function, self.places, None)
            del scratch
        self.driver.check(status, f"launching {self.name} on a grid of {grid}")

    def _fill(self, arguments: tuple[Any, ...]) -> None:
        words, bits = self.words, 0
        for index, kind, place, form in self.fields:
            value = arguments[index]
            if kind == "aligned":
                address = value.data_ptr()
                bits |= address
                words[place] = address
            elif kind == "pointer":
                words[place] = value.data_ptr()
            elif kind == "tile":
                self._fill_tile(value, place, form)
            else:
                words[place] = _word(value, kind)
        if bits & 15:
            raise self._misaligned(arguments)
        for index in self.absent:
            if index < len(arguments) and arguments[index] is not None:
                name = self.facts["parameters"][index]
                raise RuntimeError(f"{self.name} was compiled without its operand {name}, and one was given")

    def _fill_tile(self, value: TensorDescriptor, place: int, form: dict[str, Any]) -> None:
        key = (place, value.base.data_ptr(), value.shape, value.strides)
        made = self.tiles.get(key)
        if made is None:
            if len(self.tiles) >= MOST_TILES:
                self.tiles.clear()
            nan = value.padding == "nan"
            made = self.tiles[key] = self.driver.encode_tile(key[1], value.shape, value.strides, form, nan)
        self.places[place] = made[1]
        rank = len(value.shape)
        self.words[place + 1 : place + 1 + rank] = value.shape
        self.words[place + 1 + rank : place + 1 + 2 * rank] = value.strides

    def _scratch(self, grid: tuple[int, ...]) -> list[torch.Tensor]:
        """Memory for kernels that ask for some: so many bytes a program."""
        programs, made = self.clusters, list[torch.Tensor]()
        for size in grid:
            programs *= size
        for place, name in ((-2, "global_scratch_size"), (-1, "profile_scratch_size")):
            if self.facts[name]:
                made.append(torch.empty(programs * self.facts[name], dtype=torch.uint8, device="cuda"))
                self.words[len(self.words) + place] = made[-1].data_ptr()
        return made

    def _load(self, device: int) -> ctypes.c_void_p:
        facts = self.facts
        major, minor = torch.cuda.get_device_capability(device)
        if facts["arch"] != 10 * major + minor:
            raise RuntimeError(
                f"{self.name} was compiled for sm_{facts['arch']} and device {device} is sm_{major}{minor}: compile "
                f"with --target cuda:sm_{major}{minor}"
            )
        function = self.driver.load_function(
            self.image.read_bytes(), facts["entry"], facts["shared_memory"], self.clusters
        )
        sizes = self.driver.parameter_sizes(function)
        if sizes is not None and sizes != self.sizes:
            raise RuntimeError(
                f"{self.name} takes parameters of {sizes} bytes and its record says {self.sizes}: compile it again"
            )
        self.functions[device] = function
        return function

    def _misaligned(self, arguments: tuple[Any, ...]) -> RuntimeError:
        names = [
            self.facts["parameters"][index]
            for index, kind, _, _ in self.fields
            if kind == "aligned" and arguments[index].data_ptr() & 15
        ]
        return RuntimeError(
            f"{self.name} was compiled for operands at multiples of 16 bytes, which {', '.join(names)} is not: "
            "pass a copy"
        )


_MISSING = object()


def _tuples(value: Any) -> Any:
    """JSON made lists of tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _word(value: Any, kind: str) -> int:
    """A scalar as the low bytes of a 64-bit word (parameters lie in little-endian order)."""
    if kind in ("fp32", "fp64"):
        pack, unpack = ("<f", "<I") if kind == "fp32" else ("<d", "<Q")
        return int(struct.unpack(unpack, struct.pack(pack, value))[0])
    return int(value) & 0xFFFFFFFFFFFFFFFF
