"""What the stages and ranks of a grid's plans are made of."""

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import NamedTuple

from memplan.models import Model
from memplan.plan import RECOMPUTES, SPLITTING_SCHEDULES, Plan
from memplan.search.corners import Blocks
from memplan.search.plans import NO_LIMIT, Column, Grid
from memplan.search.stages import Ends, with_values


def alike(found: Iterator[tuple[Grid, Column]]) -> list[list[tuple[Grid, Column]]]:
    """Grids that an `Evaluation` may have together."""
    groups: dict[Hashable, list[tuple[Grid, Column]]] = {}
    for grid, places in found:
        groups.setdefault(kind_of(grid), []).append((grid, places))
    return list(groups.values())


def kind_of(grid: Grid) -> Hashable:
    """What the stages of a grid are made of."""
    structure = grid.structure
    others = [structure[name] for name in ("offload", "sequence_parallel", "recompute")]
    return mode_of(grid), *others


def mode_of(grid: Grid) -> int:
    """What the data axis does: nothing, DDP, or FSDP2 for ZeRO-2 or 3."""
    zero = grid.structure["zero"]
    return zero if zero >= 2 else int(grid.cells["dp"][0] > 1)


def splits(grid: Grid) -> bool:
    """Whether backward passes are taken apart."""
    return grid.schedule in SPLITTING_SCHEDULES


def has_rule(base: Plan) -> bool:
    """Whether nothing in common asks for whole lists of numbers: of DDP's buckets, of stages' layers."""
    return base.engine == "torch" and base.ddp_comm_hook == "none" and base.layers_per_stage is None


def blocks_of(grid: Grid, n: int, limit: int) -> Blocks:
    """How many of a stage's blocks are recomputed, and how many not, if at most so many are."""
    if RECOMPUTES[grid.structure["recompute"]] == "none":
        return 0, n
    return (n, 0) if limit == NO_LIMIT or limit >= n else (limit, n - limit)


def all_blocks_of(grid: Grid, n: int) -> list[Blocks]:
    """`blocks_of` a stage with n blocks, for each of a grid's numbers of recomputed blocks."""
    return [blocks_of(grid, n, limit) for limit in grid.recompute_blocks.tolist()]


def plan_of(grid: Grid) -> Plan:
    """A plan of a grid's structure: what is along no axis decides what its stages are made of."""
    mode, structure = mode_of(grid), grid.structure
    return with_values(
        grid.base,
        dp=2 if mode else 1,
        dp_replicate=1,
        pp=2 if structure["pp"] > 1 else 1,
        zero=mode if mode >= 2 else 0,
        sequence_parallel=bool(structure["sequence_parallel"]),
        recompute=RECOMPUTES[structure["recompute"]],
        recompute_blocks=None,
        schedule="1f1b",
        virtual_stages=1,
        micro_batch=1,
        offload=bool(structure["offload"]),
    )


class RankPlaces(NamedTuple):
    """A rank of a pipeline: where its stages are, and the ends and number of blocks of each."""

    pp: int
    indices: tuple[int, ...]
    stages: tuple[tuple[Ends, int], ...]

    @property
    def distinct(self) -> tuple[tuple[Ends, int], ...]:
        """Its stages, alike ones once."""
        return tuple(dict.fromkeys(self.stages))

    @property
    def whole(self) -> tuple[Ends, int]:
        """All of them as one."""
        first, last = (any(ends[i] for ends, _ in self.stages) for i in (0, 1))
        return (first, last), sum(n for _, n in self.stages)


@lru_cache(maxsize=4096)
def ranks_of_pipeline(n_layers: int, schedule: str, pp: int, virtual_stages: int) -> tuple[RankPlaces, ...]:
    """The ranks of a pipeline, of equal stages as far as that is possible."""
    plan = with_values(Plan(), pp=pp, virtual_stages=virtual_stages, schedule=schedule)
    each, odd = divmod(n_layers, plan.n_stages)
    found = []
    for rank in range(pp):
        indices = plan.stages_of(rank)
        stages = tuple([((i == 0, i == plan.n_stages - 1), each + (i < odd)) for i in indices])
        found.append(RankPlaces(rank, indices, stages))
    return tuple(found)


def ranks_of(model: Model, grid: Grid) -> tuple[RankPlaces, ...]:
    """The ranks of a grid's pipelines."""
    pp, virtual_stages = grid.structure["pp"], grid.structure["virtual_stages"]
    return ranks_of_pipeline(model.n_layers, grid.schedule, pp, virtual_stages)
