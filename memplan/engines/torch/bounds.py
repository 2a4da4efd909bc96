"""Lower bounds of data parallelism's traffic and memory in closed form; a plan's fields may be arrays.

All plans of the arrays have one data-parallel rank, or all have several; all use FSDP2, or none does.
"""

from typing import Any

import numpy as np

from memplan.engines.base import DataParallelism
from memplan.engines.torch.options import torch_options
from memplan.engines.torch.orders import MOST_ACTIVE_STAGES
from memplan.plan import Plan


def data_parallelism(plan: Plan, elements: Any, block_elements: Any, single_stage: Any) -> DataParallelism:
    """The figures of `Engine.data_parallelism`."""
    if np.min(plan.zero) >= 2:
        return _fully_sharded(plan, elements, block_elements, single_stage)
    options = torch_options(plan)
    stored, n = plan.formats.stored.itemsize, plan.n_shards
    several = bool(np.min(n) > 1)
    weights = elements * stored
    part = (n - 1) / n
    share = np.where(plan.zero == 1, 1 / n, 1)
    reduces = several and options.ddp_comm_hook == "none"
    keeps_grads = not options.set_to_none or (several and options.gradient_as_bucket_view)
    holds_no_grads = keeps_grads or options.optimizer_in_backward or options.offload_gradients
    return DataParallelism(
        waits={plan.shard_group: (plan.zero == 1) * weights * part} if several else {},
        reductions={plan.shard_group: 2 * weights * part} if reduces else {},
        gathers={},
        reducing=1 / plan.n_micro_batches if several else np.where(plan.pp == 1, 1.0, 0.0),
        updated_bytes=share * weights,
        unsharded_bytes=0.0,
        states_bytes=((2 if several else 1) + share * plan.kept.least_share) * weights,
        grads_bytes=0.0 if holds_no_grads else elements * plan.formats.accumulate.itemsize,
    )


def _fully_sharded(plan: Plan, elements: Any, block_elements: Any, single_stage: Any) -> DataParallelism:
    """The bounds under FSDP2, which reduces in each micro-batch (in a pipeline once)."""
    options = torch_options(plan)
    formats, n, pp, m = plan.formats, plan.n_shards, plan.pp, plan.n_micro_batches
    part = (n - 1) / n
    once = np.where(pp == 1, m, 1)
    n_reductions = 1 if options.no_sync else once
    again = np.where((pp == 1) | single_stage, m, 0)
    reshards = (plan.zero == 3) & (options.fsdp_units != "model")
    keeps_weights = options.no_sync and options.fsdp_version == 1
    n_gathers = np.where((plan.zero == 2) & keeps_weights, 1, once)
    gathered = n_gathers * elements + reshards * again * block_elements
    reduced = n_reductions * elements * formats.reduce.itemsize
    part = part * (plan.ep == 1)  # experts are sharded between fewer ranks, and send less
    weights = elements * formats.stored.itemsize / n
    keeps_gathered = (plan.zero == 2) & (n > 1) & (plan.virtual_stages <= MOST_ACTIVE_STAGES)
    keeps_no_grads = plan.offload or options.optimizer_in_backward
    grads = 0.0 if keeps_no_grads else elements * formats.accumulate.itemsize / n
    unsharded_grads = elements * formats.reduce.itemsize
    by_block = options.fsdp_version == 2 and options.fsdp_units != "model" and options.fsdp_blocks == 1
    # A pipeline's schedule neither reshards nor reduces before a stage's last backward pass has ended.
    whole = formats.gather.itemsize + formats.reduce.itemsize
    # Gradients, their copy that is reduced, and the weights of the block before, which are there already.
    copied = formats.gather.itemsize * (1 + (plan.zero == 3)) + formats.reduce.itemsize
    return DataParallelism(
        waits={},
        reductions={
            plan.shard_group: reduced * part,
            "dp_replicate": 2 * reduced / n * (plan.dp_replicate - 1) / plan.dp_replicate,
        },
        gathers={plan.shard_group: gathered * formats.gather.itemsize * part},
        reducing=np.where(pp == 1, 1 / m if options.no_sync else 1.0, 0.0),
        updated_bytes=weights,
        unsharded_bytes=np.where(keeps_gathered, elements * formats.gather.itemsize, 0.0),
        states_bytes=0.0 if plan.offload else (1 + plan.kept.least_share) * weights,
        grads_bytes=np.where(pp > 1, unsharded_grads, grads) if options.set_to_none else 0.0,
        reduced_bytes=np.where((pp == 1) & (n > 1) & (plan.ep == 1), copied, 0) if by_block else 0.0,
        ended_bytes=np.where((pp > 1) & (n > 1), whole, 0) if options.fsdp_version == 2 else 0.0,
    )
