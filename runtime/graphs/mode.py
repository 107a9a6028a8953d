"""What a user of graph mode holds: it adopts executors, and their steps run as CUDA graphs from then on."""

from collections.abc import Sequence

import torch

from kimigraph.adapters.cuda_graphs import CudaGraphs
from kimigraph.ir.config import MAX_GRAPHS
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.executor import Executor, device_of, require_runnable
from kimigraph.runtime.graphs.program import ProgramGraphs
from kimigraph.runtime.graphs.refusal import GraphCaptureError, refuse_listed, without_graph
from kimigraph.runtime.graphs.shelf import GraphDevice, Shelf


class GraphMode:
    """Runs the programs of its executors as CUDA graphs, at most ``max_graphs`` of them, the least recently used first
    to go.

    A graph holds the addresses of caches, states and weights, and belongs to them: a step on others is captured anew,
    and finds its graph again when the former come back. What else a caller gives (ids, lengths, slots, tables) is
    copied into buffers of the graph's before each replay. A step on tensors that come for the first time runs without a
    graph, and so warms up all that happens once; when they come again it is captured, which runs nothing, and replayed.
    So a capture leaves no trace in caches or states, and caches that are new with every step are never captured.

    Steps on one device go one after the other, on whatever stream the caller is, and are ordered on it as any other
    work; inside a capture of the caller's they are refused. Results lie in memory of their own; with ``reuse_outputs``
    they lie in the graph's, hold until the next step, and a replay allocates nothing.
    """

    def __init__(self, device: GraphDevice, max_graphs: int = MAX_GRAPHS, *, reuse_outputs: bool = False) -> None:
        """``graph_mode`` makes one for a target. UsageError for less than one graph."""
        self._shelf = Shelf(device, max_graphs, reuse_outputs)

    @property
    def captured(self) -> int:
        """How many graphs there are now."""
        return len(self._shelf)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was captured, and why again; the latest hundred are kept."""
        return tuple(self._shelf.remarks)

    def adopt(self, executor: Executor, optional: bool = False) -> None:
        """Run the executor's steps as graphs from now on.

        UsageError where another graph mode does so, GraphCaptureError where the program has a node that no graph holds.
        ``optional``: such a program runs without a graph, as it would outside graph mode, after a GraphModeWarning.
        """
        try:
            refuse_listed(executor.manifest)
        except GraphCaptureError as error:
            if not optional:
                raise
            self._shelf.warn(without_graph(error))
        else:
            executor.take_steps(ProgramGraphs(executor, self._shelf, optional))

    def capture(self, executor: Executor, tensors: Sequence[torch.Tensor]) -> None:
        """Capture the executor's step on the caller's ``tensors`` now; none of them changes.

        What has to run once runs on copies of the caches, unless a step ran before.
        """
        with executor.guard():
            _graphs_of(executor).prepare(executor.arguments(tensors))

    def forget(self, executor: Executor) -> None:
        """Drop the graphs of an executor that goes."""
        self._shelf.forget(id(_graphs_of(executor)))


def graph_mode(target: str, max_graphs: int = MAX_GRAPHS, *, reuse_outputs: bool = False) -> GraphMode:
    """Graph mode for programs of ``target``; UsageError for one that has no CUDA graphs, or that cannot run here."""
    if not target.startswith("cuda"):
        raise UsageError(
            f"graph mode replays CUDA graphs, and programs of target {target!r} run on the CPU: leave cuda_graph "
            "(--cuda-graph) out, or compile with target 'cuda'"
        )
    require_runnable(target)
    return GraphMode(CudaGraphs(device_of(target)), max_graphs, reuse_outputs=reuse_outputs)


def _graphs_of(executor: Executor) -> ProgramGraphs:
    if not isinstance(executor.stepper, ProgramGraphs):
        raise UsageError("the executor is in no graph mode: adopt() it first")
    return executor.stepper
