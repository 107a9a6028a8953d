"""What a compilation leaves to read: ``report.json``, ``remarks.jsonl``, ``schedule.json`` and ``report.html``."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kimigraph.ir.errors import KimigraphError
from kimigraph.ir.report import CompileReport
from kimigraph.ir.trace import FILE as SCHEDULE
from kimigraph.passes.instruments.dump import MARKER, DumpDirectory
from kimigraph.report import REPORT_NAME, render_report

DOCUMENT_NAME = "report.json"
REMARKS_NAME = "remarks.jsonl"


def publish(report: CompileReport, artifact: Path, shown: Path | None, dumps: Path | None) -> None:
    """Write these files into ``artifact``, and the page into the user's dump directory as well.

    Args:
        report: complete, with the paths that the artifact will have once it is in its place.
        artifact: where its files lie now. The manifest does not list what is written here.
        shown: the dumps that the page shows; None shows none.
        dumps: the directory of ``--dump-passes``, None without it.
    """
    document = report.as_dict()
    lines = [json.dumps(remark) + "\n" for remark in report.remarks]
    (artifact / REMARKS_NAME).write_text("".join(lines), encoding="utf-8")
    (artifact / DOCUMENT_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if shown is not None and (shown / SCHEDULE).is_file():
        (artifact / SCHEDULE).write_text((shown / SCHEDULE).read_text(encoding="utf-8"), encoding="utf-8")
    page = render_report(document, shown, artifact)
    (artifact / REPORT_NAME).write_text(page, encoding="utf-8")
    if dumps is not None:
        DumpDirectory(dumps, keep=True).write(REPORT_NAME, page)


@contextmanager
def reporting_failure(report: CompileReport, dumps: Path | None) -> Generator[None]:
    """Leave a page of the passes up to the failure in the dump directory when the block raises."""
    try:
        yield
    except KimigraphError:
        if dumps is not None and (dumps / MARKER).is_file():
            document = {**report.as_dict(), "remarks": _remarks(dumps / REMARKS_NAME)}
            DumpDirectory(dumps, keep=True).write(REPORT_NAME, render_report(document, dumps))
        raise


def _remarks(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
