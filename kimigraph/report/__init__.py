"""``report.html``: one file that shows a compilation, pass by pass."""

from kimigraph.report.page import REPORT_NAME, render_report

__all__ = ["REPORT_NAME", "render_report"]
