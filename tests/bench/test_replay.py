"""Which statement of a program a profiler's annotation stands for."""

import itertools
import json
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from kimigraph.bench.replay import PREFIX, annotating, statement_nodes
from kimigraph.compiler import compile_source, read_manifest
from kimigraph.ir.config import CompileConfig
from kimigraph.run import seeded, seeded_weights
from kimigraph.runtime.executor import Executor, laid_out

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step on two streams, as the references compute it."""
    directory = tmp_path_factory.mktemp("artifact") / "step"
    config = CompileConfig(
        target="cpu:reference",
        context=64,
        overrides=(("num_hidden_layers", "4"),),
        force_streams=True,
        cache="off",
        report=False,
    )
    compile_source(EXAMPLE, [config], directory, lambda text: None)
    return directory


def test_each_statement_has_the_name_of_its_node(artifact: Path) -> None:
    text, manifest = (artifact / "program.py").read_text(), read_manifest(artifact)
    labels = statement_nodes(text, manifest)
    lines = text.splitlines()
    named = {record.name for record in manifest.kernels if record.op not in ("latent_write", "index_key_write")}
    assert named <= set(labels.values())
    for line, name in labels.items():
        assert name and not lines[line - 1].lstrip().startswith(("del ", "return", "with "))


def test_every_statement_runs_under_its_annotation(artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(artifact)
    bound = seeded_weights(manifest) | {s.source: seeded(s, manifest) for s in manifest.bound if s.kind == "buffer"}
    executor = Executor(artifact, bound)
    tensors = [laid_out(seeded(spec, manifest), spec) for spec in executor.caller_inputs]
    labels = statement_nodes((artifact / "program.py").read_text(), manifest)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, annotating(artifact / "program.py", labels):
        executor(*tensors)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    notes = [event for event in events if str(event.get("name", "")).startswith(PREFIX) and event.get("ph") == "X"]
    assert {event["name"].removeprefix(PREFIX) for event in notes} == set(labels.values())
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in notes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
