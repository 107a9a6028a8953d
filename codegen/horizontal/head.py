"""What a kernel file of a horizontal region begins with."""

HEAD = """
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS: dict[str, Any] = {options}
"""
