"""The figure behind ``launches`` of the report."""

from kimigraph.ir.launches import graph_launches
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import CapturedProgram


def count_launches(before: CapturedProgram, after: CapturedProgram, manifest: Manifest) -> dict[str, int]:
    """``launches`` of the report: ``before`` should be the canonicalized graph, ``after`` the one that was built."""
    launches = manifest.launches or graph_launches(after.graph_module.graph)
    return {"before": graph_launches(before.graph_module.graph), "after": launches}
