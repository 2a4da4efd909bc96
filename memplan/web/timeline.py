"""The bytes that a rank holds over a step, as few points as a screen can show."""

from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from memplan.estimate import StageEstimate
from memplan.memory import bytes_by_kind
from memplan.record import StepPhase, Stretch, changes
from memplan.shapes import KINDS

POINTS: Final = 400
"""Points of a timeline, about."""

REPEATS: Final = 4
"""The repetitions of micro-batches that a timeline has of many."""

NARROWEST: Final = 2
"""A phase of few events is at least 1 / (this times the number of phases) of a timeline."""


class Phase(NamedTuple):
    """A phase of a step: its name, and the bytes of each kind (as `KINDS`) at its points."""

    name: StepPhase
    points: list[tuple[int, ...]]


def timeline(of: StageEstimate) -> list[Phase]:
    """The phases of a step in order; a point has the highest of several allocations and frees in a row.

    Of many equal repetitions of micro-batches the first `REPEATS` - 1 and the last one are there: between
    them bytes change evenly, so that the peak is in one of them.
    """
    rest, record = bytes_by_kind(of.record.rest), of.record
    events = _held(record.step, record.update, "forward", [rest.of(kind) for kind in KINDS])
    held = [list(run) for _, run in groupby(events, key=itemgetter(0))]
    n_events = sum(map(len, held))
    least = n_events / (NARROWEST * max(len(held), 4))
    widths = [max(len(run), least) for run in held]
    return [
        Phase(run[0][0], list(_highest([each for _, each in run], round(POINTS * width / sum(widths)))))
        for run, width in zip(held, widths, strict=True)
    ]


def _held(
    stretch: Stretch, update: Collection[Stretch], before: StepPhase, held: list[int]
) -> Generator[tuple[StepPhase, tuple[int, ...]], None, StepPhase]:
    """The phase, and the bytes of each kind, after each allocation and free; returns the last phase.

    `held` has the bytes before the first one. Phases are those of `memplan.record.phased`.
    """
    phase = before
    if stretch in update:
        phase = "optimizer"
    elif stretch.stage_pass is not None:
        phase = "forward" if stretch.stage_pass[1] == "forward" else "backward"
    left_out = max(0, stretch.repeats - REPEATS) if stretch.has_passes else 0
    for i in range(stretch.repeats - left_out):
        before_it = tuple(held)
        for event in changes(stretch.events):
            held[KINDS.index(event.buffer.kind)] += event.sign * event.buffer.n_bytes
            yield phase, tuple(held)
        for part in stretch.parts:
            phase = yield from _held(part, update, phase, held)
        if i == REPEATS - 2:
            held[:] = [n + left_out * (n - n_before) for n, n_before in zip(held, before_it, strict=True)]
    return phase


def _highest(run: Sequence[tuple[int, ...]], n_points: int) -> Iterator[tuple[int, ...]]:
    """The highest of each of `n_points` equal parts of a run."""
    n_points = min(len(run), max(2, n_points))
    for i in range(n_points):
        yield max(run[i * len(run) // n_points : (i + 1) * len(run) // n_points], key=sum)
