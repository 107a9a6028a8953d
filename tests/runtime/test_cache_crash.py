"""Many processes on one cache, killed at every boundary of what they write."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kimigraph

WORKERS = """
import json, os, random, shutil, signal, sys
from collections import Counter, deque
from pathlib import Path

from kimigraph.runtime.cache import CompileCache, Entry, Place, digest
from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.entries import load_entry

assert "torch" not in sys.modules  # forking is safe
ROOT, MADE, PROCESSES, KEYS, ROUNDS, TIMES = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:7])
BOUNDARIES = [
    "mkdir", "mkdir done", "write", "write half", "fsync", "fsync done", "fsync directory", "fsync directory done",
    "rename", "rename done", "replace", "replace done",
]


def front(key):
    return {"model": {"key": key}}


def graph(key):
    return {"graph": f"graph of {key}"}


def text(key):
    return f"step = {key}\\n" * 50


def make(key, folder):
    (folder / "artifact" / "kernels").mkdir(parents=True)
    (folder / "dumps").mkdir()
    (folder / "artifact" / "program.py").write_text(text(key))
    (folder / "artifact" / "kernels" / "a.cubin").write_bytes(bytes([key]) * 5000)
    (folder / "dumps" / "000.py").write_text("dump")
    return Entry(graph(key), folder / "artifact", folder / "dumps", {"phase": "decode"}, {"model": str(key)})


def right(entry, key):
    return entry.files["artifact/program.py"].decode() == text(key) and entry.components == graph(key)


def work(number, deadly, skip):
    seen = Counter()

    def boundary(step):
        seen[step] += 1
        if step == deadly and seen[step] > skip:
            os.kill(os.getpid(), signal.SIGKILL)

    cache = CompileCache(ROOT, disk=Disk(boundary))
    for step in range(KEYS):
        key = (number + step) % KEYS
        found = cache.find_front(front(key))
        if found.entry is None:
            with cache.compiling(digest(front(key)), lambda _: None):
                found = cache.find_front(front(key))
                if found.entry is None:
                    with (MADE / "compiled").open("a") as log:
                        log.write(f"{key}\\n")
                    folder = MADE / f"{os.getpid()}-{key}"
                    cache.store(front(key), make(key, folder))
                    assert cache.warning == "", cache.warning
                    found = cache.find_front(front(key))
        assert found.entry is not None and right(found.entry, key), (key, found.reason)


def spawn(number, deadly, skip):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(number, deadly, skip)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def check(whole):
    place = Place(ROOT)
    entries = list(place.entries())
    for path in entries:
        key = int(json.loads((path / "key.json").read_text())["graph"].rpartition(" ")[2])
        assert right(load_entry(path, path.name, dumps=True), key)
    assert len(entries) == KEYS if whole else len(entries) <= KEYS
    for key in range(KEYS):
        found = CompileCache(ROOT, mode="readonly").find_front(front(key), dumps=True)
        assert found.entry is not None if whole else "corrupt" not in found.reason, found.reason
    assert not list(place.bad.glob("*"))
    assert not whole or not place.foreign()


kills = Counter()
random.seed(0)
rounds = 0
while rounds < ROUNDS or (TIMES and min(kills[name] for name in BOUNDARIES) < TIMES):
    rounds += 1
    assert rounds <= 20 * max(ROUNDS, TIMES)
    shutil.rmtree(ROOT, ignore_errors=True)
    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir()
    wanted = deque(sorted(BOUNDARIES, key=lambda name: (kills[name], random.random())) if TIMES else [])
    running = {}
    for number in range(PROCESSES):
        deadly = wanted.popleft() if wanted else None
        running[spawn(number, deadly, random.randrange(3))] = number, deadly
    while running:
        child, status = os.wait()
        number, deadly = running.pop(child)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills[deadly] += 1
            check(whole=False)
            deadly = wanted.popleft() if wanted else None
            running[spawn(number, deadly, random.randrange(3))] = number, deadly
        else:
            assert os.WEXITSTATUS(status) == 0, status
    check(whole=True)
    if not TIMES:
        assert sorted((MADE / "compiled").read_text().split()) == sorted(str(key) for key in range(KEYS))
print(json.dumps({"rounds": rounds, "kills": kills}))
"""


def run(tmp_path: Path, processes: int, keys: int, rounds: int, times: int) -> dict[str, Any]:
    """Workers in a process of their own; the last arguments: rounds at least, and kills at each boundary."""
    root = str(Path(kimigraph.__file__).parent.parent)
    numbers = [str(number) for number in (processes, keys, rounds, times)]
    ran = subprocess.run(
        [sys.executable, "-c", WORKERS, str(tmp_path / "root"), str(tmp_path / "made"), *numbers],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_each_key_is_compiled_by_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, processes=8, keys=4, rounds=1, times=0)["rounds"] == 1


def test_processes_killed_while_they_write_leave_a_valid_cache(tmp_path: Path) -> None:
    done = run(tmp_path, processes=4, keys=3, rounds=1, times=1)
    assert len(done["kills"]) == 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_processes_eight_keys_every_boundary_twenty_times(tmp_path: Path) -> None:
    done = run(tmp_path, processes=8, keys=8, rounds=20, times=20)
    assert done["rounds"] >= 20
    assert len(done["kills"]) == 12 and min(done["kills"].values()) >= 20
