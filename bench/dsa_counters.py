"""Counters of the indexer's and the attention's kernels, read by ncu: where the peers come nearest, or anywhere.

    PYTHONPATH=. python bench/dsa_counters.py --out bench/results/dsa_counters.json
    PYTHONPATH=. python bench/dsa_counters.py --only "attention H128" --out attention_counters.json

Kernels that read a cache find the L2 cache empty; those that select from scores find it as it is. Clocks are left as
they are. A kernel stands alone here: what launches save by overlapping is in ``kimigraph bench li``.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kimigraph.bench import indexer_prefill, lightning_indexer, sparse_attention
from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for

INDEXER = (
    (1, 32768, 2048), (1, 131072, 2048), (8, 131072, 2048), (64, 8192, 2048), (64, 32768, 2048), (64, 131072, 2048),
    (8, 131072, 128), (64, 32768, 128), (64, 131072, 128),
)  # fmt: skip
"""Batch, length, k."""
NEAREST = (
    "indexer B1 L131072 k2048", "indexer B8 L131072 k2048", "indexer B64 L131072 k128", "indexer B64 L8192 k2048",
)  # fmt: skip
"""Where the peers come nearest: about a minute."""
PROMPTS = (8192, 32768, 131072)
ATTENTION = ((64, 1), (64, 8), (64, 64), (128, 1), (128, 8), (128, 64))
"""Heads, batch."""
COLD = ("score_rows", "score_prompt", "attend_with_warps")
WARM = ("select_codes", "select_bounded")
SECTIONS = (
    "SpeedOfLight", "Occupancy", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis", "LaunchStats",
)  # fmt: skip
NAMES = {
    "gpu__time_duration.sum": "us",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "lts__t_sector_hit_rate.pct": "L2 hit %",
    "l1tex__t_sector_hit_rate.pct": "L1 hit %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "smsp__issue_active.avg.per_cycle_active": "issued a cycle",
    "smsp__warps_eligible.avg.per_cycle_active": "eligible warps",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "programs",
    "launch__block_size": "threads",
    "launch__cluster_size": "cluster",
}
STALL = "smsp__average_warps_issue_stalled_"
IN_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def indexer(batch: int, length: int, picks: int) -> None:
    """One call, on keys of its own."""
    given = lightning_indexer.inputs(batch, length, sets=1)
    lightning_indexer.kernel_of(given, picks).launch(*given.operands(0))


def prompt(length: int) -> None:
    """A prompt's rows, slab by slab, of which the first is read."""
    given = indexer_prefill.inputs(length)
    indexer_prefill.kernel_of(given).launch(*given.operands())


def attention(heads: int, batch: int) -> None:
    """One call over listed rows."""
    given = sparse_attention.inputs(heads, batch)
    names = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.operands(0), strict=True))
    attributes = {"scale": sparse_attention.SCALE, "descriptor": sparse_attention.FORM}
    kernel_for("sparse_attention", tensors, attributes).launch(*given.operands(0))


def cases() -> dict[str, tuple[Any, ...]]:
    """What is launched, by a name for people."""
    found: dict[str, tuple[Any, ...]] = {}
    for batch, length, picks in INDEXER:
        found[f"indexer B{batch} L{length} k{picks}"] = (indexer, batch, length, picks)
    for length in PROMPTS:
        found[f"prompt of 8192 rows, L{length}"] = (prompt, length)
    for heads, batch in ATTENTION:
        found[f"attention H{heads} B{batch}"] = (attention, heads, batch)
    return found


def launch(names: list[str]) -> None:
    """The cases in turn, each between two markers that ncu lists, too."""
    torch.manual_seed(0)
    known = cases()
    marker = torch.zeros(1, device="cuda")
    for name in names:
        function, *arguments = known[name]
        marker.lgamma_()
        function(*arguments)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def profile(names: list[str], kernels: tuple[str, ...], cold: bool) -> list[dict[str, Any]]:
    """The first launch of each kernel of each case, as ncu's raw page has it."""
    pattern = "|".join((*kernels, "lgamma"))
    command = ["ncu", "--clock-control", "none", "--cache-control", "all" if cold else "none", "--csv", "--page", "raw"]
    for section in SECTIONS:
        command += ["--section", section]
    command += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{pattern}"]
    command += [sys.executable, __file__, "--launch", json.dumps(names)]
    out = subprocess.run(command, capture_output=True, text=True)
    lines = out.stdout.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu gave no table:\n{out.stdout[-2000:]}\n{out.stderr[-2000:]}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, launches = rows[0], rows[1:]
    found: list[dict[str, Any]] = []
    case, seen = -1, set[str]()
    for row in launches:
        kernel = next((name for name in kernels if name in row["Kernel Name"]), None)
        if kernel is None:
            case, seen = case + 1, set()
        elif kernel not in seen:
            seen.add(kernel)
            found.append({"case": names[case], "kernel": kernel, **counters(row, units)})
    return found


def counters(row: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    """The named numbers, and the four commonest reasons why a warp does not issue, in warps a cycle."""
    numbers: dict[str, Any] = {}
    for name, short in NAMES.items():
        text = row.get(name, "").replace(",", "")
        if text:
            value = float(text) * (IN_US.get(units[name], 1.0) if short == "us" else 1.0)
            numbers[short] = round(value, 2)
    stalls = {
        name.removeprefix(STALL).split("_per_")[0]: float(text.replace(",", ""))
        for name, text in row.items()
        if name and name.startswith(STALL) and name.endswith("_per_issue_active.ratio") and text
    }
    largest = sorted(stalls.items(), key=lambda item: -item[1])[:4]
    numbers["stalls"] = {name: round(value, 2) for name, value in largest}
    return numbers


def main() -> None:
    """Two runs of ncu: one for what reads caches, one for what reads scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="cases whose name contains this; an empty text is all, some minutes")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch:
        launch(json.loads(arguments.launch))
        return
    known: list[str] = list(cases())
    names = [name for name in known if (name in NEAREST if arguments.only is None else arguments.only in name)]
    selecting = [name for name in names if not name.startswith("attention")]
    found: list[dict[str, Any]] = []
    for some, kernels, cold in ((names, COLD, True), (selecting, WARM, False)):
        new = profile(some, kernels, cold) if some else []
        for one in new:
            print(json.dumps(one), flush=True)
        found = sorted([*found, *new], key=lambda one: (names.index(one["case"]), one["kernel"]))
        if arguments.out:
            command = "PYTHONPATH=. python bench/dsa_counters.py --out bench/results/dsa_counters.json"
            document = {"machine": machine(), "command": command, "kernels": found}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
