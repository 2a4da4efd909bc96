"""FairScale itself, set up from a plan; needs `pip install fairscale` beside PyTorch."""

from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memplan.engines.fairscale.options import FAIRSCALE_VERSION, fairscale_options
from memplan.errors import MemplanError, PlanRefused
from memplan.models import Decoder
from validate.cases import Case
from validate.standin import materialised
from validate.systems import Training
from validate.systems.torch.parallelize import stage_module, torch_dtype
from validate.systems.torch.updates import optimizer_class
from validate.systems.whole import axis_of_groups, losses


class FairScaleTraining(Training):
    """A module under its wrapper, and OSS, which updates it."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        plan, module = case.plan, _module(case, device)
        optimizer = optimizer_class(plan.optimizer)
        self._oss = OSS(module.parameters(), optim=optimizer, lr=case.learning_rate)
        self._module: Any
        if plan.zero == 1:
            self._module = DistributedDataParallel(module)
        else:
            _await_reductions(ShardedDataParallel)
            self._module = ShardedDataParallel(
                module,
                self._oss,
                reduce_buffer_size=fairscale_options(plan).reduce_buffer_size,
                sync_models_at_startup=False,  # all start from one seed
            )
        super().__init__(axis_of_groups())
        self._loss_of = losses(case, self._module, plan.place(rank), device)
        self._n, self._max_norm = plan.n_micro_batches, plan.clip_grad_norm

    def gradients(self) -> float | None:
        total = 0.0
        for i in range(self._n):
            with self._module.no_sync() if i < self._n - 1 else nullcontext():
                loss = self._loss_of(i) / self._n
                loss.backward()
            total += float(loss.detach())
            del loss
        return total

    def update(self) -> None:
        if self._max_norm is not None:
            self._oss.clip_grad_norm(self._max_norm)
        self._oss.step()
        zeroes = self._oss if isinstance(self._module, DistributedDataParallel) else self._module
        zeroes.zero_grad(set_to_none=True)

    def weights(self) -> Sequence[Tensor]:
        return list(self._module.parameters())

    def grads(self) -> Sequence[Tensor]:
        return [one.grad for one in self._module.parameters() if one.grad is not None]

    def optimizer_states(self) -> Sequence[Tensor]:
        values = [value for state in self._oss.optim.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def gradient_norm_squared(self) -> float:
        """Each rank has the whole gradient of its own parameters; all have them by now."""
        own = [one.grad for group in self._oss.optim.param_groups for one in group["params"]]
        total = torch.stack([grad.double().square().sum() for grad in own] or [torch.zeros(())]).sum()
        dist.all_reduce(total)
        return float(total)


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's training on this rank.

    Raises:
        MemplanError: where FairScale is not installed.
        PlanRefused: for modules of others, which are not run under it.
    """
    if find_spec("fairscale") is None:
        raise MemplanError(
            f"engine='fairscale' is run by FairScale itself; use pip install fairscale=={FAIRSCALE_VERSION}."
        )
    if case.is_of_others:
        raise PlanRefused("engine='fairscale' is run with memplan's own modules; use one of these.")
    return FairScaleTraining(case, rank, device)


def _module(case: Case, device: torch.device) -> nn.Module:
    """The model on the device, with weights of the case's seed where its values mean anything."""
    plan = case.plan
    seed, made_on = (case.seed, device) if case.computes else (None, torch.device("meta"))
    made = stage_module(cast(Decoder, case.model), plan, 0, seed=seed, device=made_on)
    made.recompute, made.recompute_blocks = plan.recompute, plan.recompute_blocks
    if plan.mixed or plan.formats.autocast:
        made.autocast_dtype = torch_dtype(plan.formats.compute)
    return materialised(made, device)


def _await_reductions(kind: Any) -> None:
    """Lets each hook wait for its reduction, as the last one does for all that are left.

    FairScale only looks whether the oldest is over, so what is held depends on how fast the others are.
    """
    kind._try_consume_work_handle = kind._consume_work_handles
