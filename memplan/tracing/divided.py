"""A module as one rank of a mesh has it: divided by its own framework's code, over ranks that are played."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from memplan.errors import InvalidValue, MemplanError, reason
from memplan.mesh import Group, degrees_text
from memplan.models.traced import Placed
from memplan.placements import Partial, Placement, Replicate, Shard

Ranks = DeviceMesh | dict[str, DeviceMesh]
"""The ranks over which a module is divided: a mesh; with the view "ep" among its axes, one for each axis."""

Parallelize = Callable[[nn.Module, Any], Any]
"""Divides a module over `Ranks`, in place or into another one, which it returns."""


@contextmanager
def divided(
    module: nn.Module, mesh: Mapping[str, int], parallelize: Parallelize, device: torch.device
) -> Iterator[tuple[nn.Module, Mapping[str, Group]]]:
    """A copy of the module as the mesh's first rank has it, and the mesh's axes by the names of their groups.

    The module is left as it was; its copy's parameters are on `meta`, and its buffers are the module's own.

    Raises:
        InvalidValue: `parallelize` fails, with what it says.
    """
    with played_mesh(mesh, device) as ranks:
        own = copied(module)
        try:
            made = parallelize(own, ranks)
        except MemplanError:
            raise
        except Exception as error:
            raise InvalidValue(
                f"{type(module).__name__} cannot be divided over {degrees_text(mesh)} ({reason(error)}); use "
                "one rank, other degrees, or a function of your own (memplan.trace, parallelize)."
            ) from error
        groups = {str(ranks[axis].get_group().group_name): axis for axis in mesh}
        yield (made if isinstance(made, nn.Module) else own), groups


def copied(module: nn.Module) -> nn.Module:
    """The module with its parameters on `meta`; what is no parameter is copied, but for its buffers."""
    known: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for one in module.parameters():
        known[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
    return deepcopy(module, known)


@contextmanager
def played_mesh(sizes: Mapping[str, int], device: torch.device) -> Iterator[Ranks]:
    """The ranks of a job of which this process is the first; collectives end at once and move nothing.

    Of expert-parallel ranks there are two groups, in which tensor-parallel ones are neighbours: PyTorch would
    make one process group of groups of all ranks.

    Raises:
        InvalidValue: the process is one of a real job.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if dist.is_initialized():
        raise InvalidValue(
            "a module is divided over ranks that are played, but this process is a rank of its own job "
            "(torch.distributed is initialized); trace it in another process, or before."
        )
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    n = 2 * ep if ep > 1 else tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        if ep == 1:
            yield init_device_mesh(device.type, (n,), mesh_dim_names=("tp",))
            return
        dense = init_device_mesh(device.type, (n // tp, tp), mesh_dim_names=("dp", "tp"))
        experts = init_device_mesh(device.type, (2, ep), mesh_dim_names=("efsdp", "ep"))
        yield {"tp": dense["tp"], "ep": experts["ep"]}
    finally:
        dist.destroy_process_group()


def own_plan(module: nn.Module) -> Parallelize:
    """What divides a module that comes with a plan: one of transformers.

    Raises:
        InvalidValue: any other module.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        raise InvalidValue(
            f"{type(module).__name__} has no plan of its own; say what divides it: memplan.trace(module, "
            "inputs, mesh={...}, parallelize=function), which is called with the module and a DeviceMesh."
        )
    return by_plan_of_transformers


def by_plan_of_transformers(module: Any, ranks: Ranks) -> None:
    """Divide a module of transformers over tensor- and expert-parallel ranks.

    It is what `from_pretrained(distributed_config=...)` does. transformers ties weights only after it has
    divided them.

    Source: transformers.distributed.mixin:DistributedMixin.maybe_distribute_model.
    """
    configuration = import_module("transformers.distributed.configuration_utils")
    tensor_parallel = import_module("transformers.distributed.tensor_parallel")
    expert_parallel = import_module("transformers.distributed.expert_parallel")
    tp, ep = (ranks["tp"], ranks["ep"]) if isinstance(ranks, dict) else (ranks["tp"], None)
    n, n_experts = tp.size(), 1 if ep is None else ep.size()
    asked = configuration.DistributedConfig(tp_size=n, ep_size=n_experts, fsdp_size=max(1, n_experts // n))
    asked.fsdp_size = 1  # who shards the rest is not asked here
    plan, of_experts, _ = module._resolve_parallel_plans(asked)
    for name in getattr(module, "all_tied_weights_keys", None) or ():
        owner, _, own = name.rpartition(".")
        holder = module.get_submodule(owner)
        holder.register_parameter(own, nn.Parameter(torch.empty_like(getattr(holder, own))))
    if n > 1:
        tensor_parallel.apply_tensor_parallelism(module, tp, plan)
    if ep is not None:
        expert_parallel.apply_expert_parallelism(module, ep, tp, of_experts)
    module.tie_weights()


def local(tensor: Tensor) -> Tensor:
    """This rank's own tensor of a DTensor, or of another wrapper around a tensor."""
    while hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        tensor = getattr(tensor, names[0])
    return tensor


def wrapped(tensor: Tensor, like: Any) -> DTensor:
    """The DTensor with this local tensor, and the placements of another DTensor."""
    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placed(tensor: Any) -> Placed:
    """The placements of a DTensor by mesh axis; none of any other tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = tensor.device_mesh.mesh_dim_names or ()
    return tuple([(axis, _placement(one)) for axis, one in zip(axes, tensor.placements, strict=True)])


def is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter is divided over expert-parallel ranks."""
    return any(axis == "ep" for axis, _ in placed(parameter))


@cache
def dealt_out(n: int, n_experts: int, n_ranks: int) -> npt.NDArray[np.int64]:
    """The numbers of n chosen experts, dealt out to all ranks in turn: each gets as many as any other.

    >>> dealt_out(8, 8, 4)
    array([0, 2, 4, 6, 1, 3, 5, 7])
    """
    own, place = n_experts // n_ranks, np.arange(n)
    return place % n_ranks * own + place // n_ranks % own


def _placement(one: Any) -> Placement:
    """A placement in memplan's words; interleaved shards, as of fused projections, are shards."""
    if one.is_replicate():
        return Replicate()
    return Partial() if one.is_partial() else Shard(one.dim)
