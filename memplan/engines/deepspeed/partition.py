"""The layers of each stage of a PipelineModule: the embedding, the blocks and the head in a row."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from memplan.engines.deepspeed.options import deepspeed_options
from memplan.models import Model
from memplan.passes.trace import Trace
from memplan.plan import Plan


def stages(model: Model, trace: Trace, plan: Plan) -> list[range]:
    """The layers of each stage, the embedding being layer 0; `trace`: of the whole model.

    Source: `deepspeed.runtime.pipe.module:PipelineModule._partition_layers`.
    """
    n = model.n_blocks + 2
    match deepspeed_options(plan).partition_method:
        case "uniform":
            parts = partition_uniform(n, plan.pp)
        case "parameters":
            parts = list(partition_balanced(tuple(_elements(model, trace)), plan.pp))
        case _:
            parts = list(partition_balanced((0, *[1] * model.n_blocks, 0), plan.pp))
    return [range(start, stop) for start, stop in pairwise(parts)]


def blocks_in(layers: range, n_blocks: int) -> range:
    """The blocks among a stage's layers."""
    return range(max(layers.start - 1, 0), min(layers.stop - 1, n_blocks))


def _elements(model: Model, trace: Trace) -> list[int]:
    """The trained elements of each layer."""

    def of(part: Sequence[object]) -> int:
        return sum([one.n_elements for one in part if one.requires_grad])  # type: ignore[attr-defined]

    own = {kind.kind: of(block.parameters) for kind, block in trace.blocks.items()}
    blocks = [own[kind] for kind, n in model.layers for _ in range(n)]
    return [of(trace.embed_parameters), *blocks, of(trace.head_parameters)]


def partition_uniform(n_items: int, n_parts: int) -> list[int]:
    """The first item of each part, and the end; parts are equal, the first ones have one more.

    >>> partition_uniform(34, 4), partition_uniform(3, 4)
    ([0, 9, 18, 26, 34], [0, 1, 2, 3, 3])

    Source: `deepspeed.runtime.utils:partition_uniform`.
    """
    if n_items <= n_parts:
        return [min(part, n_items) for part in range(n_parts + 1)]
    each, odd = divmod(n_items, n_parts)
    return [part * each + min(part, odd) for part in range(n_parts + 1)]


@lru_cache(maxsize=1024)
def partition_balanced(weights: tuple[int, ...], n_parts: int) -> tuple[int, ...]:
    """The first item of each part, and the end, so that the heaviest and the lightest part differ least.

    Of several ways the one with the latest last part is taken.

    >>> partition_balanced((0, 1, 1, 1, 1, 0), 2)
    (0, 3, 6)

    Source: `deepspeed.runtime.utils:partition_balanced`.
    """
    n = len(weights)
    if n <= n_parts:
        return tuple(partition_uniform(n, n_parts))
    before = [0, *accumulate(weights)]
    most: list[list[float]] = [[0.0] + [inf] * n]
    least: list[list[float]] = [[inf] * (n + 1)]
    starts = [[0] * (n + 1)]
    for part in range(1, n_parts + 1):
        heaviest, lightest, start, cost = ([inf] * (n + 1) for _ in range(4))
        for i in range(part, n + 1):
            for k in range(i):
                own = before[i] - before[k]
                high, low = max(most[-1][k], own), min(least[-1][k], own)
                if cost[i] >= high - low:
                    cost[i], heaviest[i], lightest[i], start[i] = high - low, high, low, k
        most.append(heaviest)
        least.append(lightest)
        starts.append([0 if one == inf else int(one) for one in start])
    parts = [n]
    for part in range(n_parts, 0, -1):
        parts.append(starts[part][parts[-1]])
    return tuple(reversed(parts))
