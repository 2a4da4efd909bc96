"""A module of transformers as the Trainer calls it: what Accelerate, DDP or FSDP2 put around its forward."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memplan.models.recording import ByTrainer
from memplan.tracing.example import Loss
from memplan.tracing.trl import (
    AHEAD,
    beside_completions,
    loss_of_completions,
    loss_of_pairs,
    loss_of_scores,
    with_completions,
    with_reference,
    with_scores,
)

N_ITEMS: Final = "num_items_in_batch"
"""The argument that says how many tokens a step has, over which the loss is a mean."""


def as_trainer_calls(
    module: nn.Module, by: ByTrainer, inputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[..., None] | None]:
    """The inputs with a mask of padding that is all ones, and what runs before the module, if anything does.

    The module's forward is changed in place. `num_items_in_batch`, by which the loss is divided, is a tensor
    among the inputs where FSDP2 casts it, and where TRL's trainer divides by it. Elsewhere it is a float.

    Source: transformers.trainer (`Trainer.compute_loss`); accelerate.accelerator
    (`Accelerator.prepare_model`); accelerate.utils.operations (`ConvertOutputsToFp32`).
    """
    ones = torch.ones_like(inputs["input_ids"])
    found = {"input_ids": inputs["input_ids"], "attention_mask": ones, "labels": inputs["labels"]}
    forward: Callable[..., Any] = module.forward
    unless_given, before = {N_ITEMS: 1.0}, None
    if by.completion is not None:
        (forward, before), unless_given = with_completions(module, by), {}
        found |= beside_completions(by, len(found.pop("labels")))
    elif by.reference is not None:
        forward, unless_given = with_reference(module, by), {}
        found["completion_mask"] = torch.ones_like(found.pop("labels"))
        if by.reference == "ahead":
            found |= {name: torch.zeros(len(ones) // 2) for name in AHEAD}
    elif by.scoring is not None:
        forward, found[N_ITEMS] = with_scores(module, by), torch.ones((), dtype=torch.int64)
    elif by.casts_inputs:
        found[N_ITEMS] = torch.ones(())

    def called(**arguments: Any) -> Any:
        output = forward(**unless_given | arguments)
        autocasts = torch.is_autocast_enabled(next(iter(arguments.values())).device.type)
        return tree_map_only(Tensor, _in_float32, output) if autocasts else output

    vars(module)["forward"] = called
    return found, before


def _in_float32(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() else output


def loss_by_trainer(by: ByTrainer) -> Loss:
    """A function from what the module returns to the loss, as DDP or FSDP2 hand it on."""

    def loss(output: Any) -> Tensor:
        given: Any = ()
        if by.scoring is not None:
            output, *given = output
        if by.clones_outputs:
            values, spec = tree_flatten(output)
            values = list(cast(Any, _Sink).apply(*values))
            output = tree_unflatten(values, spec)
            del values
        if by.casts_inputs and by.scoring is None:
            output = tree_map_only(Tensor, partial(Tensor.to, dtype=output.logits.dtype), output)
        if by.completion is not None:
            return loss_of_completions(output, *given)
        if by.reference is not None:
            return loss_of_pairs(output, *given) / 1  # by the number of micro-batches
        found: Tensor = output.loss if by.scoring is None else loss_of_scores(output, *given)
        return found

    return loss


class _Sink(torch.autograd.Function):
    """DDP's clones of what a module returns.

    Source: `torch.nn.parallel.distributed:_DDPSink.forward`.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        return tuple([None if one is None else one.clone() for one in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
