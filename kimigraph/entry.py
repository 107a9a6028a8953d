"""Makes ``torch.compile(model, backend="kimigraph")`` work where kimigraph is on the path but not installed.

torch looks its backends up among the entry points of installed distributions, when a backend is first named. Here a
source tree answers as a distribution would; an installed kimigraph answers first. Nothing of torch is imported.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

ENTRY_POINTS = "[torch_dynamo_backends]\nkimigraph = kimigraph.torch_compile:backend\n"


class SourceTree(Distribution):
    """The distribution that this source tree would be: its name, its version and the backend."""

    def __init__(self, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: kimigraph\nVersion: {version}\n",
            "entry_points.txt": ENTRY_POINTS,
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parents[1] / path


class SourceTreeFinder(DistributionFinder):
    """Finds the source tree after everything that is installed; imports nothing."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """No module comes from here."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Any]:
        if context is None or context.name in (None, "kimigraph"):
            yield SourceTree(self._version)


def offer_backend(version: str) -> None:
    """Let torch find the backend. Where torch has looked its backends up already, it is told."""
    if not any(isinstance(finder, SourceTreeFinder) for finder in sys.meta_path):
        sys.meta_path.append(SourceTreeFinder(version))
    if "torch._dynamo.backends.registry" in sys.modules:
        import_module("kimigraph.adapters.dynamo").register_backend()
