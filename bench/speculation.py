"""Speculative decoding of Kimi K3.1 at width on a GPU, with drafts that are right with a given probability.

    PYTHONPATH=. python bench/speculation.py --layers 4 --batch 1 8 --agreement 0.6 0.8 0.95 \
        --out bench/results/speculation.json

Step times are those of CUDA graphs: a plain step, and a verifying one with the fold behind it. Then the engine decodes:
plainly, with drafts that are all wrong (what the model says by its verifying step alone), and with drafts that are the
next of those tokens with the given probability each. The ideal is what the drafts that stayed and the step times allow:
new tokens a sequence and round, times a plain step, over a round. Prompts are held to be read: caches and states are
random, and nearly full. Drafts cost nothing here. With ``--programs DIR`` programs that lie there are taken.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from k31_decode import CONFIG, random_model
from run_facts import run_facts
from step_programs import kept_in

from kimigraph.bench.protocol import time_in_graph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig
from kimigraph.replay_program import new_replay_log
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.generation import BoundStep, Engine, Request, Row, Sampling, SlotCaches
from kimigraph.runtime.graphs import GraphMode, graph_mode
from kimigraph.runtime.prepared import PreparedWeights
from kimigraph.runtime.speculation import Draft, ReplayLog, Speculation, StateShape

TARGET, DEVICE = "cuda", "cuda"
ROUNDS, PLAIN_STEPS, REPEATS = 24, 64, 3
VOCABULARY = json.loads(CONFIG.read_text(encoding="utf-8"))["vocab_size"]


def compiled(layers: int, batch: int, tokens: int, context: int, kept: Path, target: str = TARGET) -> Path:
    """The program of a plain step (one token) or of a verifying one, compiled unless it was kept."""
    directory = kept / f"k31_{layers}_layers_b{batch}_t{tokens}_c{context}"
    if not directory.exists():
        config = CompileConfig(
            target=target,
            phase="decode" if tokens == 1 else "verify",
            batch=batch,
            tokens=tokens,
            context=context,
            random_weights=True,
            overrides=(("num_hidden_layers", str(layers)),),
            half_batches="off",
            report=False,
        )
        source = str(CONFIG.parent)
        compile_model(source, load_source(source, config, rows=True), config, directory, lambda message: None)
    return directory


class Model:
    """Both steps of one batch with random weights, and what a sequence has of each cache."""

    def __init__(self, weights: Mapping[str, torch.Tensor], plain: Path, verifying: Path) -> None:
        prepared = PreparedWeights()
        self.plain, self.verifying = (Executor(directory, weights, prepared) for directory in (plain, verifying))
        caches = [spec for spec in self.plain.caller_inputs if spec.kind == "cache"]
        self.rows = {spec.source: Row(spec.shape[1:], getattr(torch, spec.dtype)) for spec in caches}
        forms = {spec.source: (spec.descriptor, self.rows[spec.source].dtype) for spec in caches if spec.descriptor}
        shape = StateShape.of(forms)
        assert shape is not None
        self.shape = shape

    def places(self, batch: int, tokens: int, graphs: GraphMode | None, scratch: Path) -> tuple[ReplayLog, SlotCaches]:
        """States with a log, and caches with random values in them."""
        log = new_replay_log(self.shape, batch, tokens, TARGET, torch.device(DEVICE), scratch, graphs)
        slots = SlotCaches(self.rows, batch, DEVICE, log.states)
        for name, tensor in slots.tensors.items():
            tensor.normal_(std=0.1 if name.endswith("kda") else 1.0)
        return log, slots


class Programs:
    """The steps as the engine asks for them, as CUDA graphs; a prompt is held to be read."""

    def __init__(self, model: Model, graphs: GraphMode, staging: Mapping[str, torch.Tensor]) -> None:
        for executor in (model.plain, model.verifying):
            graphs.adopt(executor)
        self._model, self._staging, self._steps, self.prompts = model, staging, dict[Executor, BoundStep](), 0

    def step(self, batch: int, tokens: int, caches: Mapping[str, torch.Tensor]) -> Any:
        """The plain step; for several tokens one that fills the row of a prompt with values of its own."""
        return self._bound(self._model.plain, caches) if tokens == 1 else self._read

    def verify(self, batch: int, tokens: int, caches: Mapping[str, torch.Tensor]) -> Any:
        """The verifying step."""
        return self._bound(self._model.verifying, caches).all_logits

    def _bound(self, executor: Executor, caches: Mapping[str, torch.Tensor]) -> BoundStep:
        if executor not in self._steps:
            self._steps[executor] = BoundStep(executor, caches)
        return self._steps[executor]

    def _read(self, ids: list[list[int]], lengths: list[int]) -> torch.Tensor:
        torch.manual_seed(self.prompts)
        self.prompts += 1
        for name, tensor in self._staging.items():
            tensor.normal_(std=0.1 if name.endswith("kda") else 1.0)
        return torch.zeros(1, VOCABULARY, device=DEVICE)


class Agreeing:
    """Drafts that know how each slot goes on; each is right with probability ``agreement``."""

    def __init__(self, known: list[list[int]], agreement: float) -> None:
        self._known, self._agreement = known, agreement
        self._random = torch.Generator().manual_seed(7)

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        """``tokens`` drafts for each sequence."""
        return {slot: self._follow(slot, len(request.tokens), tokens) for slot, request in running.items()}

    def _follow(self, slot: int, done: int, tokens: int) -> list[int]:
        truth = [*self._known[slot][done : done + tokens], *[0] * tokens][:tokens]
        right = torch.rand(tokens, generator=self._random) < self._agreement
        return [token if hit else (token + 1) % VOCABULARY for token, hit in zip(truth, right.tolist(), strict=True)]


class Bench:
    """The engine over both steps; every run begins from the same caches."""

    def __init__(self, model: Model, batch: int, drafts: int, context: int, scratch: Path) -> None:
        self.batch, self.drafts, self.context = batch, drafts, context
        graphs = graph_mode(TARGET, reuse_outputs=True)
        self._log, self._slots = model.places(batch, 1 + drafts, graphs, scratch)
        self.programs = Programs(model, graphs, self._slots.staging)
        self.most = (1 + drafts) * (ROUNDS + 2)
        """Tokens that a run makes at most, one a step."""

    def run(self, draft: Draft | None, steps: int) -> tuple[list[list[int]], float, Speculation | None]:
        """Tokens of each sequence, seconds a step, what drafts did; the first steps, which capture, are not timed."""
        speculation = None
        if draft is not None:
            speculation = Speculation(self.programs, draft, self.drafts, self._log, adaptive=False)
        self.programs.prompts = 0
        new = self.most + 8
        prompt = self.context - new - 2 * self.drafts
        engine = Engine(
            self.programs, self._slots, self.context,
            batches=(self.batch,), chunks=(prompt,), budget=self.batch * prompt, speculation=speculation,
        )  # fmt: skip
        sampling = Sampling(max_new_tokens=new, stop_ids=())
        numbers = [engine.submit([1] * prompt, sampling, place) for place in range(self.batch)]
        made: dict[int, list[int]] = {number: [] for number in numbers}
        started = 0.0
        for step in range(steps + 2):
            if step == 2:
                torch.cuda.synchronize()
                started = time.perf_counter()
            for event in engine.step():
                if event.token is not None:
                    made[event.number].append(event.token)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / steps
        for number in numbers:
            engine.abort(number)
        return [made[number] for number in numbers], seconds, speculation


def step_times(model: Model, batch: int, drafts: int, context: int, scratch: Path) -> dict[str, float]:
    """Microseconds of a plain step, a verifying one, the fold, and the two together, as CUDA graphs."""
    log, slots = model.places(batch, 1 + drafts, None, scratch)
    caches = slots.first(batch)
    ids = torch.randint(VOCABULARY, (batch, 1 + drafts), generator=torch.Generator().manual_seed(3)).tolist()
    lengths = [context - 2 - drafts] * batch
    plain = BoundStep(model.plain, caches)
    verifying = BoundStep(model.verifying, {**log.log(batch), **caches})
    plain([row[:1] for row in ids], lengths)
    verifying(ids, lengths)
    counts = torch.full((batch,), 1 + drafts, dtype=torch.int32, device=DEVICE)

    def commit() -> None:
        log.verified(batch)
        log.commit(counts)

    def both() -> None:
        verifying.again()
        commit()

    calls: dict[str, Callable[[], Any]] = {
        "plain": plain.again, "verify": verifying.again, "commit": commit, "round": both,
    }  # fmt: skip
    return {name: round(time_in_graph([call], at_least=1, replays=21).median, 2) for name, call in calls.items()}


def point(model: Model, batch: int, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All figures of one batch."""
    drafts, context = options.drafts, options.context
    found: dict[str, Any] = {"batch": batch, "drafts": drafts, "context": context, "layers": options.layers}
    found["step_us"] = step_times(model, batch, drafts, context, scratch)
    print(f"B {batch}: as CUDA graphs {found['step_us']}", flush=True)
    bench = Bench(model, batch, drafts, context, scratch)
    plainly, _, _ = bench.run(None, 4)
    plainly, plain, _ = bench.run(None, PLAIN_STEPS)
    known, _, _ = bench.run(Agreeing([[] for _ in range(batch)], 0.0), bench.most)
    found["plain_wall_us"] = round(plain * 1e6, 1)
    found["plain_tokens_alike"] = sum(_alike(a, b) for a, b in zip(plainly, known, strict=True)) / batch
    told = {name: found[name] for name in ("plain_wall_us", "plain_tokens_alike")}
    print(f"B {batch}: {told}", flush=True)
    found["runs"] = []
    for agreement in options.agreement:
        found["runs"].append(one_run(bench, known, agreement, plain, found["step_us"]))
        print(f"B {batch}: {found['runs'][-1]}", flush=True)
    return found


def one_run(
    bench: Bench, known: list[list[int]], agreement: float, plain: float, step_us: Mapping[str, float]
) -> dict[str, Any]:
    """Decoding with drafts that are right with one probability."""
    walls: list[float] = []
    speculation, strayed = None, 0
    for _ in range(REPEATS):
        made, wall, speculation = bench.run(Agreeing(known, agreement), ROUNDS)
        walls.append(wall)
        strayed = sum(tokens != right[: len(tokens)] for tokens, right in zip(made, known, strict=True))
    assert speculation is not None
    counts, wall = speculation.counts.as_dict(), statistics.median(walls)
    tokens = counts["tokens_per_step"]
    ideal, speed_up = tokens * step_us["plain"] / step_us["round"], tokens * plain / wall
    return {
        "agreement": agreement,
        "acceptance": round(counts["acceptance"], 4),
        "tokens_per_step": round(tokens, 3),
        "round_wall_us": round(wall * 1e6, 1),
        "speed_up": round(speed_up, 3),
        "ideal": round(ideal, 3),
        "share_of_ideal": round(speed_up / ideal, 3),
        "share_of_device": round(step_us["round"] / wall / 1e6, 3),
        "strayed": strayed,
    }


def _alike(tokens: list[int], others: list[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(tokens, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))


def main() -> None:
    """Measure every batch, print as it goes, write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--agreement", type=float, nargs="+", default=[0.6, 0.8, 0.95])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = random_model(options.layers, torch.bfloat16)
    print("weights are drawn", flush=True)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    document: dict[str, Any] = {**run_facts(), "points": []}
    with kept_in(options.programs) as kept, tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for batch in options.batch:
            shapes = [(options.layers, batch, tokens, options.context, kept) for tokens in (1, 1 + options.drafts)]
            steps = Model(weights, *(compiled(*shape) for shape in shapes))
            print(f"B {batch}: steps are bound", flush=True)
            found = point(steps, batch, options, Path(scratch))
            document["points"].append(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
