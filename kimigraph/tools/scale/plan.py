"""Meshes of N GPUs: what fits, what crosses which link, how long a step takes, and which mesh is best."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimigraph.ir.cost import Work
from kimigraph.ir.device import Device, target_device
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.ir.reference.index_exchange import bytes_a_row
from kimigraph.tools.scale.model import BF16, Sizes

NODE = 8
MEMORY = 141e9
KEPT = 0.9
"""Share of a GPU's memory that weights and caches may take."""


@dataclass(frozen=True)
class Link:
    """Bytes per second in one direction, and the seconds that a collective takes however little it moves."""

    bytes_per_second: float
    latency: float

    def all_reduce(self, size: float, ways: int) -> float:
        """Seconds of a sum over ranks of ``size`` bytes each."""
        return 0.0 if ways == 1 else self.latency + 2 * (ways - 1) / ways * size / self.bytes_per_second

    def move(self, size: float) -> float:
        """Seconds until ``size`` bytes are across."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, eight of a node on one link, nodes on another."""

    device: Device
    inside: Link
    between: Link

    def link(self, ways: int) -> Link:
        """What joins that many neighbouring ranks."""
        return self.inside if ways <= NODE else self.between


@dataclass(frozen=True)
class Load:
    """``rows`` sequences of each replica by ``tokens`` a step, behind ``context`` tokens on the mean; ``capacity`` are
    the tokens that a cache has room for."""

    rows: int
    tokens: int
    context: float
    capacity: int


@dataclass(frozen=True)
class Estimate:
    """One mesh under one load. Seconds of a step as a token waits for it, and between steps of one replica."""

    mesh: DeviceMesh
    ep: int
    load: Load
    memory: float
    computing: float
    communicating: float
    link_bytes: dict[str, float]

    @property
    def latency(self) -> float:
        """Seconds from a token to the next of its sequence."""
        return self.computing + self.communicating

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas; stages of a pipeline work on batches of their own at the same time."""
        return self.mesh.dp * self.mesh.pp * self.load.rows * self.load.tokens / self.latency

    @property
    def fits(self) -> bool:
        """Whether weights and caches fit into a GPU."""
        return self.memory <= KEPT * MEMORY


def estimate(sizes: Sizes, cluster: Cluster, mesh: DeviceMesh, ep: int, load: Load) -> Estimate:
    """What a step takes on a mesh; ``ep`` replicas share out the routed experts."""
    n = load.rows * load.tokens
    memory = sizes.weight_bytes(mesh.tp, mesh.pp, ep)
    # Each stage of a pipeline holds the caches of its layers for as many batches as there are stages.
    memory += mesh.pp * load.rows * sizes.cache_bytes(load.capacity, mesh.tp, mesh.pp, mesh.sp)
    work: Work = sizes.step_work(load.rows, load.tokens, load.context, mesh.tp, ep, mesh.sp)
    link = cluster.link(mesh.tp)
    attention, experts = n * sizes.hidden * BF16, n * (sizes.hidden + sizes.expert_hidden) * BF16
    sums = sizes.layers * (link.all_reduce(attention, mesh.tp) + link.all_reduce(experts, mesh.tp))
    ring = 2 * (mesh.tp - 1) / mesh.tp
    crossed = {"tp": sizes.layers * ring * (attention + experts)}
    seconds = sums
    if mesh.tp > mesh.sp == 1 and load.rows % mesh.tp == 0:
        picks = n * sizes.picks * 4 * (mesh.tp - 1) / mesh.tp
        crossed["tp"] += sizes.sparse * picks
        seconds += sizes.sparse * link.move(picks)
    if ep > 1:
        sent = n * sizes.experts_a_token * sizes.expert_hidden * BF16 / mesh.tp * (ep - 1) / ep
        crossed["ep"] = sizes.layers * 2 * sent
        seconds += sizes.layers * 2 * cluster.link(ep * mesh.tp).move(sent)
    if mesh.pp > 1:
        blocks = n * sizes.hidden * BF16 * (1 + sizes.residual_blocks / 2) / mesh.tp
        crossed["pp"] = blocks
        seconds += (mesh.pp - 1) * cluster.link(2 * NODE if mesh.tp * mesh.pp > NODE else 2).move(blocks)
    if mesh.sp > 1:
        told = bytes_a_row(sizes.picks, 1)["pruned"]
        crossed["sp"] = sizes.sparse * n * (told + sizes.heads / mesh.tp * 1028)
        seconds += sizes.sparse * 4 * link.move(crossed["sp"] / sizes.sparse / 4)
    return Estimate(mesh, ep, load, memory, work.seconds(cluster.device), seconds, crossed)


def meshes(sizes: Sizes, gpus: int) -> Iterator[tuple[DeviceMesh, int]]:
    """Every mesh of that many GPUs, with each way to share experts out over replicas. tp stays within two nodes."""
    for tp in (1, 2, 4, 8, 16):
        for pp in (1, 2, 4, 8):
            if gpus % (tp * pp) or sizes.heads % tp:
                continue
            dp = gpus // (tp * pp)
            for ep in {1, dp}:
                for sp in {1, tp}:
                    yield DeviceMesh(dp=dp, pp=pp, tp=tp, sp=sp, over_tp=True), ep


def best(
    sizes: Sizes, cluster: Cluster, gpus: int, loads: list[Load], slowest: float, for_latency: bool = False
) -> Estimate | None:
    """The mesh with most tokens per second whose steps take at most ``slowest`` seconds, or with the quickest step.

    None where nothing fits.
    """
    found = [
        one
        for mesh, ep in meshes(sizes, gpus)
        for load in loads
        if (one := estimate(sizes, cluster, mesh, ep, load)).fits and one.latency <= slowest
    ]
    if for_latency:
        return min(found, key=lambda one: one.latency, default=None)
    return max(found, key=lambda one: one.tokens_per_second, default=None)


NVLINK, INFINIBAND = Link(360e9, 12e-6), Link(45e9, 25e-6)
"""Assumed where nothing was measured: H200 boards, and 400 Gb/s a GPU between nodes."""


def cluster_of(measured: Path | None) -> tuple[Cluster, str]:
    """H200s, their links calibrated by a run on two GPUs where there is one, and where the figures are from."""
    nodes = Cluster(target_device("cuda"), NVLINK, INFINIBAND)
    if measured is None or not measured.exists():
        return nodes, "assumed: no run on two GPUs is in bench/results"
    rows: list[dict[str, Any]] = json.loads(measured.read_text(encoding="utf-8"))["collectives_us"]
    small, large = rows[0], rows[-1]
    latency, whole = small["all_reduce"] * 1e-6, large["all_reduce"] * 1e-6
    rate = (large["bytes"] - small["bytes"]) / max(whole - latency, 1e-9)
    return replace(nodes, inside=Link(rate, latency)), f"measured on two GPUs: bench/results/{measured.name}"
