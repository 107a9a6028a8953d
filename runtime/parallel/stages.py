"""This process as one stage of a pipeline: which one, what the others have, and what the last one says to all."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from kimigraph.ir import ranks
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.mesh import PP_GROUP
from kimigraph.ir.stages import Stage


def stage_number(stages: int) -> int:
    """The stage that this process is, of ``stages`` that have been joined."""
    return ranks.rank_in(PP_GROUP) if stages > 1 else 0


def require_agreement(manifest: Manifest) -> None:
    """CompileError unless the programs of all stages are of one step, and each sends what the next one takes.

    Every stage must ask, in the same order of programs; so all agree on the list of programs before any is run or
    captured, however much of it each had in its cache.
    """
    facts: list[dict[str, Any]] = [{} for _ in range(ranks.group_of(PP_GROUP).size())]
    dist.all_gather_object(facts, facts_of(manifest), group=ranks.group_of(PP_GROUP))
    require_pipeline(facts)


def facts_of(manifest: Manifest) -> dict[str, Any]:
    """What the stages of a pipeline compare: what is to be equal, and the stage."""
    equal = {
        "model": manifest.model,
        "shape": manifest.shape_key,
        "target": manifest.target,
        "seed": manifest.seed,
        "kimigraph": manifest.versions.get("kimigraph", ""),
        "torch": manifest.versions.get("torch", ""),
        "ranks of a stage": manifest.ways,
    }
    return {"equal": equal, "pipeline": manifest.info.get("pipeline")}


def require_pipeline(facts: Sequence[dict[str, Any]]) -> None:
    """CompileError unless ``facts`` are those of the stages of one pipeline, in order."""
    for number, found in enumerate(facts):
        for name, value in found["equal"].items():
            if value != facts[0]["equal"][name]:
                raise CompileError(
                    f"stage {number} has a program of another {name} ({value}) than stage 0 "
                    f"({facts[0]['equal'][name]}): give all ranks the same versions, model and options"
                )
        stage = Stage.of(found)
        if stage is None or (stage.number, stage.stages) != (number, len(facts)):
            what = "a program of all layers" if stage is None else f"stage {stage.number} of {stage.stages}"
            raise CompileError(f"rank {number} of a pipeline of {len(facts)} stages has {what}: compile for as many")
    for number, (first, second) in enumerate(pairwise(facts)):
        one, two = Stage.of(first), Stage.of(second)
        if one is not None and two is not None and one.sends != two.receives:
            raise CompileError(
                f"stage {number} sends {', '.join(item.name for item in one.sends)} and stage {number + 1} takes "
                f"{', '.join(item.name for item in two.receives)}: give all ranks the same model and options"
            )


def chosen_by_last(choose: Callable[..., list[int]], stages: int, device: torch.device) -> Callable[..., list[int]]:
    """``choose`` on the last stage, which alone has logits; the others are told the tokens."""

    def chosen(logits: torch.Tensor, samplings: Sequence[Any], draws: Sequence[Any]) -> list[int]:
        last = stage_number(stages) == stages - 1
        made = choose(logits, samplings, draws) if last else [0] * len(samplings)
        tokens = torch.tensor(made, dtype=torch.int64, device=device)
        dist.broadcast(tokens, group=ranks.group_of(PP_GROUP), group_src=stages - 1)
        return tokens.tolist()

    return chosen
