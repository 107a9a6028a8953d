"""The exchange of candidates in one launch, by ranks that are processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path


def test_ranks_that_share_memory_find_what_the_reference_gives() -> None:
    script = Path(__file__).with_name("ranks_of_exchange.py")
    path = os.pathsep.join([str(script.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    line = [sys.executable, "-W", "ignore", str(script)]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=180, check=False)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stdout + ended.stderr
