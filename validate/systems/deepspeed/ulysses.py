"""DeepSpeed's Ulysses: the groups of its ranks, attention of transformers between them, and the loss."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memplan import Plan
from memplan.plan import Rank
from validate.cases import Case
from validate.systems.torch.wild import values_as_on_a_gpu, wild_inputs
from validate.systems.whole import micro_batches


def divided_sequences(module: nn.Module, plan: Plan) -> Any:
    """DeepSpeed's groups of the ranks that divide a sequence and those that divide states; None of one rank.

    Source: accelerate.accelerator (`Accelerator._prepare_deepspeed`).
    """
    if plan.cp == 1:
        return None
    ulysses = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    return ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=module,
        core_attn_implementation="sdpa",
        sequence_parallel_size=plan.cp,
        micro_batch_size=plan.micro_batch,
        disable_in_eval=True,
    )


def losses_of_pieces(case: Case, engine: Any, at: Rank, device: torch.device) -> Callable[[int], Tensor]:
    """The loss of the i-th micro-batch, of this rank's pieces, as transformers' Trainer computes it.

    Pieces are what `UlyssesSPDataLoaderAdapter` hands on, which cuts sequences on the host.
    """
    plan = case.plan
    whole = wild_inputs(case.model, plan, at, torch.device("cpu"), seed=case.seed)
    del whole["labels"]
    own = {name: value.chunk(plan.cp, dim=1)[at.cp].to(device) for name, value in whole.items()}
    parts = micro_batches(own, case.plan.n_micro_batches)
    compute_loss = import_module("transformers.integrations.deepspeed").deepspeed_sp_compute_loss
    how = SimpleNamespace(sp_backend="deepspeed", sp_size=plan.cp)
    return values_as_on_a_gpu()(
        lambda i: compute_loss(None, engine, dict(parts[i]), return_outputs=False, pc=how)
    )
