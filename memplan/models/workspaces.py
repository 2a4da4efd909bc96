"""What cuDNN's convolutions take beside their results, as cuDNN itself was asked: data of a trace.

Its heuristics choose an engine by shape, batch and GPU, and follow from no published rule. So `python -m
validate.workspaces` asks the library about each of a trace's convolutions, for some micro-batches and GPUs.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from memplan.errors import InvalidValue


class Run(NamedTuple):
    """`beside + per_sample x batch` bytes for asked batches up to `last`, from the run before on."""

    last: int
    beside: int
    per_sample: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The workspaces that `library` states for these micro-batches: runs of them, by GPU and convolution."""

    library: str = ""
    batches: tuple[int, ...] = ()
    runs: Mapping[str, Mapping[Any, tuple[Run, ...]]] = field(default_factory=dict)

    def knows(self, gpu: str, batch: int) -> bool:
        """Whether a GPU was asked for with a micro-batch."""
        return gpu in self.runs and batch in self.batches

    def nearest_text(self, gpu: str, batch: int) -> str:
        """Where the workspaces are known, for an estimate on another GPU or with another micro-batch.

        >>> Asked(batches=(1, 2, 8), runs={"h200": {}}).nearest_text("h200", 3)
        'with a micro-batch of 2 or 8'
        """
        if gpu not in self.runs:
            return f"on {', '.join(self.runs)}"
        at = bisect_left(self.batches, batch)
        return f"with a micro-batch of {' or '.join(map(str, self.batches[max(at - 1, 0) : at + 1]))}"

    def n_bytes(self, convolution: Any, gpu: str, batch: int) -> int:
        """The bytes of a workspace; 0 where cuDNN was not asked, which every estimate says.

        Raises:
            InvalidValue: they are negative.

        >>> asked = Asked(batches=(1, 2, 4), runs={"h200": {"conv1": runs_of({1: 16, 2: 80, 4: 208})}})
        >>> [asked.n_bytes("conv1", "h200", batch) for batch in (1, 2, 3, 4)]
        [16, 80, 0, 208]
        """
        if not self.knows(gpu, batch):
            return 0
        runs = self.runs[gpu][convolution]
        run = runs[bisect_left(runs, batch, key=lambda one: one.last)]
        n_bytes = run.beside + run.per_sample * batch
        if n_bytes < 0:
            raise InvalidValue(f"a workspace of {n_bytes} bytes is none; ask cuDNN again.")
        return n_bytes


def runs_of(n_bytes: Mapping[int, int]) -> tuple[Run, ...]:
    """The runs that give these bytes by micro-batch; a straight line through three batches or more is one.

    >>> runs_of({1: 5, 2: 16, 4: 32, 8: 64})
    (Run(last=1, beside=5, per_sample=0), Run(last=8, beside=0, per_sample=8))
    """
    batches = sorted(n_bytes)
    runs: list[Run] = []
    while batches:
        run, n_on_it = _longest(batches, n_bytes)
        runs.append(run)
        del batches[:n_on_it]
    return tuple(runs)


def _longest(batches: Sequence[int], n_bytes: Mapping[int, int]) -> tuple[Run, int]:
    """The longest run from the first of these batches on, and how many of them it holds for."""
    first = batches[0]
    alone = Run(first, n_bytes[first]), 1
    if len(batches) < 3:
        return alone
    per_sample, rest = divmod(n_bytes[batches[1]] - n_bytes[first], batches[1] - first)
    beside = n_bytes[first] - per_sample * first
    n = 0
    while n < len(batches) and n_bytes[batches[n]] == beside + per_sample * batches[n]:
        n += 1
    return alone if rest or n < 3 else (Run(batches[n - 1], beside, per_sample), n)
