"""The whole of ``kimigraph bisect`` and ``kimigraph reduce``: from a source to a reproducer and a summary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.passes import default_pipeline
from kimigraph.passes.options import print_pass
from kimigraph.tools.bisect import bisect_rewrites, find_failing_pass
from kimigraph.tools.numerics import Reference
from kimigraph.tools.reduce import reduce_program
from kimigraph.tools.reproducer import write_reproducer


def investigate(
    source: str, config: CompileConfig, out: Path | None, shrink: bool, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Find the failing pass of a compilation and the rewrite in it; with ``shrink``, on the smallest part of its graph.

    Writes the reproducer and returns what was found; ``pass`` is None when every pass keeps the result.
    """
    pipeline = default_pipeline(config)
    model = load_source(source, config)
    notify(f"capturing {model.name}")
    captured = capture(model, config)
    failing = find_failing_pass(captured, pipeline, config, notify)
    document: dict[str, Any] = {"source": model.name, "pipeline": str(pipeline), "pass": None}
    if failing is None:
        return document
    found = reduce_program(failing, config, notify) if shrink else bisect_rewrites(failing, captured, config, notify)
    before, failure = found.failing.before, found.failing.failure
    data = [failure.data] if failure.data else []
    path = out or Path(f"{model.name}-{failing.item.name}-{'reduce' if shrink else 'bisect'}.py")
    write_reproducer(path, found, Reference(before, data).tolerances)
    return {
        **document,
        "index": failing.index,
        "pass": print_pass(failing.item),
        "rewrite": found.rewrite.name,
        "number": found.rewrite.number,
        "announced": found.rewrite.count,
        "alone": found.rewrite.alone,
        "kind": failure.kind,
        "failure": failing.failure.message,
        "nodes": len(before.graph_module.graph.nodes),
        "reproducer": str(path),
    }
