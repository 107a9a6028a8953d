"""Starts the ranks of a command on this machine through torchrun's elastic agent, and tells which one failed first."""

import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from signal import SIGTERM
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kimigraph.ir import env
from kimigraph.ir.errors import KimigraphError

_LOST = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|c10d|store|peer", re.IGNORECASE)
"""What a rank says that lost another one: not why the program ended."""


class RankFailedError(KimigraphError):
    """A rank of a program failed; the others were stopped."""


def launch(ways: int, arguments: Sequence[str], module: str = "kimigraph") -> None:
    """Run ``python -m`` ``module`` with ``arguments`` as ``ways`` ranks on this machine, and wait for them.

    The agent stops all ranks as soon as one ends badly. Raises RankFailedError with the first error and its rank.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    env.one_thread_each()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ways,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"kimigraph-{time.time_ns()}",
        max_restarts=0,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        raise RankFailedError(f"rank {rank} of {ways} failed: {_told(failure)}") from None


def first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    """Rank and record of the failure that came first: what the agent caused, or the loss of another, comes later."""

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode == -SIGTERM, bool(_LOST.search(_told(failure))), int(failure.timestamp), rank

    return min(failures.items(), key=order)


def record_failure(message: str) -> None:
    """Leave ``message`` for the agent that started this process, if one did."""
    path = env.rank_error_file()
    if path is not None:
        info = {"py_callstack": "", "timestamp": str(int(time.time()))}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": info}}), encoding="utf-8")


def _told(failure: Any) -> str:
    message = failure.message
    return " ".join(str(message["message"] if isinstance(message, dict) else message).split())
