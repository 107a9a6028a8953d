"""Graph modules that do not turn their graph into Python code until somebody wants it run or read."""

from typing import Any

from torch.fx import GraphModule


class DeferredGraphModule(GraphModule):
    """A GraphModule whose code is made at its first call, or when ``code`` is read, and not at every ``recompile``.

    Passes, printers and interpreters read the graph; writing and compiling the code of a graph of ten thousand nodes
    takes seconds each time.
    """

    def recompile(self) -> Any:
        """Drop the code; the next call makes it anew."""
        type(self).forward = _compile_and_run

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        _compile(self)
        return super().code


def _compile(module: GraphModule) -> None:
    GraphModule.recompile(module)


def _compile_and_run(self: DeferredGraphModule, *args: Any, **kwargs: Any) -> Any:
    _compile(self)
    return self.forward(*args, **kwargs)
