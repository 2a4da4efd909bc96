"""DeepSpeed's AutoTP: a module on the host, the groups of its ranks, what these agree on in a first step."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from memplan.mesh import Group


def on_the_host(module: nn.Module) -> nn.Module:
    """The module with weights on the host, as `from_pretrained` makes it; AutoTP sends shards to the GPU.

    They have no values: the pages of whole weights are never touched.
    """
    made = module.to_empty(device="cpu")
    cast(Any, made).tie_weights()
    return made


def axes_of_groups() -> dict[str, Group]:
    """The axes of DeepSpeed's groups of tensor- and data-parallel ranks, by the groups' names."""
    groups = import_module("deepspeed.utils.groups")
    return {
        groups.get_data_parallel_group().group_name: "dp",
        groups.get_tensor_model_parallel_group().group_name: "tp",
    }


def agree(engine: Any) -> None:
    """Let the checks of a first forward pass be made, and their answers be yes: other ranks are not there.

    Inputs are sent as the first rank of a group does, for nobody sends any.

    Source: `deepspeed.runtime.engine:DeepSpeedEngine._configure_tensor_parallel_states`.
    """
    groups: Any = import_module("deepspeed.utils.groups")
    loss: Any = import_module("deepspeed.sequence.cross_entropy")
    handle, hooks = engine.first_dataloader_check, engine.module._forward_pre_hooks
    check = hooks[handle.id]

    def agreed(*args: Any) -> None:
        with (
            patch.object(groups, "get_tensor_model_parallel_rank", lambda: 0),
            patch.object(groups, "get_tensor_model_parallel_src_rank", dist.get_rank),
            suppress(AssertionError),
        ):
            check(*args)
        handle.remove()

    hooks[handle.id] = agreed
    loss._validate_vocab_shard_bounds = _vocabulary(loss._validate_vocab_shard_bounds)


def _vocabulary(check: Callable[..., int]) -> Callable[..., int]:
    """The check that shards of the vocabulary follow each other; its answer is how many tokens there are."""

    def agreed(n_own: int, start: int, end: int, group: Any, device: Any) -> int:
        with suppress(ValueError):
            check(n_own, start, end, group, device)
        return n_own * dist.get_world_size(group)

    return agreed
