"""A module as one rank of a mesh has it: divided by its own framework's code, over ranks that are played."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from memplan.errors import InvalidValue, MemplanError, MissingRule, reason
from memplan.mesh import DIVIDING, Group, degrees_text
from memplan.models.recording import Placed
from memplan.placements import Partial, Placement, Replicate, Shard

Ranks = DeviceMesh | dict[str, DeviceMesh]
"""The ranks over which a module is divided: one mesh; with the view "ep", one for each axis, by its name."""

Parallelize = Callable[[nn.Module, Any], Any]
"""Divides a module over `Ranks`, in place or into another one, which it returns."""


@contextmanager
def divided(
    module: nn.Module,
    mesh: Mapping[str, int],
    parallelize: Parallelize,
    device: torch.device,
    cp_rank: int = 0,
) -> Iterator[tuple[nn.Module, Ranks]]:
    """A copy of the module as the mesh's first rank has it, or its first one at this place along cp.

    The module is left as it was; its copy's parameters are on `meta`, and its buffers are the module's own.

    Raises:
        InvalidValue: `parallelize` fails, with what it says.
    """
    with played_mesh(mesh, device, cp_rank) as ranks:
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
        yield (made if isinstance(made, nn.Module) else own), ranks


def axes_of(ranks: Ranks, mesh: Iterable[Group]) -> dict[str, Group]:
    """The axes of a mesh by the names of their process groups."""
    return {str(ranks[axis].get_group().group_name): axis for axis in mesh}


def copied(module: nn.Module) -> nn.Module:
    """The module with its parameters on `meta`; what is no parameter is copied, but for its buffers."""
    known: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for one in module.parameters():
        known[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
    return deepcopy(module, known)


@contextmanager
def played_mesh(sizes: Mapping[str, int], device: torch.device, cp_rank: int = 0) -> Iterator[Ranks]:
    """The ranks of a job of which this process is the first; collectives end at once and move nothing.

    Along cp it is the one at this place.

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
    tp, cp, ep = (sizes.get(axis, 1) for axis in DIVIDING)
    n = 2 * ep if ep > 1 else cp * tp
    dist.init_process_group("fake", store=FakeStore(), rank=cp_rank * tp, world_size=n)
    _clear_sharding_prop_cache()  # it holds names of groups, for every equal mesh
    try:
        if ep == 1:
            own = {"cp": cp, "tp": tp} if cp > 1 else {"tp": tp}
            yield init_device_mesh(device.type, tuple(own.values()), mesh_dim_names=tuple(own))
            return
        dense = init_device_mesh(device.type, (n // tp, tp), mesh_dim_names=("dp", "tp"))
        experts = init_device_mesh(device.type, (2, ep), mesh_dim_names=("efsdp", "ep"))
        yield {"tp": dense["tp"], "ep": experts["ep"]}
    finally:
        dist.destroy_process_group()


def own_plan(module: nn.Module, mesh: Mapping[Group, int]) -> Parallelize:
    """What divides a module that comes with a plan: one of transformers.

    Over context-parallel ranks alone any other module is left as it is.

    Raises:
        InvalidValue: any other module.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        if [*mesh] == ["cp"]:
            return lambda one, ranks: one
        raise InvalidValue(
            f"{type(module).__name__} has no plan of its own; say what divides it: memplan.trace(module, "
            "inputs, mesh={...}, parallelize=function), which is called with the module and a DeviceMesh."
        )
    return by_plan_of_transformers


def by_plan_of_transformers(module: Any, ranks: Ranks) -> None:
    """Divide a module of transformers over tensor- and expert-parallel ranks, its sequences over others.

    It is what `from_pretrained(distributed_config=...)` does, and what Accelerate does for context
    parallelism. transformers ties weights only after it has divided them.

    Source: transformers.distributed.mixin:DistributedMixin.maybe_distribute_model.
    """
    configuration = import_module("transformers.distributed.configuration_utils")
    tensor_parallel = import_module("transformers.distributed.tensor_parallel")
    expert_parallel = import_module("transformers.distributed.expert_parallel")
    names = ranks if isinstance(ranks, dict) else ranks.mesh_dim_names or ()
    tp, cp, ep = (ranks[axis] if axis in names else None for axis in DIVIDING)
    n, n_experts = (1 if one is None else one.size() for one in (tp, ep))
    if cp is not None:
        without_masks(module)
    if max(n, n_experts) == 1:
        return
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


def without_masks(module: nn.Module) -> None:
    """Let the attention of a module of transformers be causal instead of masked, as Accelerate lets it.

    Raises:
        MissingRule: some of its layers are not causal alone, which Accelerate refuses.

    Source: accelerate.big_modeling:_attach_context_parallel_hooks.
    """
    config: Any = module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None)
    others = {*kinds} - {"full_attention"} if kinds is not None else set()
    if kinds is None and getattr(config, "sliding_window", None):
        others = {"sliding_attention"}
    if others:
        raise MissingRule(
            f"context parallelism of {type(module).__name__}: Accelerate refuses layers of type "
            f"{', '.join(sorted(others))} ('Context parallelism can only express full causal attention'); "
            "use cp=1, or a model of full attention.",
            kind="context parallelism of layers with another mask than the causal one",
        )
    for name, one in module.named_modules():
        if name.endswith("self_attn"):
            one.register_forward_pre_hook(_causal, with_kwargs=True, prepend=True)


WINDOWS: Final = ("sliding_window", "attention_chunk_size")
"""The settings of a text model that say how far its attention looks back."""


def windows_of(config: Any) -> dict[str, int]:
    """The settings that are windows of a module's attention: from such a length on it makes masks of them.

    Eager attention makes masks at all lengths.

    Source: transformers.masking_utils:_ignore_causal_mask_sdpa, _ignore_bidirectional_mask_sdpa.
    """
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = {*(getattr(of_text, "layer_types", None) or WINDOWS)} - {"full_attention"}
    if not kinds or getattr(config, "_attn_implementation", None) == "eager":
        return {}
    sizes = {key: getattr(of_text, key, None) for key in WINDOWS}
    return {key: size for key, size in sizes.items() if isinstance(size, int) and size > 0}


def _causal(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "attention_mask" in kwargs:
        kwargs |= {"attention_mask": None, "is_causal": True}
    return args, kwargs


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
