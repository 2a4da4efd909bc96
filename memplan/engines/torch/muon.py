"""Muon's updates of the blocks' matrices, one by one: whole ones, or DTensors of FSDP2 or of tensor ranks.

Source: `torch.optim._muon:_single_tensor_muon`.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from memplan.engines.torch.dtensor import ROWS, WHOLE, Placed, Ranks
from memplan.engines.torch.stage import RankStages
from memplan.errors import MissingRule
from memplan.kernels import norm_scratch
from memplan.parts.newton_schulz import STEPS
from memplan.placements import Shard
from memplan.record import Collective, Event, Stretch, allocs, events, frees, repeated
from memplan.shapes import BF16, FP32, Buffer, Parameter, buffer_of


def orthogonalized(
    stages: RankStages, parts: Iterable[tuple[Sequence[Parameter], int]], name: str
) -> Iterator[Stretch]:
    """The updates of the matrices: an orthogonalized one lives until the next is looked up.

    `parts`: the parameters in order, and how many times each list occurs; `name`: the stretches' name.
    """
    before: Buffer | None = None
    made: dict[Parameter, tuple[Buffer, list[Event], Buffer]] = {}
    for parameters, times in parts:
        found: list[Event] = []
        for parameter in [one for one in parameters if one in stages.matrices]:
            if parameter not in made:
                made[parameter] = _update(stages, parameter)
            look_ahead, iterations, result = made[parameter]
            found += (*allocs(look_ahead), *(() if before is None else frees(before)), *iterations)
            before = result
        yield repeated(events(name, found), times)
    if before is not None:
        yield events(name, frees(before))


def _update(stages: RankStages, parameter: Parameter) -> tuple[Buffer, list[Event], Buffer]:
    """A matrix's Nesterov momentum, the events that orthogonalize it, and the result, which stays.

    Each iteration has the products x xT, gram gram and gram x, where x has at most as many rows as columns.

    Raises:
        MissingRule: for a matrix that the ranks do not divide equally, or see `Ranks.product`.

    Source: `torch.optim._muon:_zeropower_via_newtonschulz`.
    """
    plan, name, whole = stages.plan, parameter.name, parameter.whole_shape
    ranks, own = _ranks(stages, parameter)
    n = max([prod(ranks.sizes), 1]) if any(isinstance(one, Shard) for one in own) else 1
    if any(size % n for size in whole):
        raise MissingRule(
            f"optimizer='muon' with zero={plan.zero} has no rule for {name}, {whole}, whose rows "
            f"or columns {n} ranks do not divide equally; use a dp that does, or adamw.",
            kind="Muon of sharded matrices that ranks do not divide equally",
        )
    shape, dtype = stages.weight_shape(parameter), stages.weight_dtype
    look_ahead = buffer_of(f"{name} (look-ahead)", shape, dtype)
    copies, is_tall = dtype != BF16, whole[0] > whole[1]
    x = ranks.new(f"{name} (orthogonal)", whole, own)
    found = [*(allocs(x.buffer) if copies else ()), *_normalized(stages, parameter, ranks, own)]
    x = x.transposed if is_tall else x
    pair: list[Buffer] = []
    for i in range(STEPS):
        made, gram = ranks.product(f"{name} (gram)", (x, x.transposed))
        found += (*made, *frees(*pair[:1]))
        made, polynomial = ranks.product(f"{name} (gram update)", (gram, gram), gram)
        found += (*made, *frees(*pair[1:]))
        made, y = ranks.product(f"{name} (orthogonal)", (polynomial, x), x)
        found += (*made, *(frees(x.buffer) if i or copies else ()))
        x, pair = y, [gram.buffer, polynomial.buffer]
    found += frees(*pair, look_ahead)
    x = x.transposed if is_tall else x
    moved, y = ranks.redistributed(x, own)
    casts = stages.update_device.on_cpu and copies
    cast = [buffer_of(f"{name} (update, cast)", y.local, dtype)] if casts else []
    gone = frees(y.buffer) if y is not x else ()
    return look_ahead, [*found, *moved, *allocs(*cast), *frees(*cast), *gone], x.buffer


def _ranks(stages: RankStages, parameter: Parameter) -> tuple[Ranks, Placed]:
    """The ranks over which a matrix is a DTensor, and its placements."""
    plan, context = stages.plan, stages.stages[0].op_context
    if plan.fsdp and plan.dp_replicate > 1:
        axes = ("dp_replicate", plan.shard_group)
        return Ranks((plan.dp_replicate, plan.n_shards), axes, context), (WHOLE, ROWS)
    if plan.fsdp:
        return Ranks((plan.n_shards,), (plan.shard_group,), context), (ROWS,)
    if plan.tp > 1:
        return Ranks((plan.tp,), ("tp",), context), (parameter.placements.get("tp", WHOLE),)
    return Ranks((), (), context), ()


def _normalized(stages: RankStages, parameter: Parameter, ranks: Ranks, own: Placed) -> Iterator[Event]:
    """The division of a matrix by its norm, to which all ranks' parts contribute.

    Source: `torch.distributed.tensor._ops._math_ops:_NormPartial`.
    """
    name = parameter.name
    norm, clamped = (buffer_of(f"{name} ({what})", (), BF16) for what in ("norm", "clamped norm"))
    n = stages.weight_elements(parameter)
    scratch = [
        Buffer(f"{name} (sums of squares)", (), FP32, n_bytes, "temporaries")
        for n_bytes in norm_scratch(stages.update_device, n, itemsize=FP32.itemsize)
    ]
    yield from (*allocs(norm, *scratch), *frees(*scratch))
    whole = [norm]
    for axis in [axis for axis, one in zip(ranks.axes, own, strict=True) if isinstance(one, Shard)]:
        power, summed, total = (
            buffer_of(f"{name} ({what})", (), BF16) for what in ("power of the norm", "sum", "norm of all")
        )
        yield from allocs(power, summed)
        yield Collective(kind="all_reduce", axis=axis, what="norms of matrices", payload_bytes=BF16.itemsize)
        yield from (*allocs(total), *frees(power, summed))
        whole.append(total)
    yield from (*allocs(clamped), *frees(*whole, clamped))
