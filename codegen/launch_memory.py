"""What the calls of a program allocate, found by running the host half of each kernel on tensors without data.

``launch`` of a kernel file allocates through its argument ``memory``: torch itself, or places in the arena of the
program (``support/arena.py``), in the same order. Here it is something that writes down what is asked for.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelModule
from kimigraph.codegen.kernel_writer import KernelSet, build_kernels
from kimigraph.codegen.regions import kernel_kind
from kimigraph.codegen.request import tensor_arguments
from kimigraph.codegen.support.cubins import STAND_INS
from kimigraph.ir.config import ONNXRUNTIME
from kimigraph.ir.dependences import starts_work
from kimigraph.ir.errors import CompileError
from kimigraph.ir.launch_memory import Allocation
from kimigraph.ir.lifetimes import reach
from kimigraph.ir.out_forms import writes_into_given_memory

NO_MEMORY = "its kernel makes memory for itself"


def describe_memory(graph: Graph, target: str) -> None:
    """Write at every node that starts work what it allocates, or why it takes no memory (``ir.launch_memory``).

    Does nothing for ``cpu:reference`` and onnxruntime, whose programs launch no kernels.
    """
    if target in ("cpu:reference", ONNXRUNTIME):
        return
    try:
        kernels = build_kernels(graph, target)
    except CompileError:  # what has no kernel is refused where the program is written
        return
    known: Known = {}
    for node in graph.nodes:
        if kernel_kind(node) is not None:
            node.meta |= _of_kernel(node, kernels, known)
        elif starts_work(node):
            node.meta |= _of_operator(node)


Known = dict[Hashable, tuple[Allocation, ...] | None]
"""What was found before, by kernel and forms of arguments: equal layers ask for the same."""


def launch_allocations(node: Node, kernels: KernelSet, known: Known) -> tuple[Allocation, ...] | None:
    """What ``launch`` of the node's kernel asks ``memory`` for, in order; None where it takes no memory."""
    file = kernels.file_of[node.name]
    key = file.name, _form(list(_given(node)))
    if key not in known:
        known[key] = memory_of(file.module, [_without_data(item) for item in _given(node)])
    return known[key]


def _of_kernel(node: Node, kernels: KernelSet, known: Known) -> dict[str, Any]:
    try:
        found = launch_allocations(node, kernels, known)
    except Exception as error:  # told in a remark of plan-memory; the kernel allocates as it would without a plan
        return {"outside": f"its kernel cannot be asked for what it allocates ({type(error).__name__}: {error})"}
    return {"outside": NO_MEMORY} if found is None else {"allocations": found}


def _of_operator(node: Node) -> dict[str, Any]:
    if not writes_into_given_memory(node):
        return {"outside": f"{node.target} cannot write into memory that is given"}
    nbytes = reach(node.meta["val"])
    return {"allocations": (Allocation(nbytes, 0),)} if nbytes else {"outside": "its size is not known"}


def _given(node: Node) -> Iterable[Any]:
    return node.args if node.op == "call_module" else tensor_arguments(node).values()


def _form(value: Any) -> Hashable:
    if isinstance(value, Node):
        value = value.meta["val"]
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_form(item) for item in cast("Sequence[Any]", value))
    return type(value), repr(value)


def _without_data(value: Any) -> Any:
    if isinstance(value, Node):
        value = value.meta["val"]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_without_data(item) for item in cast("Sequence[Any]", value)]
    return value


def memory_of(module: KernelModule, arguments: Sequence[Any]) -> tuple[Allocation, ...] | None:
    """What the kernel's ``launch`` asks ``memory`` for on such arguments, in order; None where it takes no memory."""
    launch = _launch_of(module.text)
    if "memory" not in inspect.signature(launch).parameters:
        return None
    asked = Asked()
    returned = launch(*arguments, memory=asked)
    results = list(returned) if isinstance(returned, tuple | list) else [returned]
    places = {_storage(item): number for number, item in enumerate(results)}
    return tuple(Allocation(reach(item) or 0, places.get(_storage(item))) for item in asked.tensors)


@lru_cache(maxsize=256)  # a kernel of sixty layers is asked sixty times
def _launch_of(text: str) -> Callable[..., Any]:
    """``launch`` of the kernel file with that text, which launches nothing."""
    names: dict[str, Any] = {**STAND_INS, "cubin": lambda name: _Nothing()}
    host = host_half("kernel", text).replace("INTERPRET = False", "INTERPRET = True", 1)
    exec(compile(host, "kernel", "exec"), names)
    if "row_state" in names:  # memory that outlives the step, by stream: there is none here
        names["row_state"] = _state
    return names["launch"]


def _state(known: Any, words: int, device: torch.device) -> torch.Tensor:
    """In the place of ``meeting.row_state``."""
    return torch.empty(words, dtype=torch.int32, device=device)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """What views of one tensor have in common, as a key."""
    return StorageWeakRef(tensor.untyped_storage())


class _Nothing:
    """Stands for a kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: None


class Asked:
    """Stands for torch where ``launch`` allocates, and keeps what it hands out."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.empty, self.zeros, self.empty_strided = (
            partial(self._make, make) for make in (torch.empty, torch.zeros, torch.empty_strided)
        )

    def _make(self, make: Callable[..., torch.Tensor], *sizes: Any, **form: Any) -> torch.Tensor:
        self.tensors.append(make(*sizes, **form))
        return self.tensors[-1]
