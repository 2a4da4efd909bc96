"""Blocks under `torch.compile`, each on its own, as torchtitan compiles them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from memplan import Plan
from memplan.engines.torch.options import torch_options
from memplan.tracing.compiled import waited
from memplan.tracing.torchtitan import TorchtitanBlock, kept_contexts, second_products_kept


def compile_blocks(owners: Iterable[nn.Module], plan: Plan) -> bool:
    """Whether the plan compiles blocks: then those that these modules hold are replaced by compiled ones.

    What is recomputed is so within the compiled code.

    Source: torchtitan/parallelisms/parallelize_llama.py (`apply_ac`, `apply_compile`).
    """
    if torch_options(plan).compile == "none":
        return False
    n_again = None if plan.recompute == "none" else plan.recompute_blocks
    for owner in owners:
        blocks = list(owner._modules.items())
        last = len(blocks) if n_again is None else n_again
        for place, (name, block) in enumerate(blocks):
            assert block is not None
            again = plan.recompute if place < last else "none"
            compiled: Any = torch.compile(_checkpointed(block, again), fullgraph=True)
            compiled.forward = without_modes(compiled.forward)
            owner.register_module(name, compiled)
    return True


def without_modes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in which no mode is active but in the code that Inductor has generated.

    The mode that counts collectives is nothing to compile, and they are called by that code.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        args, modes = waited(args), _get_current_dispatch_mode_stack()
        with _disable_current_modes(), patch.object(CompiledFxGraph, "__call__", _within(modes)):
            return forward(*args, **kwargs)

    return called


def _within(modes: Iterable[AbstractContextManager[Any]]) -> Callable[..., Any]:
    run = CompiledFxGraph.__call__

    def generated(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return run(graph, inputs)

    return generated


def _checkpointed(block: nn.Module, recompute: str) -> nn.Module:
    if recompute == "none":
        return block
    kept = second_products_kept if isinstance(block, TorchtitanBlock) else kept_contexts
    contexts: dict[str, Any] = {"context_fn": kept} if recompute == "selective" else {}
    return checkpoint_wrapper(block, **contexts)
