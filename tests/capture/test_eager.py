"""The eager model in a process of its own gives what it gives in this one."""

from pathlib import Path

import pytest
import torch
from tiny_models import DEEPSEEK, write_model

from kimigraph.capture import capture, load_source
from kimigraph.capture.eager import eager_step, eager_steps
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError

CONFIG = CompileConfig(batch=2, context=16, overrides=(("index_topk", "4"),))


def test_steps_of_another_process(tmp_path: Path) -> None:
    directory = write_model(tmp_path, DEEPSEEK)
    source = load_source(directory, CONFIG)
    specs = capture(source, CONFIG).inputs
    empty, full = eager_steps(directory, CONFIG, (0, None))
    for step, length in ((empty, 0), (full, 15)):
        here = eager_step(source, length)
        assert set(step.outputs) == {"logits"}
        assert set(step.inputs) == set(here.inputs) == {spec.source for spec in specs if spec.mutated}
        torch.testing.assert_close(step.outputs, here.outputs, rtol=0, atol=0)
        torch.testing.assert_close(step.inputs, here.inputs, rtol=0, atol=0)
    assert full.inputs["cache.1.length"].item() == 16
    assert not torch.equal(empty.outputs["logits"], full.outputs["logits"])


def test_its_complaint_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"failed in its own process: .* has no config\.json"):
        eager_steps(str(tmp_path), CONFIG)
