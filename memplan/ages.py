"""The ages of an allocator's blocks, which in torch 2.12 decide which of equal free blocks is taken.

Two holes of one size take turns: the older one is used first, and the other one the next time. Ages therefore
make states differ that are otherwise equal. So states are compared without them: equal ranges of memory
between blocks that stay in use are numbered by the age of their oldest block, wherever they are. What came
between two such states repeats itself if every comparison of two ages comes out as it did.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

Place = tuple[Hashable, int, int]
"""A block's place: the kind of its range of memory, the range's number among equal ones, the offset in it."""


class Moment(NamedTuple):
    """Blocks at an instant by their place, the oldest first: their addresses and their numbers."""

    addresses: dict[Place, int]
    numbers: dict[Place, int]
    clock: int

    @property
    def order(self) -> tuple[Place, ...]:
        """The places of the blocks, the oldest first."""
        return tuple(sorted(self.numbers, key=self.numbers.__getitem__))


class Ages:
    """The blocks' numbers by their address: a block with a lower number is older.

    What is split off behind a block is as old as the block was, which is made anew. Joined blocks are as old
    as the one that was freed.

    Attributes:
        clock: counts the blocks that were made or freed; a new block's number.
        freed: the clock when the block at an address was freed last.
        compared: pairs of numbers (the lower one first) that have been compared, with the clock at that time.
        compares_before: comparisons with numbers above this are not noted. They always come out the same,
            since such a block was made in the same repetition.

    Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.12 (`BlockComparatorRegistrationCounter`).
    """

    __slots__ = ("clock", "compared", "compares_before", "freed", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self.compared: dict[tuple[int, int], int] = {}
        self.clock = self.compares_before = 0

    def make(self, address: int) -> None:
        """Note a new block."""
        self.clock += 1
        self.numbers[address] = self.clock

    def split(self, address: int, rest: int) -> None:
        """Note that a block is taken and that the `rest` behind it stays free."""
        self.numbers[rest] = self.numbers[address]
        self.make(address)

    def free(self, address: int, merged: int) -> None:
        """Note that a block is freed, and the address of the free block that it is now part of."""
        self.numbers[merged] = self.numbers[address]
        self.clock += 1
        self.freed[address] = self.clock

    def oldest(self, addresses: list[int]) -> int:
        """The address of the oldest of free blocks; what it was compared with is noted."""
        numbers = self.numbers
        found = min(addresses, key=numbers.__getitem__)
        number, before = numbers[found], self.compares_before
        if number <= before:
            for address in addresses:
                other = numbers[address]
                if number < other <= before:
                    self.compared[number, other] = self.clock
        return found

    def next_repetition(self) -> None:
        """Note comparisons of blocks that are made from now on no more."""
        self.compares_before = self.clock

    def moment(
        self,
        blocks: Iterable[int],
        fixed: Mapping[int, int],
        segments: Mapping[int, tuple[int, Hashable]],
        *,
        gives_back: bool,
    ) -> "tuple[Moment, Mapping[int, Hashable]]":
        """The ages of `blocks` by their place, and the place of each block by its address.

        `blocks`: the addresses of all free blocks, and of blocks in use that are not `fixed`.
        `fixed`: the bytes of blocks that stay in use, by address. Ranges lie between them; the place of each
        is its address. `segments`: their bytes and their pool, by address.
        `gives_back`: segments may be given back to the driver, so that it matters which range is a whole one.
        """
        segment_starts = sorted(segments)
        starts = sorted([*segments, *(address + n_bytes for address, n_bytes in fixed.items())])
        ends = sorted([*(address + n_bytes for address, (n_bytes, _) in segments.items()), *fixed])
        ranges: dict[Hashable, dict[int, int]] = {}
        places: dict[int, Hashable] = {address: address for address in fixed}
        addresses: dict[Place, int] = {}
        for address in sorted(blocks, key=self.numbers.__getitem__):
            start = starts[bisect_right(starts, address) - 1]
            segment_bytes, pool = segments[segment_starts[bisect_right(segment_starts, address) - 1]]
            n_bytes = ends[bisect_right(ends, address)] - start
            kind = pool, n_bytes, gives_back and n_bytes == segment_bytes
            equal = ranges.setdefault(kind, {})
            place = kind, equal.setdefault(start, len(equal)), address - start
            places[address], addresses[place] = place, address
        numbers = {place: self.numbers[address] for place, address in addresses.items()}
        return Moment(addresses, numbers, self.clock), places

    def repeat(self, before: Moment, now: Moment, most: int) -> tuple[int, Moment]:
        """Repeat what came between two moments of equal states as long as all ages compare as they did.

        Returns how many times that is, up to `most`, and the moment after it. Once the order of all ages
        recurs, whole cycles are left out.
        """
        place_of = {number: place for place, number in before.numbers.items()}
        start = before.clock
        made = {place: number - start for place, number in now.numbers.items() if number > start}
        kept = {place: place_of[number] for place, number in now.numbers.items() if number <= start}
        compared = [
            (place_of[older], place_of[younger])
            for (older, younger), clock in self.compared.items()
            if clock >= start >= younger
        ]
        seen = {before.order: -1}
        numbers, clock, n = now.numbers, now.clock, 0
        while n < most and all(numbers[older] < numbers[younger] for older, younger in compared):
            order = Moment(now.addresses, numbers, clock).order
            if order in seen:
                cycle = n - seen[order]
                n += (most - n) // cycle * cycle
                seen = {}
                continue
            seen[order] = n
            self.compared.update({(numbers[older], numbers[younger]): clock for older, younger in compared})
            numbers = {place: numbers[source] for place, source in kept.items()}
            numbers.update({place: clock + number for place, number in made.items()})
            clock += now.clock - start
            n += 1
        self.numbers.update({now.addresses[place]: number for place, number in numbers.items()})
        self.clock = clock
        return n, Moment(now.addresses, numbers, clock)
