"""Why a compilation would hit or miss, found without compiling."""

from collections.abc import Callable
from typing import Any

from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.keys import front_components
from kimigraph.runtime.cache import digest
from kimigraph.runtime.cache.explain import nearest
from kimigraph.session import new_session


def why(source: str, config: CompileConfig, notify: Callable[[str], None]) -> dict[str, Any]:
    """Status, keys, reason, and every component in which the nearest stored request differs."""
    with new_session(config, notify) as session:
        model = load_source(source, config)
        asked = front_components(model.key, config, session.pipeline, session.target, model.shape_key)
        found = session.cache.find_front(asked)
        near = nearest(session.cache.place, asked) if found.entry is None else None
    return {
        "source": model.name,
        "status": "hit" if found.entry is not None else session.cache.status,
        "front_key": digest(asked),
        "graph_key": found.graph_key,
        "reason": found.reason,
        "nearest": near.graph_key if near is not None else "",
        "differences": [
            {"component": name, "stored": stored, "asked": wanted} for name, stored, wanted in near.differences
        ]
        if near is not None
        else [],
    }
