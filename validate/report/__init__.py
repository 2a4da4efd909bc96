"""Records for people: on the terminal, as a flat table, as a page of its own."""

from validate.report.text import details, header, listing, plan_lines, row, summary

__all__ = ["details", "header", "listing", "plan_lines", "row", "summary"]
