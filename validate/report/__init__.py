"""Reports of records: on the terminal, as a flat table, as an HTML page."""

from validate.report.text import details, header, listing, plan_lines, row, summary

__all__ = ["details", "header", "listing", "plan_lines", "row", "summary"]
