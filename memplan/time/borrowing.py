"""Whose measured curves a GPU has: its own, or those that another one lends it."""

from typing import Final, Literal

from memplan.errors import MissingRule
from memplan.files import toml_table
from memplan.hardware import Gpu, gpu

LENDERS: Final = "time/lenders.toml"
"""The table of whose curves each GPU has."""

Measured = Literal["products", "attention", "collectives"]
"""What was measured, by the names of the tables."""


def lender_of(borrower: Gpu, what: Measured) -> Gpu:
    """The GPU whose measurements another one has: itself, or the nearest that was measured.

    Raises:
        MissingRule: no GPU lends it any.

    >>> lender_of(gpu("a100-40-sxm"), "products").name, lender_of(gpu("h100-pcie"), "collectives").name
    ('a100-80-sxm', 'rtx-pro-6000')
    """
    table = toml_table(LENDERS)
    if borrower.name not in table:
        raise MissingRule(
            f"no rates were measured on {borrower.name}, and no GPU lends it its own; give a Gpu with your "
            f"rates and the name of one of the table ({', '.join(table)})."
        )
    return gpu(table[borrower.name][what])
