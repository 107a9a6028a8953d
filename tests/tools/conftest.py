"""A captured K3.1 at toy width, four layers deep; ways to run an outside pass on it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, run_pipeline

SOURCE = Path(__file__).parents[2] / "examples" / "k31_tiny"
CONFIG = CompileConfig(context=64, batch=2, overrides=(("num_hidden_layers", "4"),))


@pytest.fixture(scope="session")
def wrong() -> ModuleType:
    """The table of wrong rewrites and the pass that makes them, imported under its file's name."""
    path = Path(__file__).with_name("wrong_rewrites.py")
    spec = importlib.util.spec_from_file_location("wrong_rewrites", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wrong_rewrites"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def config() -> CompileConfig:
    return CONFIG


@pytest.fixture(scope="session")
def captured() -> CapturedProgram:
    return capture(load_source(str(SOURCE), CONFIG), CONFIG)


@pytest.fixture(scope="session")
def canonical(captured: CapturedProgram) -> CapturedProgram:
    """The program after canonicalize: what an outside pass behind it sees."""
    program = captured.copy()
    run_pipeline(program, Pipeline.parse("canonicalize"), PassContext(CONFIG))
    return program
