"""The calls of the CUDA driver that loading and launching a cubin takes, through ctypes.

An artifact carries this file's text as ``support/cuda_driver.py``, so it imports the standard library alone. Names and
numbers are those of ``cuda.h``.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

SHARED_SIZE, MAX_DYNAMIC_SHARED_SIZE, NON_PORTABLE_CLUSTER_SIZE = 1, 8, 14
COOPERATIVE, CLUSTER_DIMENSION, CLUSTER_POLICY, PROGRAMMATIC_SERIALIZATION = 2, 4, 5, 6
POLICY_SPREAD = 1
MOST_SHARED_BY_DEFAULT = 48 * 1024
LARGEST_PORTABLE_CLUSTER = 8


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed."""


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: the value is a union of 64 bytes, of which at most four words are used here."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@cache
def library() -> Any:
    """The driver's library; DriverError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the CUDA driver cannot be loaded ({error}): run this where a GPU and its driver are"
        ) from None


def check(status: int, what: str) -> None:
    """DriverError unless ``status`` is CUDA_SUCCESS."""
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DriverError(f"{what} failed: {reason} (CUDA error {status})")


def load_function(image: bytes, entry: str, shared: int, clusters: int) -> ctypes.c_void_p:
    """The function ``entry`` of a cubin, in the current context, with room for ``shared`` bytes of dynamic memory.

    The module stays loaded for the life of the process, as CUDA graphs may hold its functions.
    """
    driver, module, function = library(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), image), f"loading the cubin of {entry}")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry} in its cubin")
    if shared > MOST_SHARED_BY_DEFAULT:
        status = driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, shared)
        check(status, f"giving {entry} {shared} bytes of shared memory")
    if clusters > LARGEST_PORTABLE_CLUSTER:
        check(driver.cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER_SIZE, 1), f"allowing clusters of {clusters}")
    return function


def parameter_sizes(function: ctypes.c_void_p) -> list[int] | None:
    """Bytes of each parameter of a loaded function; None for a driver that cannot say (before 12.4)."""
    driver = library()
    if not hasattr(driver, "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while (
        driver.cuFuncGetParamInfo(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0
    ):
        sizes.append(size.value)
    return sizes


def launch_config(warps: int, shared: int, clusters: int, cooperative: bool, programmatic: bool) -> LaunchConfig:
    """A launch without its grid and stream."""
    wanted: list[tuple[int, Sequence[int]]] = []
    if programmatic:
        wanted.append((PROGRAMMATIC_SERIALIZATION, (1,)))
    if cooperative:
        wanted.append((COOPERATIVE, (1,)))
    if clusters > 1:
        wanted += [(CLUSTER_DIMENSION, (clusters, 1, 1)), (CLUSTER_POLICY, (POLICY_SPREAD,))]
    attributes = (LaunchAttribute * max(len(wanted), 1))()
    for attribute, (number, values) in zip(attributes, wanted, strict=False):
        attribute.id = number
        attribute.value[: len(values)] = values
    config = LaunchConfig(block=(32 * warps, 1, 1), shared=shared, count=len(wanted))
    config.attributes = ctypes.cast(attributes, ctypes.POINTER(LaunchAttribute))
    return config


def encode_tile(
    address: int, shape: Sequence[int], strides: Sequence[int], form: dict[str, Any], nan_outside: bool
) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A ``CUtensorMap`` of a matrix for tiles of ``form`` (Triton's words): the memory that holds it, and its address.

    ``shape`` and ``strides`` count elements, outermost first; the innermost stride is 1.
    """
    rank, size = len(shape), form["elem_size"]
    memory = ctypes.create_string_buffer(128 + 63)
    place = (ctypes.addressof(memory) + 63) & ~63
    status = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(_host_type(form["elem_type"])),
        ctypes.c_uint(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(stride * size for stride in reversed(strides[:-1])), 0),
        (ctypes.c_uint32 * rank)(*reversed(form["block_size"])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(form["swizzle"]),
        ctypes.c_int(2),  # the L2 cache is filled by 128 bytes
        ctypes.c_int(1 if nan_outside else 0),
    )
    check(status, f"describing a tile of a tensor of {list(shape)} with strides {list(strides)}")
    return memory, place


def _host_type(number: int) -> int:
    """The type as ``cuTensorMapEncodeTiled`` numbers it; instructions on the device number three of them otherwise."""
    return {8: 10, 9: 8, 10: 9}.get(number, number)
