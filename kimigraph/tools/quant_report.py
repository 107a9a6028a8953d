"""``kimigraph quant-report``: what a policy saves and what it costs, layer by layer and in the final distribution."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.fx import Interpreter

from kimigraph.capture import capture, load_source
from kimigraph.ir.cache_formats import cache_bill, experts_bill, given_to
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.policy import Policy, policy_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.remarks import Remark
from kimigraph.passes import PassContext, Pipeline, default_pipeline, run_pipeline
from kimigraph.tools.prompts import Prompts
from kimigraph.tools.quant_layers import LayerCost, LayerProbe, Noise

NAME = "insert-quantization"


@dataclass
class Final:
    """The outputs of both programs beside one another. Divergence is KL(plain || quantised) in nats."""

    noise: Noise = field(default_factory=Noise)
    divergence: list[float] = field(default_factory=lambda: [])
    agree: int = 0

    def add(self, plain: torch.Tensor, quantised: torch.Tensor) -> None:
        """Count the logits of a step, [..., V]."""
        self.noise.add(plain, quantised)
        want, got = (x.double().flatten(0, -2).log_softmax(-1) for x in (plain, quantised))
        self.divergence += (want.exp() * (want - got)).sum(-1).tolist()
        self.agree += int((want.argmax(-1) == got.argmax(-1)).sum())

    def document(self) -> dict[str, Any]:
        """Figures by name."""
        count = len(self.divergence)
        return {
            "logits_error": self.noise.relative,
            "divergence": sum(self.divergence) / max(count, 1),
            "worst_divergence": max(self.divergence, default=0.0),
            "same_first_token": self.agree / max(count, 1),
            "tokens": count,
        }


def quant_report(source: str, config: CompileConfig, steps: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """The document of ``config.policy`` on ``source``: layers, final distribution, memory, what is out of tolerance.

    The plain program runs over seeded prompts; at each indexer, attention and block of experts the policy's operators
    run on the same values. Beside it the quantised program runs over the same prompts from caches of its own.
    UsageError for a policy that quantises nothing, or a model in which it finds nothing.
    """
    policy = policy_of(config.policy)
    if not policy.quantises:
        raise UsageError(f"policy '{policy.name}' quantises nothing: give --policy article, deepseek or a file")
    torch.manual_seed(config.seed)
    model = load_source(source, config)
    notify(f"capturing {model.name}")
    captured = capture(model, config)
    plain, quantised, remarks = _both(captured, config)
    prompts = Prompts(model, captured, steps, config.seed)
    records = quantised.info["quantization"]
    packed = {str(record["module"]) for record in records if record["role"] == "experts"}
    probe, final = LayerProbe(plain, quantised.inputs, policy, packed), Final()
    _run(prompts, (plain, probe), (quantised, Interpreter(quantised.graph_module)), final, notify)
    document: dict[str, Any] = {
        "source": model.name,
        "policy": policy.name,
        "summary": policy.summary,
        "rotation": policy.rotation,
        "phase": config.phase,
        "shape_key": model.shape_key,
        "steps": prompts.steps,
        "layers": _layers(plain, quantised, probe.costs, policy),
        "final": final.document(),
        "memory": {**cache_bill(quantised.inputs), **experts_bill(records)},
        "tolerance": asdict(policy.tolerance),
        "not_done": [remark.message for remark in remarks if remark.kind == "missed"],
    }
    faults = _faults(document, policy)
    return {**document, "passed": not faults, "worst": faults[0] if faults else None, "faults": faults}


def _both(captured: CapturedProgram, config: CompileConfig) -> tuple[CapturedProgram, CapturedProgram, list[Remark]]:
    """The program before and after the policy, with the remarks of the pass."""
    pipeline = default_pipeline(replace(config, stop_after=NAME))
    context = PassContext(replace(config, target="cpu:reference"))
    plain = captured.copy()
    run_pipeline(plain, pipeline.without((NAME,)), context)
    quantised = plain.copy()
    [record] = run_pipeline(quantised, Pipeline.parse(NAME), context)
    remarks = list(record.result.remarks)
    if not record.result.modified:
        why = "; ".join(remark.message for remark in remarks if remark.kind == "missed")
        raise UsageError(f"the policy finds nothing to quantise: {why or 'no cache with a descriptor'}")
    return plain, quantised, remarks


Runner = tuple[CapturedProgram, Interpreter]


def _run(prompts: Prompts, plain: Runner, quantised: Runner, final: Final, notify: Callable[[str], None]) -> None:
    start = prompts.start()
    given = [dict(start), _as(quantised[0], start)]
    place = _logits(plain[0])
    with torch.no_grad():
        for step, changed in enumerate(prompts.inputs(plain[0].inputs)):
            notify(f"step {step + 1} of {prompts.steps}")
            results: list[torch.Tensor] = []
            for (program, interpreter), tensors in zip((plain, quantised), given, strict=True):
                tensors |= changed
                outputs = interpreter.run(*(tensors[spec.source] for spec in program.inputs))
                results.append(outputs[place])
            final.add(results[0], results[1])


def _as(program: CapturedProgram, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the quantised program starts with: weights shared, caches of its own."""
    tensors = given_to(program.inputs, start)
    return {
        spec.source: t.clone() if spec.mutated and not spec.parts else t
        for spec, t in zip(program.inputs, tensors, strict=True)
    }


def _logits(program: CapturedProgram) -> int:
    """Which output is the logits: the one that is called so, else the first of floating type."""
    nodes: Any = program.graph_module.graph.output_node().args[0]
    named = [place for place, spec in enumerate(program.outputs) if spec.source.endswith("logits")]
    floats = [place for place, node in enumerate(nodes) if node.meta["val"].dtype.is_floating_point]
    if not named and not floats:
        raise UsageError("the model returns no floating-point tensor to compare")
    return (named or floats)[0]


def _layers(
    plain: CapturedProgram, quantised: CapturedProgram, costs: Mapping[str, LayerCost], policy: Policy
) -> list[dict[str, Any]]:
    """A row for each layer and role."""
    specs = {spec.source: spec for spec in plain.inputs}
    packed = {spec.source: spec for spec in quantised.inputs}
    rows: list[dict[str, Any]] = []
    for record in quantised.info["quantization"]:
        module, role = str(record["module"]).removesuffix(".indexer"), record["role"]
        cost = costs.get(module, LayerCost(module))
        noise = cost.noise.get(role, Noise())
        before, after = _token_bytes(record, specs, packed)
        form = policy.format_of(role)
        lost = {"latent": cost.output, "experts": cost.experts}.get(role)
        rows.append(
            {
                "layer": module.removesuffix(".gate"),
                "role": role,
                "format": str(form) if form.quantises else record["format"],
                "bytes_per_token": after,
                "bytes_per_token_before": before,
                "sqnr_db": noise.decibels,
                "recall": cost.recall if role == "index_key" else None,
                "output_error": None if lost is None else lost.relative,
            }
        )
    return rows


def _token_bytes(
    record: Mapping[str, Any], specs: Mapping[str, InputSpec], packed: Mapping[str, InputSpec]
) -> tuple[int | None, int | None]:
    """Bytes of a token in the captured cache and in what became of it; a rope part is 2 bytes an element there."""
    spec = specs.get(str(record.get("cache", "")))
    if spec is None:
        return None, None
    before = spec.shape[-1] * getattr(torch, spec.dtype).itemsize
    if record["role"] == "rope":
        return before, 2 * spec.shape[-1]
    whole = packed[spec.source]
    rope = next((2 * specs[source].shape[-1] for source, _ in whole.parts[1:]), 0)
    return before, whole.shape[-1] - rope


def _faults(document: Mapping[str, Any], policy: Policy) -> list[dict[str, Any]]:
    """What is out of tolerance, the worst first: figure, value, limit and layer."""
    limits = policy.tolerance
    figures = [("divergence", document["final"]["divergence"], limits.divergence, "final")]
    for row in document["layers"]:
        figures.append(("recall", row["recall"], limits.recall, row["layer"]))
        figures.append(("output_error", row["output_error"], limits.output, row["layer"]))
    found: list[tuple[float, dict[str, Any]]] = []
    for figure, value, limit, layer in figures:
        if value is None:
            continue
        lost, allowed = (1 - value, 1 - limit) if figure == "recall" else (value, limit)
        if lost > allowed:
            fault = {"figure": figure, "value": value, "limit": limit, "layer": layer}
            found.append((lost / max(allowed, 1e-9), fault))
    return [fault for _, fault in sorted(found, key=lambda pair: -pair[0])]
