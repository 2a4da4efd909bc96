"""The same training on a GPU and without it, to compare the played GPU's bytes with the real one's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from memplan.errors import InvalidValue
from validate.cases import Case
from validate.gpus import Gpus
from validate.records import Record
from validate.suites.gpu import gpu_single

WITHOUT: Final = ", without the GPU"
"""The end of the name of a case's twin."""


def gpu_both(gpus: Gpus | None, records: Sequence[Record]) -> list[Case]:
    """Each case of `gpu-single` on the machine's GPU, and right after it where that GPU is not there.

    Raises:
        InvalidValue: without a GPU.
    """
    if gpus is None or gpus.device != "cuda":
        raise InvalidValue(
            "gpu-both runs each case on a GPU and without it, and PyTorch sees no GPU here; "
            "use --suite gpu-single --device nogpu."
        )
    return [] if records else [case for on_gpu in gpu_single(gpus) for case in (on_gpu, twin(on_gpu))]


def twin(case: Case) -> Case:
    """The case on a GPU of the same name that is not there."""
    return replace(case, name=f"{case.name}{WITHOUT}", device="nogpu")


def pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The records of cases that ran on a GPU, each with that of its twin."""
    named = {record.case["name"]: record for record in records if record.outcome == "ok"}
    found = ((record, named.get(f"{name}{WITHOUT}")) for name, record in named.items())
    return [(record, other) for record, other in found if other is not None]
