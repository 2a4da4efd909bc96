"""Lower bounds of Megatron-Core's memory and traffic, for a search."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from memplan.device import Device
from memplan.engines.base import DataParallelism, PartCosts, ring_bytes
from memplan.engines.costs import part_costs
from memplan.engines.megatron.buffers import state_types
from memplan.engines.megatron.chunk import PARAMS_DTYPES, ModelChunk
from memplan.engines.megatron.options import megatron_options
from memplan.models import Model
from memplan.plan import Plan, unchecked


def megatron_part_costs(model: Model, plan: Plan, device: Device) -> PartCosts:
    """The figures of `Engine.part_costs`: a chunk of one layer of each kind is traced, recomputed or not.

    Under `first_last_layers_bf16` it is the second one, which holds less and is faster than the first.
    """
    second = megatron_options(plan).first_last_layers_bf16 and model.n_blocks > 1
    layers = {kind: i + second for kind, i in _first_layers(model)}

    def chunks(plan: Plan) -> dict[str, ModelChunk]:
        return {
            kind: ModelChunk(model, plan, device, first=True, last=True, layers=range(i, i + 1))
            for kind, i in layers.items()
        }

    plain = chunks(unchecked(plan, recompute="none", recompute_blocks=None))
    again = plain if plan.recompute == "none" else chunks(plan)
    of_plain, of_again = ({kind: one.blocks[0][0] for kind, one in each.items()} for each in (plain, again))
    trace = next(iter(plain.values())).trace
    return part_costs(trace, of_plain, of_again, ring_bytes, plan.tp, frees_output=True)


def _first_layers(model: Model) -> Iterator[tuple[str, int]]:
    """The kinds of layers, each with the index of its first one."""
    seen: set[str] = set()
    start = 0
    for kind, n in model.layers:
        if kind not in seen:
            seen.add(kind)
            yield kind, start
        start += n


def data_parallelism(plan: Plan, elements: Any) -> DataParallelism:
    """The figures of `Engine.data_parallelism`.

    Experts are reduced between other ranks, so with `ep` no traffic is counted. Of weights in 8 bits all are
    taken to be so.
    """
    options, group, n = megatron_options(plan), plan.shard_group, plan.n_shards
    dtype = PARAMS_DTYPES[plan.precision]
    types = state_types(dtype, plan.optimizer, options)
    weight_bytes = 1 if options.fp8_param_gather else dtype.itemsize
    weights, grads = elements * weight_bytes, elements * types.grads.itemsize
    shards = (plan.zero == 1) | options.megatron_deepspeed
    own = np.where(shards, 1 / np.maximum(n, plan.efsdp), 1.0)
    of_optimizer = [types.main, *types.moments.values()]
    kept = elements * own * sum([one.itemsize for one in of_optimizer if one is not None])
    part = (n - 1) / n * (plan.ep == 1)
    reduced, gathered = np.where(plan.zero == 1, 1, 2) * grads * part, (plan.zero == 1) * weights * part
    beside_backward, beside_forward = options.overlap_grad_reduce, options.overlap_param_gather
    return DataParallelism(
        waits={group: (0 if beside_backward else reduced) + (0 if beside_forward else gathered)},
        reductions={group: reduced} if beside_backward else {},
        gathers={group: gathered} if beside_forward else {},
        reducing=np.where(plan.pp == 1, 1 / plan.n_micro_batches, 1.0) if beside_backward else 0.0,
        states_bytes=weights + grads + kept,
        unsharded_bytes=0.0,
        grads_bytes=0.0,
        updated_bytes=own * weights,
    )
