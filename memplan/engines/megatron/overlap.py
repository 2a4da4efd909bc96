"""Data-parallel traffic beside passes: buckets are reduced as gradients fill them, and gathered as needed.

Source: megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from memplan.engines.megatron.buffers import Bucket
from memplan.mesh import Group
from memplan.record import (
    COMPUTE,
    Collective,
    Event,
    PassPart,
    RecordEvent,
    Stretch,
    WaitStream,
    chain,
    events,
    passed,
    repeated,
)
from memplan.shapes import Parameter

GRADIENTS: Final = "reduction of gradients"
WEIGHTS: Final = "gather of weights"


class Piece(NamedTuple):
    """A part of a chunk's pass, and its weights."""

    stretch: Stretch
    parameters: Sequence[Parameter]


class Division(NamedTuple):
    """Weights of a chunk whose gradients one group of ranks reduces, in buckets.

    `n_ranks`: how many of these ranks divide the optimizer's states.
    """

    local: int
    group: Group
    n_ranks: int
    parameters: Sequence[Parameter]
    buckets: Sequence[Bucket]

    def n_elements(self, piece: Piece) -> int:
        """The elements of a piece's weights that belong to it."""
        own = set(self.parameters)
        return sum([p.n_elements for p in piece.parameters if p in own])


Traffic = Sequence[tuple[Division, Sequence[Collective]]]
"""The collectives of each division's buckets."""


def reducing(pieces: Sequence[Piece], traffic: Traffic) -> Stretch:
    """A backward pass that reduces each bucket once its last gradient is there."""
    left = [list(zip(sent, _ends(own), strict=True)) for own, sent in traffic]
    done = [0] * len(traffic)
    parts: list[Stretch] = []
    for piece in pieces:
        found: list[Event] = []
        for i, (own, _) in enumerate(traffic):
            done[i] += own.n_elements(piece)
            n = len([end for _, end in left[i] if end <= done[i]])
            found += [reduced for reduced, _ in left[i][:n]]
            left[i] = left[i][n:]
        waits = WaitStream(GRADIENTS, COMPUTE)
        parts += [piece.stretch, *[events("start_grad_sync", [waits, *found])] * bool(found)]
    return chain("backward", *parts)


def gathering(pieces: Sequence[Piece], traffic: Traffic) -> Stretch:
    """A forward pass beside which all buckets are gathered; each piece waits for the ones with its weights.

    The first piece's weights are in the last buckets.
    """
    begun: list[Event] = [WaitStream(WEIGHTS, COMPUTE)]
    for own, sent in traffic:
        for i, gathered in reversed(list(enumerate(sent))):
            begun += [gathered, RecordEvent(f"{own.group} bucket {i}", WEIGHTS)]
    parts = [events("start_param_sync", begun)]
    starts = [sum(map(own.n_elements, pieces)) for own, _ in traffic]
    left = [list(enumerate(_ends(own))) for own, _ in traffic]
    for piece in pieces:
        waits: list[Event] = []
        for i, (own, _) in enumerate(traffic):
            n_elements = own.n_elements(piece)
            starts[i] -= n_elements
            needed = [number for number, end in left[i] if n_elements and end > starts[i]]
            left[i] = left[i][: len(left[i]) - len(needed)]
            waits += [WaitStream(COMPUTE, f"{own.group} bucket {number}") for number in reversed(needed)]
        parts += [*[events("finish_param_sync", waits)] * bool(waits), piece.stretch]
    return chain("forward", *parts)


def _ends(own: Division) -> Iterator[int]:
    """The elements of the weights up to the end of each bucket."""
    return accumulate([bucket.unpadded for bucket in own.buckets])


def replaced(
    parts: Sequence[Stretch], local: int, part_of: PassPart, old: Stretch, new: Stretch
) -> list[Stretch]:
    """Stretches in order, with `new` for `old` in a chunk's first forward or last backward pass.

    A loop around it is unrolled by one repetition.
    """
    first, found = part_of == "forward", list(parts)
    for i in range(len(found)) if first else reversed(range(len(found))):
        part = found[i]
        if part.stage_pass == (local, part_of):
            found[i] = passed(local, part_of, *[new if one is old else one for one in part.parts])
            return found
        inner = replaced(part.parts, local, part_of, old, new) if part.has_passes else []
        if inner and any(one is not other for one, other in zip(inner, part.parts, strict=False)):
            once, others = chain(part.name, *inner), repeated(chain(part.name, *part.parts), part.repeats - 1)
            found[i : i + 1] = (once, others) if first else (others, once)
            return found
    return found
