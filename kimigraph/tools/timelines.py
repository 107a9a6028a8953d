"""``kimigraph timeline``: the planned schedule of an artifact and a measured replay in one file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimigraph.ir.errors import UsageError
from kimigraph.ir.trace import BUBBLE, FILE, Track, read_timeline
from kimigraph.tools.kineto import device_events, median_replay, read_trace, split_replays
from kimigraph.tools.measured import measured_track

SHOWN = 8


@dataclass(frozen=True)
class Timeline:
    """The tracks of one artifact: planned, and measured where that was asked for."""

    planned: Track
    measured: Track | None

    @property
    def tracks(self) -> list[Track]:
        """Those that there are."""
        return [self.planned] if self.measured is None else [self.planned, self.measured]

    def longest_gaps(self) -> list[tuple[str, float]]:
        """What the device, or the caller's stream as planned, waits for longest: name and microseconds."""
        track = self.measured or self.planned
        lane = max(track.lanes) if self.measured is not None else 0
        gaps = [(span.name, span.length) for span in track.spans if span.kind == BUBBLE and span.lane == lane]
        return sorted(gaps, key=lambda gap: -gap[1])[:SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        planned = {"title": self.planned.title, "length_us": round(self.planned.length, 3), **self.planned.facts}
        measured = None if self.measured is None else {"title": self.measured.title, **self.measured.facts}
        gaps = [{"name": name, "us": round(length, 3)} for name, length in self.longest_gaps()]
        return {"planned": planned, "measured": measured, "gaps": gaps}


def planned_timeline(directory: Path) -> Timeline:
    """The planned schedule of an artifact or a directory of dumps. UsageError when it has none."""
    if not (directory / FILE).is_file():
        raise UsageError(f"{directory} holds no {FILE}: name an artifact (compiled with its report) or its dumps")
    return Timeline(read_timeline(directory / FILE)[0], None)


def with_trace(timeline: Timeline, trace: Path, replays: int) -> Timeline:
    """The same with the replay of median length of a profiler trace, which holds ``replays`` of them.

    Kernels keep their own names: a trace alone does not say which node one belongs to.
    """
    replay = median_replay(split_replays(device_events(read_trace(trace)), replays))
    names = [""] * len(replay)
    return Timeline(timeline.planned, measured_track(replay, names, timeline.planned, f"measured: {trace.name}"))


def with_measurement(timeline: Timeline, directory: Path) -> Timeline:
    """The same with a replay of the artifact on this machine's GPU, on seeded tensors."""
    import torch

    from kimigraph.bench.protocol import require_gpu
    from kimigraph.bench.replay import named_replay
    from kimigraph.compiler import read_manifest
    from kimigraph.run import seeded, seeded_weights
    from kimigraph.runtime.executor import Executor, laid_out, require_runnable

    require_gpu()
    manifest = read_manifest(directory)
    require_runnable(manifest.target)
    bound = seeded_weights(manifest) | {
        spec.source: seeded(spec, manifest) for spec in manifest.bound if spec.kind == "buffer"
    }
    executor = Executor(directory, bound, give_up=True)
    tensors = [laid_out(seeded(spec, manifest).to(executor.device), spec) for spec in executor.caller_inputs]
    replay, names, _ = named_replay(directory, lambda: executor(*tensors))
    title = f"measured: one replay on {torch.cuda.get_device_name()}"
    return Timeline(timeline.planned, measured_track(replay, names, timeline.planned, title))
