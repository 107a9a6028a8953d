"""Several shapes of one source, compiled side by side in processes of their own."""

import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from kimigraph.ir import errors
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.env import processors
from kimigraph.ir.errors import KimigraphError
from kimigraph.ir.report import CompileReport

Notify = Callable[[str], None]
MOST_WORKERS = 4
"""Processes at most, unless more are asked for: each of them holds a model."""


class Watch(Protocol):
    """Who is told what goes on: ``shape`` is the number of a shape, from 0."""

    def say(self, shape: int, message: str) -> None:
        """A shape has come to another stage."""
        ...

    def done(self, shape: int) -> None:
        """A shape is finished."""
        ...


def compile_shapes(
    source: str, configs: Sequence[CompileConfig], out: Path | None, watch: Watch, jobs: int | None = None
) -> list[CompileReport]:
    """Compile ``source`` once per configuration, ``jobs`` at a time; the reports in the order of the configurations.

    Arguments and errors are those of ``compile_source``. The first shape that fails stops the others; those that were
    finished before stay.
    """
    from kimigraph.compiler import compile_source  # here, as workers do the compiling where there are several

    count = min(jobs or max(1, min(processors() // 2, MOST_WORKERS)), len(configs))
    if count == 1 or any(config.check_numerics for config in configs):
        reports: list[CompileReport] = []
        for shape, config in enumerate(configs):
            notify = _teller(watch, shape)
            reports += compile_source(source, [config], out, notify, below=len(configs) > 1)
            watch.done(shape)
        return reports
    crew = _Crew(source, out, watch, deque(enumerate(configs)))
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(crew.work)
    if crew.failure is not None:
        raise crew.failure
    return [crew.reports[shape] for shape in range(len(configs))]


def _teller(watch: Watch, shape: int) -> Notify:
    return lambda message: watch.say(shape, message)


class _Crew:
    """Threads that each look after one worker process at a time."""

    def __init__(self, source: str, out: Path | None, watch: Watch, waiting: deque[tuple[int, CompileConfig]]) -> None:
        self.source, self.out, self.watch, self.waiting = source, out, watch, waiting
        self.reports: dict[int, CompileReport] = {}
        self.running: set[subprocess.Popen[str]] = set()
        self.failure: BaseException | None = None

    def work(self) -> None:
        """Compile shapes until none waits. The error of one stops all."""
        while self.waiting:
            try:
                shape, config = self.waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self.reports[shape] = self.compile(shape, config)
            except BaseException as error:
                self.failure = self.failure or error  # the others end because of this one
                self.waiting.clear()
                for worker in list(self.running):
                    worker.terminate()
                return
            self.watch.done(shape)

    def compile(self, shape: int, config: CompileConfig) -> CompileReport:
        """One shape in a worker process."""
        request = {"source": self.source, "config": asdict(config), "out": None if self.out is None else str(self.out)}
        command = [sys.executable, "-m", "kimigraph.tools.shape_worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as noise,
            subprocess.Popen(command, **pipes, stderr=noise, text=True, encoding="utf-8") as worker,
        ):
            assert worker.stdin and worker.stdout
            self.running.add(worker)
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.close()
            answer = self._listen(shape, worker.stdout)
            worker.wait()
            self.running.discard(worker)
            noise.seek(0)
            last = noise.read().strip().splitlines()[-1:] or [f"status {worker.returncode}"]
        if "report" in answer:
            return CompileReport(**answer["report"])
        if "error" in answer:
            kind: Any = getattr(errors, answer["kind"], KimigraphError)
            raise kind(answer["error"])
        raise KimigraphError(f"the process that compiled shape {shape + 1} ended without a result: {last[0]}")

    def _listen(self, shape: int, lines: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "say" in message:
                self.watch.say(shape, message["say"])
            else:
                answer = message
        return answer


def config_of(fields: dict[str, Any]) -> CompileConfig:
    """A configuration from its JSON fields, which hold lists for tuples."""

    def tuples(value: Any) -> Any:
        return tuple(tuples(item) for item in value) if isinstance(value, list) else value

    return CompileConfig(**{name: tuples(value) for name, value in fields.items()})


def answer_to(request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Compile what a request asks for; messages, then the report or the error, go to ``say``."""
    from kimigraph.compiler import compile_source

    out = None if request["out"] is None else Path(request["out"])
    try:
        config = config_of(request["config"])
        reports = compile_source(request["source"], [config], out, lambda text: say({"say": text}), below=True)
        say({"report": reports[0].as_dict()})
    except KimigraphError as error:
        say({"error": str(error), "kind": type(error).__name__})
