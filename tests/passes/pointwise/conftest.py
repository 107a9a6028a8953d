import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("random_programs", Path(__file__).with_name("random_programs.py"))
assert _SPEC is not None and _SPEC.loader is not None
if _SPEC.name not in sys.modules:
    sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[_SPEC.name])
