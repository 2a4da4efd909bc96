"""Colossal-AI itself, set up from a plan by its Booster; needs `pip install colossalai` beside PyTorch.

Colossal-AI 0.5.0 asks for PyTorch 2.5 at most; it runs with the release that memplan plays, if pip is told
`--no-deps`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, Final, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memplan.engines.colossalai.options import COLOSSALAI_VERSION, COMMUNICATED, colossalai_options
from memplan.errors import MemplanError, PlanRefused
from memplan.models import Decoder
from memplan.plan import Plan
from memplan.shapes import FP32
from validate.cases import Case
from validate.standin import materialised
from validate.systems import Training
from validate.systems.torch.parallelize import stage_module, torch_dtype
from validate.systems.torch.updates import INITIAL_SCALE, optimizer_class
from validate.systems.whole import axis_of_groups, losses

PRECISIONS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The plugin's `precision` for each type of weights that the passes see."""


class ColossalAITraining(Training):
    """A module and its optimizer, boosted by LowLevelZeroPlugin."""

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        from colossalai.booster import Booster

        plan, module = case.plan, _module(case, device)
        if device.type == "cpu":
            _allow_cpu()
        if not case.computes:
            _without_kernels()
        self._booster = Booster(plugin=_plugin(plan))
        optimizer = optimizer_class(plan.optimizer)(module.parameters(), lr=case.learning_rate)
        # Without buffers: the plugin casts them too, and a complex angle would lose its imaginary part.
        with patch.dict(module._buffers, clear=True):
            self._module, self._zero, *_ = self._booster.boost(module, optimizer)
        super().__init__(axis_of_groups())
        self._loss_of = losses(case, self._module, plan.place(rank), device)
        self._n, self._accumulates = plan.n_micro_batches, plan.zero == 1
        self._has_masters = plan.formats.stored == FP32

    def gradients(self) -> float | None:
        total = 0.0
        for i in range(self._n):
            puts_off = self._accumulates and i < self._n - 1
            with self._booster.no_sync(self._module, self._zero) if puts_off else nullcontext():
                loss = self._loss_of(i) / self._n
                self._booster.backward(loss, self._zero)
            total += float(loss.detach())
            del loss
        return total

    def update(self) -> None:
        self._zero.step()
        self._zero.zero_grad()
        scaler = getattr(self._zero.mixed_precision_mixin, "grad_scaler", None)
        if scaler is not None and scaler._hysteresis_step:  # counts overflows
            raise RuntimeError("Colossal-AI has skipped a step ('Found overflow. Skip step').")

    def weights(self) -> Sequence[Tensor]:
        return list(self._zero._working_param_to_padded_working_param.values())

    def grads(self) -> Sequence[Tensor]:
        (store,) = self._zero.pg_to_grad_store.values()
        return [one for group in store._grads_of_params.values() for own in group.values() for one in own]

    def optimizer_states(self) -> Sequence[Tensor]:
        masters = [one for group in self._zero.param_groups for one in group["params"]]
        values = [value for state in self._zero.optim.state.values() for value in state.values()]
        return [*masters * self._has_masters, *(value for value in values if isinstance(value, Tensor))]

    def gradient_norm_squared(self) -> float:
        """Each rank has the reduced gradient of its own partition of each parameter."""
        own = self._zero.get_working_grads_by_group_id(0)
        total = torch.stack([grad.double().square().sum() for grad in own]).sum()
        dist.all_reduce(total)
        mixin = self._zero.mixed_precision_mixin
        return float(total) / float(getattr(mixin, "loss_scale", 1.0)) ** 2


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's training on this rank.

    Raises:
        MemplanError: where Colossal-AI is not installed.
        PlanRefused: for modules of others, which are not run under it.
    """
    if find_spec("colossalai") is None:
        raise MemplanError(
            "engine='colossalai' is run by Colossal-AI itself; use pip install --no-deps "
            f"colossalai=={COLOSSALAI_VERSION}."
        )
    if case.is_of_others:
        raise PlanRefused("engine='colossalai' is run with memplan's own modules; use one of these.")
    return ColossalAITraining(case, rank, device)


def _plugin(plan: Plan) -> Any:
    """The plan as a LowLevelZeroPlugin, whose bucket may be a fraction of 2^20 elements."""
    from colossalai.booster.plugin import LowLevelZeroPlugin

    options, formats = colossalai_options(plan), plan.formats
    sent = COMMUNICATED.get(options.communication_dtype)
    return LowLevelZeroPlugin(
        stage=plan.zero,
        precision=PRECISIONS[formats.compute.name],
        initial_scale=INITIAL_SCALE,
        max_norm=plan.clip_grad_norm or 0.0,
        reduce_bucket_size_in_m=cast(int, options.reduce_bucket_size / 2**20),
        communication_dtype=None if sent is None else torch_dtype(sent),
        overlap_communication=options.overlap_communication,
        master_weights=formats.stored == FP32,
    )


def _module(case: Case, device: torch.device) -> nn.Module:
    """The model on the device, its weights in the type that the plugin would give them on the host."""
    plan = case.plan
    seed, made_on = (case.seed, device) if case.computes else (None, torch.device("meta"))
    made = stage_module(cast(Decoder, case.model), plan, 0, seed=seed, device=made_on)
    made.recompute, made.recompute_blocks = plan.recompute, plan.recompute_blocks
    for one in made.parameters():
        one.data = one.data.to(torch_dtype(plan.formats.compute))
    return materialised(made, device)


class _Stream:
    """A stream of a device that has none: all work is done when the host goes on."""

    def wait_stream(self, other: "_Stream") -> None:
        """Does nothing."""


def _allow_cpu() -> None:
    """Lets Colossal-AI run on the CPU, whose accelerator has no streams and is not in a list of names.

    No patch changes a byte: streams order work and hold no tensor, and a check of names makes none.
    """
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    accelerator: Any = CpuAccelerator
    accelerator.Stream = accelerator.current_stream = lambda *_: _Stream()
    accelerator.stream = lambda *_: nullcontext()
    accelerator.synchronize = lambda *_: None
    accelerator.device_count = lambda *_: 1
    LowLevelZeroOptimizer._sanity_checks = lambda _: None
    cast(Any, Tensor).record_stream = lambda *_: None


def _without_kernels() -> None:
    """Leaves out the checks of the loss scaler's arguments where no kernel compares them.

    That changes no byte between two passes: each comparison is one byte, freed at once.
    """
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    DynamicGradScaler._sanity_checks = lambda _: None
