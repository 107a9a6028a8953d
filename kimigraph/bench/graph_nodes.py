"""What a call puts on the device, counted from the CUDA graph that captures it."""

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

KINDS = {0: "kernels", 1: "memcpys", 2: "memsets", 3: "host functions", 4: "graphs", 5: "empty"}


def graph_nodes(call: Callable[[], Any]) -> dict[str, int]:
    """Nodes by kind ("kernels" and "memsets" always) of one ``call``, which has run before: no warm-up is counted.

    Raises RuntimeError where the driver refuses.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    number = ctypes.c_size_t(0)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(number)))
    nodes = (ctypes.c_void_p * number.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(number)))
    found: Counter[str] = Counter(kernels=0, memsets=0)
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        found[KINDS.get(kind.value, "others")] += 1
    return dict(found)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refuses to list a graph's nodes: error {status}")
