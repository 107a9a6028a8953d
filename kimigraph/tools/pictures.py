"""``kimigraph export dot`` and ``export mermaid``: capture, passes, and the graph that they leave as a picture."""

from dataclasses import replace

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.cost import graph_seconds
from kimigraph.ir.device import device_for
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.report.picture import Zoom, draw
from kimigraph.report.picture_text import as_dot, as_mermaid
from kimigraph.session import Notify, pass_context, resolve_target


def picture_text(source: str, config: CompileConfig, zoom: Zoom, layer: int | None, form: str, notify: Notify) -> str:
    """The optimized graph of ``source`` as text in ``form``, ``dot`` or ``mermaid``; weights are not read.

    Raises UsageError for a layer that is not there, and what capture and passes raise.
    """
    config = replace(config, target=resolve_target(config.target))
    model = load_source(source, config)
    notify(f"capturing {model.name}")
    program = capture(model, config, weights=False)
    notify("running passes")
    run_pipeline(program, default_pipeline(config), pass_context(config), [])
    costs = graph_seconds(program.graph_module.graph, device_for(config))
    picture = draw(program, zoom, layer, costs)
    return as_dot(picture) if form == "dot" else as_mermaid(picture)
