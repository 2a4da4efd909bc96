"""A module of transformers as the Trainer calls it: what Accelerate, DDP or FSDP2 put around its forward."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memplan.models.traced import ByTrainer
from memplan.tracing.example import Loss

N_ITEMS: Final = "num_items_in_batch"
"""The argument that says how many tokens a step has, over which the loss is a mean."""


def as_trainer_calls(module: nn.Module, by: ByTrainer, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with a mask of padding that is all ones; the module's forward is changed in place.

    `num_items_in_batch`, by which the loss is divided, is a tensor among the inputs where FSDP2 casts it.
    Elsewhere it is a Python float.

    Source: transformers.trainer (`Trainer.compute_loss`); accelerate.accelerator
    (`Accelerator.prepare_model`); accelerate.utils.operations (`ConvertOutputsToFp32`).
    """
    forward = module.forward

    def called(**arguments: Any) -> Any:
        output = forward(**{N_ITEMS: 1.0} | arguments)
        autocasts = torch.is_autocast_enabled(arguments["input_ids"].device.type)
        return tree_map_only(Tensor, Tensor.float, output) if autocasts else output

    vars(module)["forward"] = called
    ones = torch.ones_like(inputs["input_ids"])
    found = {"input_ids": inputs["input_ids"], "attention_mask": ones, "labels": inputs["labels"]}
    return found | ({N_ITEMS: torch.ones(())} if by.casts_inputs else {})


def loss_by_trainer(by: ByTrainer) -> Loss:
    """A function from what the module returns to the loss, as DDP or FSDP2 hand it on."""

    def loss(output: Any) -> Tensor:
        if by.clones_outputs:
            values, spec = tree_flatten(output)
            values = list(cast(Any, _Sink).apply(*values))
            output = tree_unflatten(values, spec)
            del values
        if by.casts_inputs:
            output = tree_map_only(Tensor, partial(Tensor.to, dtype=output.logits.dtype), output)
        found: Tensor = output.loss
        return found

    return loss


class _Sink(torch.autograd.Function):
    """DDP's clones of what a module returns.

    Source: `torch.nn.parallel.distributed:_DDPSink.forward`.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([one.clone() for one in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
