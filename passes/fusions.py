"""What the fusions of a run did, out of its remarks: the report's ``fusions`` and ``--require-fusion``."""

from collections.abc import Sequence
from typing import Any

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import RequiredFusionError
from kimigraph.ir.remarks import Remark
from kimigraph.ir.report import CompileReport
from kimigraph.passes.manager import PassRecord
from kimigraph.passes.pipeline import default_pipeline


def fusion_summary(records: Sequence[PassRecord]) -> list[dict[str, Any]]:
    """``{rule, via, count, nodes, reason}`` for each rule tried: one entry per way (``pattern``, ``mark``) that fired.

    ``count`` is the number of ``passed`` remarks and ``nodes`` the nodes they name. A rule that found nothing has one
    entry with count 0 and its nearest miss, the missed remark of the highest score, in ``reason``.
    """
    entries: list[dict[str, Any]] = []
    for rule in dict.fromkeys(record.name for record in records if record.fusion):
        remarks = [remark for record in records if record.name == rule for remark in record.result.remarks]
        passed = [remark for remark in remarks if remark.kind == "passed"]
        for via in sorted({remark.via for remark in passed}) or ["pattern"]:
            nodes = [remark.node for remark in passed if remark.via == via]
            reason = "" if passed else _describe_miss(nearest_miss(remarks))
            entries.append({"rule": rule, "via": via, "count": len(nodes), "nodes": nodes, "reason": reason})
    return entries


def nearest_miss(remarks: Sequence[Remark]) -> Remark | None:
    """The missed remark with the most evidence, the first of equals; None without any."""
    return max((remark for remark in remarks if remark.kind == "missed"), key=lambda remark: remark.score, default=None)


def check_required_fusions(records: Sequence[PassRecord], config: CompileConfig) -> None:
    """Raise RequiredFusionError for each fusion of ``config.required_fusions`` that did not fire, with the reason."""
    tried = {record.name for record in records}
    counts: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for entry in fusion_summary(records):
        counts[entry["rule"]] = counts.get(entry["rule"], 0) + int(entry["count"])
        reasons[entry["rule"]] = entry["reason"]
    failures = [
        f"{name}: {reasons[name] if name in tried else _why_not_tried(name, config)}"
        for name in config.required_fusions
        if not counts.get(name)
    ]
    if failures:
        raise RequiredFusionError("required fusion did not fire. " + " ".join(failures))


def require_fused(reports: Sequence[CompileReport], names: Sequence[str]) -> None:
    """Raise RequiredFusionError for each fusion of ``names`` that fired in none of the stages of a pipeline."""
    fired = {item["rule"] for report in reports for item in report.fusions if item["count"]}
    lacking = [name for name in names if name not in fired]
    if lacking:
        raise RequiredFusionError(f"required fusion did not fire in any stage: {', '.join(lacking)}")


def _describe_miss(miss: Remark | None) -> str:
    if miss is None:
        return "nothing in the graph resembles what it looks for."
    source = f", {miss.source}" if miss.source else ""
    return f"{miss.message} (node '{miss.node}'{source})"


def _why_not_tried(name: str, config: CompileConfig) -> str:
    if name in config.disabled_passes:
        return f"it was not run: --disable-pass {name} turns it off."
    if config.passes is not None and name not in config.passes:
        return f"it was not run: --passes '{config.passes}' leaves it out."
    if config.opt_level == 0 and config.passes is None:
        return "it was not run: -O0 runs no passes; use -O1 or higher."
    return f"it was not run: the pipeline was '{default_pipeline(config)}' (--stop-after {config.stop_after})."
