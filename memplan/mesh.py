"""The mesh: the axes along which ranks are numbered, and the groups of ranks that collectives are among.

`AXES` is the table of axes. Plans, placement, traffic, time, searches, texts, flags and names of cases are
read from it. Another package adds an axis by an entry point of the group `memplan.axes` (see
`memplan.registry`), whose object is an `Axis`.

A *view* (`VIEWS`) is another division of the ranks of neighbouring axes, dp x cp x tp: with 8 x dp and
2 x tp, ep=4 are groups of 4 of these 16 ranks, and efsdp are the 4 ranks with the same place in their groups.

A *group* is an axis, a view or what they leave ("efsdp"), several neighbouring axes or views as one
("dp_replicate x dp"), some neighbouring ranks of an axis ("8 of dp"), all ranks (`WORLD`), or a rank and its
host (`HOST`). Sizes are whole numbers, or NumPy arrays over plans.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final

from memplan.errors import InvalidValue, UnknownName
from memplan.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Count: TypeAlias = "int | npt.NDArray[np.int64]"
"""A whole number, or one for each of many plans."""

Yes: TypeAlias = "bool | npt.NDArray[np.bool_]"
"""Yes or no, or one for each of many plans."""

Group: TypeAlias = str
"""The ranks of a collective, by the names of its axes."""

WORLD: Final[Group] = "world"
"""All ranks."""

HOST: Final[Group] = "host"
"""A rank and its host."""

TIMES: Final = " x "
"""Between the axes of a group of several."""

OF: Final = " of "
"""Between a number of neighbouring ranks and their axis."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of the mesh.

    Attributes:
        text: what its ranks are, for people.
        left_out: how many there are if the axis is left out, in words; empty: one.
        takes_sequences: its ranks train on different sequences, so they divide the global batch.
        waits: the part of a step's time that its traffic is counted in: "tp", "dp" or "pp".
        sends_along: its ranks send to the next and the previous one alone, as in a pipeline.
        word: its name in narrow tables.
        hidden_if_one: a mesh with one rank along it is written without it.
        outside_of: for another package's axis, the axis that it is just outside of.
    """

    text: str
    waits: Literal["tp", "dp", "pp"]
    left_out: str = ""
    takes_sequences: bool = False
    sends_along: bool = False
    word: str = ""
    hidden_if_one: bool = False
    outside_of: str = "tp"


AXES: Final = Registry(
    what="axis",
    plural="axes",
    kind=Axis,
    own={
        "pp": Axis(text="Pipeline-parallel ranks", waits="pp", sends_along=True),
        "dp_replicate": Axis(
            text="Replicas of the dp ranks that shard between them (HSDP)",
            waits="dp",
            takes_sequences=True,
            word="rep",
            hidden_if_one=True,
        ),
        "dp": Axis(
            text="Data-parallel ranks",
            waits="dp",
            left_out="what the cluster has left",
            takes_sequences=True,
        ),
        "cp": Axis(
            text="Context-parallel ranks, which divide each sequence between them",
            waits="tp",
            hidden_if_one=True,
        ),
        "tp": Axis(text="Tensor-parallel ranks", waits="tp"),
    },
)
"""The axes by name, memplan's own outermost first."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Another division of the ranks of memplan's own innermost axes (`VIEWED`).

    Attributes:
        text: what its ranks are, for people.
        waits: the part of a step's time that its traffic is counted in.
    """

    text: str
    waits: Literal["tp", "dp", "pp"]


VIEWS: Final[Mapping[str, View]] = {
    "ep": View(
        text="Expert-parallel ranks, which hold different experts: of the dp x cp x tp ranks", waits="tp"
    ),
    "etp": View(text="Tensor-parallel ranks of each expert (Megatron)", waits="tp"),
}
"""The views by name, outermost first: experts' own mesh is efsdp x ep x etp."""

VIEWED: Final = ("dp", "cp", "tp")
"""The axes whose ranks the views divide."""

REST: Final[Group] = "efsdp"
"""The ranks that have the same place in the views' groups, and so the same experts."""

DIVIDING: Final = ("tp", "cp", "ep")
"""The axes and views whose ranks run a module differently: it is traced for each number of these ranks."""


def axis_names() -> tuple[str, ...]:
    """The names of all axes, outermost first."""
    return _ordered(AXES.names())


@lru_cache(maxsize=16)
def _ordered(names: tuple[str, ...]) -> tuple[str, ...]:
    found = [name for name in names if name in AXES.own]
    for name in names[len(found) :]:
        found.insert(found.index(AXES.named(name).outside_of), name)
    return tuple(found)


def with_several(**sizes: int) -> dict[str, int]:
    """The axes with several ranks, of these.

    >>> with_several(tp=8), with_several(tp=1)
    ({'tp': 8}, {})
    """
    return {axis: n for axis, n in sizes.items() if n > 1}


def checked_group(name: str) -> Group:
    """The name of an axis or a view.

    Raises:
        UnknownName: there is none of this name.
    """
    return name if name in VIEWS else AXES.checked_name(name)


def degrees_text(mesh: Mapping[Group, int]) -> str:
    """The degree of each axis as text, or "one rank".

    >>> degrees_text({"tp": 8}), degrees_text({})
    ('tp=8', 'one rank')
    """
    return ", ".join(f"{axis}={n}" for axis, n in mesh.items()) or "one rank"


@lru_cache(maxsize=16)
def replica_axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes among these whose ranks divide the global batch between them."""
    return tuple([name for name in names if AXES.named(name).takes_sequences])


@final
class Mesh:
    """The numbers of ranks along the axes and views of a plan, or of many plans with arrays of them."""

    __slots__ = ("sizes", "views")

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self.sizes: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in axis_names()}
        self.views: dict[str, Any] = {view: sizes.get(view, 1) for view in VIEWS}

    def __str__(self) -> str:
        """The mesh, for people.

        >>> str(Mesh({"dp": 2, "pp": 2})), str(Mesh({"dp": 8, "ep": 4}))
        ('pp=2 x dp=2 x tp=1', 'pp=1 x dp=8 x tp=1, ep=4')
        """
        shown = [(axis, n) for axis, n in self.sizes.items() if n > 1 or not AXES.named(axis).hidden_if_one]
        axes = TIMES.join(f"{axis}={n}" for axis, n in shown)
        return ", ".join([axes, *[f"{view}={n}" for view, n in self.views.items() if n > 1]])

    @property
    def n_ranks(self) -> Any:
        """All ranks: the product of the axes."""
        return prod(self.sizes.values())

    @property
    def n_replicas(self) -> Any:
        """The ranks that divide the global batch between them."""
        return prod([self.sizes[axis] for axis in replica_axes(tuple(self.sizes))])

    @property
    def divided(self) -> tuple[str, ...]:
        """The axes with several ranks; of one plan."""
        return tuple([axis for axis, n in self.sizes.items() if n > 1])

    @property
    def dividing(self) -> dict[Group, int]:
        """The ranks along the axes and views over which a module is divided, where there are several."""
        return with_several(**{name: self.size(name) for name in DIVIDING})

    @property
    def n_communicators(self) -> Any:
        """NCCL communicators: one for each axis and view with several ranks, and for what a view leaves.

        There is one for all ranks where there are several.

        >>> [Mesh(sizes).n_communicators for sizes in ({}, {"dp": 8}, {"pp": 2, "dp": 2, "tp": 8})]
        [0, 1, 4]
        """
        n = sum(1 * (size > 1) for size in (*self.sizes.values(), *self.views.values()))
        n += 1 * (self.n_viewed > 1) * (self.size(REST) > 1)
        return n + 1 * (n > 1)

    @property
    def n_viewed(self) -> Any:
        """The ranks that hold one copy of all experts between them."""
        return prod(self.views.values())

    def size(self, group: Group) -> Any:
        """The ranks of a group; a rank and its host count as one.

        Raises:
            UnknownName: an axis that there is not.
        """
        if group in self.sizes:
            return self.sizes[group]
        if group in self.views:
            return self.views[group]
        match group:
            case "efsdp":
                return prod([self.sizes[axis] for axis in VIEWED]) // self.n_viewed
            case "world":
                return self.n_ranks
            case "host":
                return 1
        if OF in group:
            return int(group.partition(OF)[0])
        own = self.sizes | self.views
        return prod(own[checked_group(axis)] for axis in group.split(TIMES))

    def stride(self, group: Group) -> Any:
        """The ranks between two neighbours of a group.

        Raises:
            UnknownName: an axis that there is not.
            InvalidValue: axes that are no neighbours, whose ranks have no common distance.
        """
        if group == WORLD:
            return 1
        if group == REST:
            return self.n_viewed
        names, axes = list(self.sizes), [checked_group(axis) for axis in axis_of_part(group).split(TIMES)]
        if axes[-1] in self.views:
            return prod(list(self.views.values())[list(self.views).index(axes[-1]) + 1 :])
        places = [names.index(axis) for axis in axes]
        between = {*names[places[0] : places[-1] + 1]}.difference(axes)
        if places != sorted(places) or any(_has_several(self.sizes[axis]) for axis in between):
            raise InvalidValue(
                f"group={group!r} is of axes that are not beside each other in {TIMES.join(names)}; name "
                "them in this order, with the ones between."
            )
        return prod(list(self.sizes.values())[places[-1] + 1 :])

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank along each axis; the last axis is the innermost.

        >>> Mesh({"dp": 2, "tp": 2}).place(3)
        {'pp': 0, 'dp_replicate': 0, 'dp': 1, 'cp': 0, 'tp': 1}
        """
        found: dict[str, int] = {}
        for axis, n in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, n)
        return {axis: found[axis] for axis in self.sizes}


def inner_first(groups: Mapping[Group, Any]) -> Iterator[Group]:
    """Groups in order: axes, the innermost first; views; products and parts of axes; all ranks; the host.

    Raises:
        UnknownName: an axis that there is not.

    >>> list(inner_first({"host": 1, "pp": 2, "dp_replicate x dp": 4, "tp": 8}))
    ['tp', 'pp', 'dp_replicate x dp', 'host']
    """
    views = *VIEWS, REST
    composed = [group for group in groups if TIMES in group or OF in group]
    names = [*reversed(axis_names()), *views, *composed, WORLD, HOST]
    for unknown in set(groups).difference(names):
        AXES.checked_name(unknown)
    yield from [group for group in names if group in groups]


def shard_group(cp: Count) -> Group:
    """The ranks between which FSDP shards weights and DDP averages gradients: dp, or all of dp x cp.

    `cp`: of one plan, or of many that all have context-parallel ranks or none.

    Source: accelerate.parallelism_config:ParallelismConfig.dp_shard_cp_dim_names.
    """
    return f"dp{TIMES}cp" if _has_several(cp) else "dp"


def _has_several(n_ranks: Count) -> bool:
    """Whether any of the numbers is above 1."""
    return n_ranks > 1 if isinstance(n_ranks, int) else bool((n_ranks > 1).any())


def part_of(axis: str, n_ranks: int) -> Group:
    """The group of `n_ranks` neighbouring ranks of an axis.

    >>> Mesh({"dp": 16, "tp": 2}).size(part_of("dp", 4)), Mesh({"dp": 16, "tp": 2}).stride("4 of dp")
    (4, 2)
    """
    return f"{n_ranks}{OF}{axis}"


def axis_of_part(group: Group) -> Group:
    """The axis whose ranks a group is a part of, or the group itself."""
    return group.rpartition(OF)[2]


def sends_along(group: Group) -> bool:
    """Whether the ranks of a group send to the next and the previous one alone.

    Raises:
        UnknownName: an axis that there is not.
    """
    if group == WORLD or TIMES in group or OF in group or group in (*VIEWS, REST):
        return False
    return AXES.named(group).sends_along


def waits_of(group: Group) -> str:
    """The part of a step's time that a group's traffic is counted in.

    Raises:
        UnknownName: an axis that there is not.
    """
    if group == HOST:
        raise UnknownName("the host is no group of ranks.")
    first = axis_of_part(group).partition(TIMES)[0]
    if first in VIEWS:
        return VIEWS[first].waits
    return "dp" if group in (WORLD, REST) else AXES.named(first).waits
