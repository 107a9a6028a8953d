"""The cost model: what bounds a call, what a call does not touch, what fusing saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.cost import Work, fused_work, graph_seconds, serial_seconds, work_of
from kimigraph.ir.device import Device, device_for, parse_device, read_device_file, target_device
from kimigraph.ir.errors import UsageError
from kimigraph.ir.regions import extract_region

BF16 = torch.bfloat16
H200 = target_device("cuda:sm_90")


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*tensors).graph


def calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def only(graph: Graph) -> Work:
    """The work of the one call that starts any."""
    [work] = [work_of(node) for node in graph.nodes if work_of(node).launches]
    return work


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_the_larger_of_bytes_and_flops_decides_and_launches_come_on_top() -> None:
    launch = H200.launch_seconds + H200.latency_seconds
    copied, wide, narrow = (int(H200.bytes_per_second), int(H200.rate("float32")), int(H200.rate("bfloat16")))
    assert Work(copied // 1000, {"bfloat16": 1}, 1).seconds(H200) == pytest.approx(1e-3 + launch)
    assert Work(1, {"bfloat16": narrow}, 2).seconds(H200) == pytest.approx(1 + 2 * launch)
    assert Work(1, {"float32": wide}).seconds(H200) == pytest.approx(1.0)
    assert Work(0, {"float32": wide, "bfloat16": narrow}).seconds(H200) == pytest.approx(2.0)


def test_work_adds_up_by_unit() -> None:
    both = Work(3, {"vector": 1, "bfloat16": 2}, 1) + Work(4, {"vector": 5}, 2)
    assert both == Work(7, {"vector": 6, "bfloat16": 2}, 3)
    assert both.total_flops == 8


def test_a_product_counts_its_operands_and_its_multiply_adds() -> None:
    work = only(graph_of(torch.mm, meta(3, 4096, dtype=BF16), meta(4096, 512, dtype=BF16)))
    assert work == Work(2 * (3 * 4096 + 4096 * 512 + 3 * 512), {"bfloat16": 2 * 3 * 4096 * 512}, 1)


def test_a_lookup_reads_its_rows_alone() -> None:
    rows = torch.empty(8, dtype=torch.int64, device="meta")
    work = only(graph_of(lambda t, i: torch.nn.functional.embedding(i, t), meta(1_000_000, 64), rows))
    assert work.bytes == 2 * 8 * 64 * 4 + 8 * 8


def test_a_write_into_a_cache_costs_what_is_written() -> None:
    rows = torch.empty(1, dtype=torch.int64, device="meta")
    work = only(graph_of(lambda c, i, x: c.index_copy_(0, i, x), meta(1_000_000, 512), rows, meta(1, 512)))
    assert work.bytes == 2 * 512 * 4 + 8


def test_an_update_in_place_reads_and_writes_the_whole_target() -> None:
    assert only(graph_of(lambda a, b: a.add_(b), meta(64), meta(64))).bytes == 3 * 64 * 4
    assert only(graph_of(lambda a, b: a.copy_(b), meta(64), meta(64))).bytes == 2 * 64 * 4


def test_what_an_expanded_tensor_repeats_counts_once() -> None:
    work = only(graph_of(lambda a, b: a.expand(1000, 64) + b, meta(1, 64), meta(1000, 64)))
    assert work.bytes == (64 + 2 * 64_000) * 4


def test_views_are_free_and_a_reshape_that_copies_is_not() -> None:
    graph = graph_of(lambda x: x.view(4, 4).transpose(0, 1) + 1, meta(16))
    assert [name.partition("_")[0] for name in graph_seconds(graph, H200)] == ["add"]
    graph = graph_of(lambda x: torch.ops.aten.reshape.default(x, [8]), meta(8, dtype=BF16))
    assert graph_seconds(graph, H200) == {}

    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = meta(4, 16)[:, :8]
    flat = graph.call_function(torch.ops.aten.reshape.default, (x, [32]))
    flat.meta["val"] = meta(32)
    graph.output((flat,))
    assert work_of(flat) == Work(2 * 32 * 4, {"vector": 32}, 1)


def test_fusing_keeps_values_inside_and_launches_once() -> None:
    graph = graph_of(lambda a, b: torch.sigmoid(a + b) * b, meta(100), meta(100))
    nodes = calls(graph)
    together = fused_work(nodes)
    assert together == Work(3 * 100 * 4, {"vector": 300}, 1)
    apart = serial_seconds(map(work_of, nodes), H200)
    assert apart == pytest.approx(sum(work_of(node).seconds(H200) for node in nodes))
    assert together.seconds(H200) < apart


def test_fusing_reads_a_shared_operand_once_and_keeps_product_flops() -> None:
    graph = graph_of(lambda x, a, b: (x @ a, x @ b), meta(2, 64), meta(64, 8), meta(64, 16))
    assert fused_work(calls(graph)) == Work(4 * (2 * 64 + 64 * 24 + 2 * 24), {"float32": 2 * 2 * 64 * 24}, 1)


def test_a_view_of_an_inner_value_is_an_inner_value() -> None:
    graph = graph_of(lambda x: (x + 1).view(5, 20).transpose(0, 1) * 2, meta(100))
    assert fused_work(calls(graph)).bytes == 2 * 100 * 4


def test_a_region_costs_what_its_nodes_cost_as_one_kernel() -> None:
    traced = make_fx(lambda a, b: torch.sigmoid(a + b) * b, tracing_mode="fake")(meta(100), meta(100))
    wanted = fused_work(calls(traced.graph))
    call = extract_region(traced, calls(traced.graph), "fused", "pointwise")
    assert work_of(call) == wanted
    assert list(graph_seconds(traced.graph, H200)) == [call.name]


def test_a_remark_can_say_what_it_costs() -> None:
    device = Device("d", 1e9, {"float32": 1e9}, 1e9, 1e-6)
    assert Work(2_000_000, {"float32": 10**9}, 2).describe(device) == "1000002.00 us (2 MB, 1 GFLOP, 2 launches)"


def test_targets_have_a_device_and_a_file_overrides_it(tmp_path: Path) -> None:
    assert device_for(CompileConfig(target="cuda")).name == "NVIDIA H200"
    assert device_for(CompileConfig(target="cpu:reference")).units == 1
    slow = json.loads(H200.text()) | {"bytes_per_second": 1e9, "name": "slow"}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(slow))
    config = CompileConfig(target="cuda", device=read_device_file(path))
    assert device_for(config).bytes_per_second == 1e9
    assert "device" in config.key_fields()  # its content, so that an edited file is another key


def test_a_device_file_reads_back() -> None:
    assert parse_device(H200.text()) == H200


def test_a_type_without_a_rate_runs_at_the_slowest() -> None:
    assert H200.rate("float64") == H200.rate("float32")
    assert H200.rate("vector") == H200.vector_flops_per_second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_per_second": 0}, "bytes_per_second is 0"),
        ({"launch_seconds": "1"}, "launch_seconds is '1'"),
        ({"launch_seconds": None}, "launch_seconds is None"),
        ({"flops_per_second": {}}, "flops_per_second is missing"),
        ({"flops_per_second": {"bfloat16": -1}}, "flops_per_second.bfloat16 is -1"),
        ({"name": None}, "name is missing"),
        ({"speed": 1}, "'speed' is no field"),
        ({"schema": 2}, '"schema": 1'),
        ({"latency_seconds": float("nan")}, "latency_seconds is nan"),
    ],
)
def test_a_wrong_device_file_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_device(json.dumps(json.loads(H200.text()) | change))


def test_a_device_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    with pytest.raises(UsageError, match=r"device\.json: cannot be read"):
        read_device_file(path)
    path.write_text("{")
    with pytest.raises(UsageError, match=r"device\.json: device file: not JSON"):
        read_device_file(path)
