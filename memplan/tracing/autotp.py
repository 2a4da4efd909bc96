"""DeepSpeed's AutoTP around a module of transformers: linears that hold a shard of their weight each.

DeepSpeed's own code divides the module, by transformers' plan for it, and runs in it: sums in the passes of
its linears, logits that are gathered, or a loss of divided logits where the ends of the model are tied.

Source: `deepspeed.runtime.engine:DeepSpeedEngine._apply_autotp_partitioning` (0.19).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, final
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from memplan.errors import MissingRule, PlanRefused, installed, reason
from memplan.models.recording import Placed
from memplan.placements import Shard
from memplan.tracing.cache import without_remarks

WHOLE: Final = "memplan_whole_shape"
"""The attribute of a divided parameter that says its whole shape, and the dim along which it is divided."""


def divided_by_autotp(module: nn.Module, ranks: Any) -> None:
    """Divide a module over the tensor-parallel ranks of a mesh.

    Raises:
        PlanRefused: DeepSpeed does not divide it, with its words.
        MissingRule: its shards are not equal.
    """
    with communicating(ranks["tp"]):
        engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
        config = import_module("deepspeed.runtime.tensor_parallel.config").TPTrainingConfig
        n = ranks["tp"].size()
        asked = SimpleNamespace(autotp_size=lambda: n, local_rank=-1, is_deepcompile_enabled=lambda: False)
        try:
            engine._apply_autotp_partitioning(asked, module, config(autotp_size=n))
        except Exception as error:
            raise PlanRefused(
                f"tp={n}: DeepSpeed's AutoTP does not divide {type(module).__name__} ({reason(error)}); use "
                "tp=1, or another model.",
                kind="a model that DeepSpeed's AutoTP does not divide",
            ) from error
    for layer in module.modules():
        if (sizes := getattr(layer, "_partition_sizes", None)) is not None and len({*sizes}) > 1:
            raise MissingRule(
                f"tp={n}: DeepSpeed's AutoTP divides {layer.name} of {type(module).__name__} into parts of "
                f"{', '.join(map(str, sizes))}, so that ranks differ, which has no rule yet; use a tp that "
                "divides its heads of keys, its widths and its vocabulary.",
                kind="DeepSpeed's AutoTP with shards that are not equal",
            )
    key = import_module("deepspeed.checkpoint.constants").DS_AUTOTP_UC_META
    for parameter in module.parameters():
        known = getattr(parameter, key, None)
        if known and known["partition_dim"] is not None:
            setattr(parameter, WHOLE, (known["original_shape"], known["partition_dim"]))


def divided_shape(tensor: Tensor) -> tuple[tuple[int, ...], Placed]:
    """A parameter's whole shape, and its placements if AutoTP has divided it."""
    if not hasattr(tensor, WHOLE):
        return tuple(tensor.shape), ()
    whole, dim = getattr(tensor, WHOLE)
    return whole, (("tp", Shard(dim)),)


@contextmanager
def communicating(ranks: Any) -> Iterator[None]:
    """A block in which DeepSpeed communicates over ranks that are played, and AutoTP trains.

    What a loss of divided logits asks other ranks in its first call is not asked.
    """
    with installed("DeepSpeed's AutoTP", "deepspeed"), without_remarks():
        comm, layers = map(import_module, ("deepspeed.comm.comm", "deepspeed.module_inject.layers"))
        groups = import_module("deepspeed.utils.groups")
        loss = import_module("deepspeed.sequence.cross_entropy")
    group, training = ranks.get_group(), layers.AUTOTP_MODE.TRAINING
    with (
        without_remarks(),
        patch.object(comm, "cdb", _Backend()),
        patch.object(layers, "DEEPSPEED_AUTOTP_MODE", training),
        patch.object(groups, "_TENSOR_MODEL_PARALLEL_GROUP", group),
        patch.object(loss, "_validate_vocab_shard_bounds", lambda n, *_: n * group.size()),
    ):
        yield


@final
class _Backend:
    """The part of `TorchBackend` (deepspeed.comm.torch) that AutoTP's layers call."""

    get_rank = staticmethod(dist.get_rank)
    get_world_size = staticmethod(dist.get_world_size)

    @staticmethod
    def is_initialized() -> bool:
        """Whether ranks communicate: they do."""
        return True

    @staticmethod
    def all_reduce(tensor: Tensor, _op: Any, group: Any, async_op: bool) -> Any:
        """An all-reduce in place: any one sends the same."""
        return dist.all_reduce(tensor, group=group, async_op=async_op)

    @staticmethod
    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool
    ) -> Any:
        """All ranks' tensors in one."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
