"""What capture accepts, refuses and records, on small modules."""

import copy

import pytest
import torch
import toys
from torch import nn

from kimigraph.capture import CaptureHints, InputHint, capture_module
from kimigraph.capture.program import tensors_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError

CONFIG = CompileConfig()
X = torch.ones(2)


def test_arguments_by_name_are_inputs_and_caches() -> None:
    module, kwargs = toys.running_sum()
    program = capture_module(module, (), {**kwargs, "bias": 1.5}, CONFIG)
    callers = [spec for spec in program.inputs if not spec.bound]
    assert [(spec.source, spec.kind, spec.mutated) for spec in callers] == [
        ("x", "input", False),
        ("state.0.sum", "cache", True),
    ]
    assert [spec.source for spec in program.inputs if spec.bound] == ["linear.weight", "linear.bias"]
    assert [output.source for output in program.outputs] == ["output.out"]
    assert program.info["result_leaves"] == ["tensor", {"value": None}]
    want = module(**copy.deepcopy(kwargs), bias=1.5)["out"]
    (got,) = program.graph_module(*tensors_of(program, (), {"x": kwargs["x"], "cache": kwargs["cache"]}))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_capture_leaves_the_given_tensors_alone() -> None:
    module, kwargs = toys.running_sum()
    capture_module(module, (), kwargs, CONFIG)
    assert kwargs["cache"]["state.0.sum"].abs().max() == 0


def test_hints_say_what_the_graph_does_not() -> None:
    module, kwargs = toys.running_sum()
    hints = CaptureHints(
        {"x": InputHint(value_range=(0, 7)), "state.0.sum": InputHint("cache", None, "text")}, ("sum",)
    )
    program = capture_module(module, (), kwargs, CONFIG, hints)
    specs = {spec.source: spec for spec in program.inputs}
    assert specs["x"].value_range == (0, 7) and specs["state.0.sum"].descriptor == "text"
    assert [output.source for output in program.outputs] == ["sum"]


def test_control_flow_on_values_names_the_line_and_the_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"toys\.py:23 decides by the value of a tensor.*torch\.where") as caught:
        capture_module(toys.Branches(), (X,), {}, CONFIG)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_random_numbers_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"aten\.rand\.default in forward, .*toys\.py:30.*model\.eval\(\)"):
        capture_module(toys.Noise(), (X,), {}, CONFIG)


def test_dropout_is_refused_in_training_and_nothing_in_eval() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    with pytest.raises(CaptureError, match=r"dropout.* in 1, "):
        capture_module(module.train(), (X,), {}, CONFIG)
    program = capture_module(module.eval(), (X,), {}, CONFIG)
    torch.testing.assert_close(program.graph_module(*tensors_of(program, (X,), {}))[0], module(X))


@pytest.mark.parametrize("in_list", [False, True])
def test_state_that_nothing_registers_is_refused_and_unharmed(in_list: bool) -> None:
    module = toys.HiddenState(in_list)
    with pytest.raises(CaptureError, match=r"neither an argument nor a registered buffer.*register_buffer"):
        capture_module(module, (X,), {}, CONFIG)
    kept = module.kept[0] if isinstance(module.kept, list) else module.kept
    assert kept.tolist() == [0, 0]


def test_an_error_of_the_model_is_told_in_one_paragraph() -> None:
    with pytest.raises(
        CaptureError, match=r"Linear cannot be captured: RuntimeError.*reduction dim|mat1 and mat2"
    ) as caught:
        capture_module(nn.Linear(3, 3), (torch.ones(2, 5),), {}, CONFIG)
    assert "\n" not in str(caught.value)


def test_tied_weights_are_one_input_and_constants_stay_constants() -> None:
    module = toys.Tied()
    keys = list(module.state_dict())
    program = capture_module(module, (torch.tensor([1, 2]),), {}, CONFIG)
    assert {spec.source: spec.kind for spec in program.inputs} == {
        "embedding.weight": "weight",
        "scale": "weight",
        "table": "constant",
        "shift": "constant",
        "ids": "input",
    }
    assert list(module.state_dict()) == keys and module.head.weight is module.embedding.weight
    assert program.tensors["w_embedding_weight"].data_ptr() == module.embedding.weight.data_ptr()


def test_unknown_operators_stay() -> None:
    @torch.library.custom_op("kimigraph_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @mystery.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.kimigraph_test.mystery(x) + 1

    program = capture_module(Uses(), (X,), {}, CONFIG)
    assert [str(node.target) for node in program.graph_module.graph.nodes if node.op == "call_function"] == [
        "kimigraph_test.mystery.default",
        "aten.add.Tensor",
    ]
