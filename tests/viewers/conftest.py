"""Helpers beside the tests are imported by their plain names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
