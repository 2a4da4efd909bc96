"""Measured bytes of CUDA's caching allocator beside memplan's replay of the same steps.

Three figures of each rank, all predicted afresh: the bytes requested by tensors in a steady step, and the
peaks of allocated blocks and of reserved bytes since the training began.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplan.hardware import gpu
from memplan.replay.program import Replayed
from validate.cases import Case
from validate.predict import estimated_rank
from validate.records import Record
from validate.suites.both import pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorErrors:
    """Prediction / measurement - 1 of one rank's bytes."""

    name: str
    rank: int
    requested: float
    allocated: float
    reserved: float


FIGURES = ("requested", "allocated", "reserved")


def allocator_errors(records: Iterable[Record]) -> Iterator[AllocatorErrors]:
    """The errors of every rank with a CUDA allocator."""
    for record in records:
        ranks = record.measured["ranks"] if record.measured else []
        case = Case.from_dict(record.case)
        for rank in ranks:
            if rank.get("allocator"):
                yield _errors(case, rank)


def allowed_bytes(case: Case) -> int | None:
    """What a case's allocator may reserve: its own limit, else what its GPU has; None if neither is known."""
    return case.limit_bytes or (gpu(case.gpu).usable_bytes if case.gpu else None)


def _errors(case: Case, rank: Mapping[str, Any]) -> AllocatorErrors:
    estimated = estimated_rank(case, rank["rank"])
    replay = estimated.replay(allowed_bytes=allowed_bytes(case))
    if replay is None:
        raise ValueError(f"{case.name}: a rank on CPU has no caching allocator")
    measured = rank["allocator"][-1]
    allocated_bytes, reserved_bytes = after(replay, measured["step"])
    return AllocatorErrors(
        name=case.name,
        rank=rank["rank"],
        requested=estimated.peak_bytes / rank["peak_bytes"] - 1,
        allocated=allocated_bytes / measured["allocated_bytes"] - 1,
        reserved=reserved_bytes / measured["reserved_bytes"] - 1,
    )


def after(replay: Replayed, step: int) -> tuple[int, int]:
    """The highest allocated and reserved bytes up to the end of a step.

    Steps after the replayed ones add nothing.
    """
    return replay.after_step[min(step, replay.n_steps) - 1]


def allocator_summary(errors: Iterable[AllocatorErrors]) -> list[str]:
    """A line for each figure: the number of ranks where it is exact to the byte, and the largest error."""
    every = list(errors)
    lines = []
    for figure in FIGURES if every else ():
        off = [abs(getattr(each, figure)) for each in every]
        lines.append(
            f"bytes {figure}: equal in {off.count(0.0)} of {len(off)} ranks, worst {max(off):.3%} off"
        )
    return lines


def twins_summary(records: Sequence[Record]) -> list[str]:
    """A line for each figure: the number of ranks with equal bytes on a GPU and without it."""
    both = [
        sides
        for on_gpu, without in pairs(records)
        for sides in zip(_measured_bytes(on_gpu), _measured_bytes(without), strict=True)
    ]
    lines = []
    for i, figure in enumerate(FIGURES if both else ()):
        off = [abs(without[i] / on_gpu[i] - 1) for on_gpu, without in both]
        same = f"equal in {off.count(0.0)} of {len(off)} ranks, worst {max(off):.3%} off"
        lines.append(f"on the GPU and without it, bytes {figure}: {same}")
    return lines


def _measured_bytes(record: Record) -> Iterator[tuple[int, int, int]]:
    """The measured figures of each rank, in the order of `AllocatorErrors`."""
    for rank in record.measured["ranks"] if record.measured else []:
        last = rank["allocator"][-1]
        yield rank["peak_bytes"], last["allocated_bytes"], last["reserved_bytes"]
