"""What systems share whose ranks each have the whole model: its passes, and the names of its groups."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memplan.mesh import Group, part_of
from memplan.models import Decoder
from memplan.plan import Rank
from validate.cases import Case
from validate.systems.torch.modules import token_loss
from validate.systems.torch.passes import batch
from validate.systems.torch.wild import (
    checkpoint_blocks,
    checkpoint_only,
    loss_of,
    stacks_of,
    values_as_on_a_gpu,
    wild_inputs,
    wild_of,
)


def axis_of_groups(axis: Group = "dp") -> dict[str, Group]:
    """The axis of each process group of several ranks: of all ranks this one, else a part of "dp"."""
    n = dist.get_world_size()
    sizes = {str(name): group.size() for group, name in dist.distributed_c10d._world.pg_names.items()}
    return {name: axis if size == n else part_of("dp", size) for name, size in sizes.items() if size > 1}


def losses(case: Case, module: Any, at: Rank, device: torch.device) -> Callable[[int], Tensor]:
    """The loss of the i-th micro-batch of this rank."""
    plan, n = case.plan, case.plan.n_micro_batches
    if isinstance(case.model, Decoder) and not case.is_of_others:
        tokens, targets = (one.chunk(n) for one in batch(case.model, plan, at, seed=case.seed, device=device))
        return lambda i: token_loss(module(tokens[i]), targets[i], chunks=plan.loss_chunks)
    inputs = wild_inputs(case.model, plan, at, device, seed=case.seed)
    parts = micro_batches(inputs, n)
    return values_as_on_a_gpu()(lambda i: loss_of(module, parts[i]))


def micro_batches(inputs: Mapping[str, Tensor], n: int) -> list[dict[str, Tensor]]:
    """The inputs of each of n micro-batches."""
    return [{name: value.chunk(n)[i] for name, value in inputs.items()} for i in range(n)]


def module_of_others(case: Case) -> nn.Module:
    """The module of a traced model, or of transformers, which is made as `from_pretrained` makes it."""
    with import_module("transformers.initialization").no_init_weights():
        made = wild_of(case.model).module()
    cast(Any, made).tie_weights()
    checkpoint_blocks(made, case.plan)
    checkpoint_only(stacks_of(made, case.model), made, case.plan)
    return made
