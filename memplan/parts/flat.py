"""ZeRO's flat parameter group: the parameters in it, its partitions, the slices of a rank's partition."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from memplan.shapes import Parameter


class Slot(NamedTuple):
    """A parameter's place in the flat group: its first element."""

    parameter: Parameter
    start: int

    @property
    def n_elements(self) -> int:
        """Its elements."""
        return self.parameter.n_elements

    @property
    def end(self) -> int:
        """The first element behind it."""
        return self.start + self.n_elements

    def part(self, n_ranks: int) -> int:
        """The elements of each of as many equal parts, the last of them padded."""
        return -(-self.n_elements // n_ranks)


def slots_of(parameters: Sequence[Parameter]) -> list[Slot]:
    """The parameters one behind the other."""
    starts = accumulate([parameter.n_elements for parameter in parameters], initial=0)
    return [Slot(one, start) for one, start in zip(parameters, starts, strict=False)]


class Partitions:
    """A flat group of `n_elements`, padded, in equal partitions of `size` elements, one for each rank.

    Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned`,
    `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_partition_info`.
    """

    def __init__(self, slots: Sequence[Slot], n_ranks: int) -> None:
        self.slots = slots
        alignment = 2 * n_ranks  # nccl_start_alignment_factor
        self.n_elements = -(-slots[-1].end // alignment) * alignment
        self.size = self.n_elements // n_ranks

    def slices(self, rank: int) -> dict[Slot, int]:
        """The parameters in a rank's partition (`params_in_partition`), and their elements there."""
        begins, ends = rank * self.size, (rank + 1) * self.size
        found = {slot: min(slot.end, ends) - max(slot.start, begins) for slot in self.slots}
        return {slot: n for slot, n in found.items() if n > 0}

    def ranges(self, slots: Iterable[Slot]) -> Iterator[int]:
        """The elements of each range of these gradients, joined, that one rank's partition has.

        Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor`.
        """
        rank, joined = -1, 0
        for slot in slots:
            start = slot.start
            while start < slot.end:
                of = start // self.size
                ends = min(slot.end, (of + 1) * self.size)
                if of != rank and joined:
                    yield joined
                    joined = 0
                rank, joined, start = of, joined + ends - start, ends
        if joined:
            yield joined

    def fullest_rank(self) -> int:
        """The first of the ranks whose partition touches most elements of whole parameters."""
        n_ranks = self.n_elements // self.size
        sizes = [sum([slot.n_elements for slot in self.slices(rank)]) for rank in range(n_ranks)]
        return sizes.index(max(sizes))


def calls_of(sizes: Iterable[int], most: int) -> Iterator[list[int]]:
    """Tensors in the lists that one collective takes: a list ends once it has more than `most` elements.

    >>> list(calls_of([3, 3, 3, 1], 5))
    [[3, 3], [3, 1]]

    Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_and_scatter`,
    `deepspeed.runtime.engine:DeepSpeedEngine.allreduce_no_retain`.
    """
    call: list[int] = []
    for size in sizes:
        call.append(size)
        if sum(call) > most:
            yield call
            call = []
    if call:
        yield call
