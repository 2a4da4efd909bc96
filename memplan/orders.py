"""The order in which a pipeline rank runs its passes, as nested loops whose length does not grow.

An action need not name its micro-batch: each kind of pass of a stage takes the micro-batches in turn.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat
from operator import sub
from typing import Final, Literal, NamedTuple

ActionKind = Literal[
    "forward",
    "backward",
    "last-backward",
    "backward-input",
    "backward-weight",
    "unshard",
    "reshard",
    "reduce",
]
"""The actions of a pipeline rank.

`backward` computes all gradients; `backward-input` the gradient of the stage's input, and a later
`backward-weight` the gradients of its weights.

DDP reduces in `last-backward`. `unshard`, `reshard` and `reduce` are FSDP2's, for all weights of a stage.
"""

LAST_PARTS: Final = ("backward", "backward-weight")
"""The parts of a pass that end a micro-batch's backward pass."""

Stages = tuple[int, ...]
"""Indices of a rank's stages, or one number for each of them."""


class Action(NamedTuple):
    """An action on the `local`-th of the rank's stages, such as a pass of one micro-batch."""

    kind: ActionKind
    local: int


class Loop(NamedTuple):
    """Actions and loops in order, repeated `times` times."""

    parts: "tuple[Action | Loop, ...]"
    times: int = 1


def loop_of(parts: "Iterable[Action | Loop]") -> Loop:
    """A loop of these parts in order; a part that is repeated once is replaced by its own parts.

    >>> twice = Loop(listed("F0"), 2)
    >>> loop_of([Loop(listed("F0 B0")), twice]) == Loop((*listed("F0 B0"), twice))
    True
    """
    found: list[Action | Loop] = []
    for part in parts:
        if isinstance(part, Loop) and part.times == 1:
            found += part.parts
        else:
            found.append(part)
    return Loop(tuple(found))


LETTERS: Final[dict[str, ActionKind]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward-input",
    "W": "backward-weight",
}


@lru_cache(maxsize=1024)
def listed(text: str) -> tuple[Action, ...]:
    """Actions by their letter and the rank's stage, as the papers draw them.

    >>> listed("F0 B1")
    (Action(kind='forward', local=0), Action(kind='backward', local=1))
    """
    return tuple([Action(LETTERS[word[0]], int(word[1:])) for word in text.split()])


def actions(loop: Loop) -> Iterator[Action]:
    """Every action of a loop, one by one.

    >>> [action.kind for action in actions(Loop((*listed("F0"), Loop(listed("B0"), 2))))]
    ['forward', 'backward', 'backward']
    """
    for action, n in in_rows(loop):
        yield from repeat(action, n)


def in_rows(loop: Loop) -> Iterator[tuple[Action, int]]:
    """Every action of a loop in order, with the number of times in a row where a loop says it.

    >>> [(action.kind, n) for action, n in in_rows(Loop((Loop(listed("F0"), 3), Loop(listed("B0 F0"), 1))))]
    [('forward', 3), ('backward', 1), ('forward', 1)]
    """
    if len(loop.parts) == 1 and isinstance(loop.parts[0], Action):
        if loop.times:
            yield loop.parts[0], loop.times
        return
    for _ in range(loop.times):
        for part in loop.parts:
            if isinstance(part, Action):
                yield part, 1
            else:
                yield from in_rows(part)


def counts(loop: Loop) -> dict[Action, int]:
    """The occurrences of each action."""
    found: Counter[Action] = Counter()
    for part in loop.parts:
        found.update({part: 1} if isinstance(part, Action) else counts(part))
    return {action: n * loop.times for action, n in found.items()}


def under_way(order: Loop, n_stages: int, m: int) -> tuple[Stages, Stages | None]:
    """Micro-batches in flight by stage: before the first backward pass, and once every stage has had one.

    The latter is just before the next backward pass; None if a pass so far was split, or was a stage's last
    of m.

    >>> under_way(Loop((Loop(listed("F0"), 3), Loop(listed("B0 F0"), 5), Loop(listed("B0"), 3))), 1, 8)
    ((3,), (3,))
    >>> under_way(Loop((Loop(listed("F0"), 8), Loop(listed("B0"), 8))), 1, 8)
    ((8,), (7,))
    """
    forward, backward = [0] * n_stages, [0] * n_stages
    first: Stages | None = None
    for action, n in in_rows(order):
        if action.kind == "forward":
            forward[action.local] += n
            continue
        first = first or tuple(forward)
        if action.kind != "backward":
            return first, None
        for times in (1, n - 1):
            if times and all(backward):
                return first, tuple(map(sub, forward, backward)) if max(backward) < m else None
            backward[action.local] += times
    return first or tuple(forward), None
