"""Which configurations are run: suites by name, or from a file."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from memplan.errors import UnknownName, unknown_name
from memplan.models import Model
from memplan.models.lookup import resolve
from validate.cases import Case
from validate.suites.drawn import drawn
from validate.suites.file import read_suite
from validate.suites.matrix import matrix
from validate.suites.models import SMALL, models
from validate.suites.quick import quick
from validate.suites.refused import refused

SUITES: Final[dict[str, Callable[[], tuple[Case, ...]]]] = {
    "quick": quick,
    "matrix": matrix,
    "models": models,
    "drawn": drawn,
    "refused": refused,
}


def suite(name: str) -> tuple[Case, ...]:
    """A suite by its name, or by the path of a TOML file.

    Raises:
        UnknownName: with the nearest one.
        InvalidValue: a file that is no suite.
    """
    if name.endswith(".toml"):
        return read_suite(Path(name))
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]()


def model_named(name: str) -> Model:
    """A small model of the suites, or what memplan knows by this name.

    Raises:
        UnknownName: with the nearest one.
    """
    return SMALL[name] if name in SMALL else resolve(name)


def case_named(name: str) -> Case:
    """A case of any suite.

    Raises:
        UnknownName: with the nearest ones.
    """
    every = {case.name: case for cases in SUITES.values() for case in cases()}
    if name in every:
        return every[name]
    near = get_close_matches(name, every, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise UnknownName(f"unknown case {name[:80]!r}{hint} `sweep --suite {'|'.join(SUITES)}` names them all.")
