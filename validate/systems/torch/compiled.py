"""Blocks under `torch.compile`, each on its own, as torchtitan compiles them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import _disable_current_modes

from memplan import Plan
from memplan.engines.torch.options import torch_options
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
    """The function, in which no mode is active: the one that counts collectives is nothing to compile."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return forward(*args, **kwargs)

    return called


def _checkpointed(block: nn.Module, recompute: str) -> nn.Module:
    if recompute == "none":
        return block
    kept = second_products_kept if isinstance(block, TorchtitanBlock) else kept_contexts
    contexts: dict[str, Any] = {"context_fn": kept} if recompute == "selective" else {}
    return checkpoint_wrapper(block, **contexts)
