"""Suites of cases, by name or from a file."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Final

from memplan.errors import InvalidValue, UnknownName, unknown_name
from memplan.models import Decoder
from validate.cases import Case, runnable
from validate.gpus import Gpus
from validate.records import Record
from validate.suites.adapters import adapters
from validate.suites.architectures import architectures
from validate.suites.both import gpu_both
from validate.suites.colossalai import colossalai
from validate.suites.deepspeed import deepspeed
from validate.suites.divided import context, divided, experts
from validate.suites.drawn import drawn
from validate.suites.fairscale import fairscale
from validate.suites.families import families
from validate.suites.file import read_suite
from validate.suites.frontier import next_cases
from validate.suites.fsdp1 import fsdp1
from validate.suites.fullsize import fullsize
from validate.suites.gpu import GPU_SUITES
from validate.suites.matrix import matrix
from validate.suites.models import SMALL, models
from validate.suites.no_sync import no_sync
from validate.suites.offloading import offloading
from validate.suites.optimizers import optimizers
from validate.suites.quick import quick
from validate.suites.refused import refused
from validate.suites.torchtitan import torchtitan
from validate.suites.trainers import trainers
from validate.suites.trl import trl
from validate.suites.wild import wild

SUITES: Final[dict[str, Callable[[], tuple[Case, ...]]]] = {
    "quick": quick,
    "models": models,
    "drawn": drawn,
    "refused": refused,
    "matrix": matrix,
    "fullsize": fullsize,
    "wild": wild,
    "families": families,
    "fsdp1": fsdp1,
    "fairscale": fairscale,
    "colossalai": colossalai,
    "deepspeed": deepspeed,
    "divided": divided,
    "experts": experts,
    "torchtitan": torchtitan,
    "context": context,
    "adapters": adapters,
    "optimizers": optimizers,
    "no-sync": no_sync,
    "offloading": offloading,
    "architectures": architectures,
    "trainers": trainers,
    "trl": trl,
}
"""Suites of CPU ranks."""

SEARCHES: Final[dict[str, Callable[[Gpus | None, Sequence[Record]], Sequence[Case]]]] = {
    "gpu-frontier": next_cases,
    "gpu-both": gpu_both,
}
"""Suites that need GPUs, or whose next cases depend on what came of those before."""

NAMES: Final = (*SUITES, *GPU_SUITES, *SEARCHES)

Rounds = Callable[[Sequence[Record]], Sequence[Case]]
"""The cases to run, given the records of those that have run; the same ones may come again."""


def rounds(name: str, gpus: Gpus | None = None) -> Rounds:
    """A suite whose next cases may depend on what came of those before.

    Raises:
        UnknownName, InvalidValue: as `suite`.
    """
    if name in SEARCHES:
        return partial(SEARCHES[name], gpus)
    cases = suite(name, gpus)
    return lambda _records: cases


def suite(name: str, gpus: Gpus | None = None) -> tuple[Case, ...]:
    """A suite by its name, or by the path of a TOML file; those for GPUs as these GPUs allow.

    Raises:
        UnknownName: with the nearest one.
        InvalidValue: a file that is no suite, or a suite that these GPUs cannot run.
    """
    if name.endswith(".toml"):
        return read_suite(Path(name))
    if name in SEARCHES:
        return tuple(SEARCHES[name](gpus, ()))
    if name in GPU_SUITES:
        return GPU_SUITES[name](gpus)
    if name not in SUITES:
        raise unknown_name("suite", name, NAMES)
    return SUITES[name]()


def model_named(name: str) -> Decoder:
    """A small model of the suites, or what memplan knows by this name.

    Raises:
        UnknownName: with the nearest one.
    """
    return SMALL[name] if name in SMALL else runnable(name)


def case_named(name: str, gpus: Gpus | None = None) -> Case:
    """A case of any suite.

    Raises:
        UnknownName: with the nearest ones.
    """
    names: list[str] = []
    for found in (*SUITES, *GPU_SUITES):
        try:
            cases = {case.name: case for case in suite(found, gpus)}
        except InvalidValue:  # these GPUs cannot run it
            continue
        if name in cases:
            return cases[name]
        names += cases
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    raise UnknownName(f"unknown case {name[:80]!r}{hint} `sweep --suite {'|'.join(NAMES)}` names them all.")
