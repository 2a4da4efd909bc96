"""Whose measured curves a GPU has: its own, or those that another one lends it."""

from collections.abc import Mapping
from typing import Final, Literal

from memplan.errors import MissingRule
from memplan.files import toml_table
from memplan.hardware import Gpu, gpu

LENDERS: Final = "time/lenders.toml"
"""The table of whose curves each GPU has."""

Measured = Literal["products", "attention", "collectives"]
"""What was measured, by the names of the tables."""


NEAREST: Final[Mapping[int, str]] = {8: "a100-80-sxm", 9: "h100-sxm", 10: "b200", 12: "rtx-pro-6000"}
"""Whose measurements a GPU that no table knows has, by the first number of its compute capability."""


def lender_of(borrower: Gpu, what: Measured) -> Gpu:
    """The GPU whose measurements another one has: itself, or the nearest that was measured.

    A GPU of your own has those of `NEAREST`; without one of these capabilities, those of H100.

    Raises:
        MissingRule: a CPU.

    >>> lender_of(gpu("a100-40-sxm"), "products").name, lender_of(gpu("h100-pcie"), "collectives").name
    ('a100-80-sxm', 'rtx-pro-6000')
    """
    if borrower.kind == "cpu":
        raise MissingRule(f"no rates were measured on {borrower.name}; use the name of a GPU.")
    table = toml_table(LENDERS)
    major, _ = borrower.capability or (9, 0)
    known = borrower.name if borrower.name in table else NEAREST.get(major, "h100-sxm")
    return gpu(table[known][what])
