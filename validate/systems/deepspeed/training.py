"""A plan as a DeepSpeed configuration, and a rank's micro-batches over DeepSpeed's engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from memplan import Plan
from memplan.engines.deepspeed.options import OF_STAGE_3, deepspeed_options
from memplan.mesh import Group
from validate.predict import axis_of
from validate.systems import Training
from validate.systems.deepspeed.tensor_parallel import axes_of_groups
from validate.systems.whole import axis_of_groups

MASTERS: Final = {
    0: "fp32_groups_flat",
    1: "single_partition_of_fp32_groups",
    2: "single_partition_of_fp32_groups",
    3: "fp32_partitioned_groups_flat",
}
"""Where each stage's optimizer has its masters."""

SCALE_POWER: Final = 10
"""Of the first loss scale in float16: DeepSpeed starts at 2^16 and skips steps until nothing overflows."""


def configuration(plan: Plan, learning_rate: float) -> dict[str, Any]:
    """The plan as a DeepSpeed configuration."""
    options = deepspeed_options(plan)
    zero: dict[str, Any] = {"stage": plan.zero}
    if plan.zero:
        zero |= {"overlap_comm": options.overlap_comm, "reduce_bucket_size": options.reduce_bucket_size}
    if plan.zero == 3:
        zero |= {name: getattr(options, name) for name in OF_STAGE_3 if name != "offload_param"}
        if options.offload_param != "none":
            zero["offload_param"] = {"device": options.offload_param}
    if options.offload_optimizer != "none":
        pinned = options.offload_optimizer == "cpu-pinned"
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    half = {"fp16": {"enabled": True, "initial_scale_power": SCALE_POWER}}
    parallel = {"tensor_parallel": {"autotp_size": plan.tp}} if plan.tp > 1 else {}
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.n_micro_batches,
        "gradient_clipping": plan.clip_grad_norm or 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        **parallel,
        "optimizer": {
            "type": {"adam": "Adam", "adamw": "AdamW"}[plan.optimizer],
            "params": {"lr": learning_rate},
        },
        **({"bf16": {"enabled": True}} if plan.formats.compute.name == "bfloat16" else half),
    }


class DeepSpeedTraining(Training):
    """The micro-batches of a rank and DeepSpeed's engine, whose last `step` of a step is the update.

    `loss_of`: the loss of the i-th micro-batch. `axes`: the axis of each group, by its name.
    """

    def __init__(
        self, engine: Any, plan: Plan, loss_of: Callable[[int], Tensor], axes: Mapping[str, Group]
    ) -> None:
        super().__init__(axes)
        self._engine, self._loss_of = engine, loss_of
        self._n_micro_batches = plan.n_micro_batches

    def gradients(self) -> float | None:
        total = 0.0
        for i in range(self._n_micro_batches):
            if i:
                self._engine.step()
            loss = self._loss_of(i)
            self._engine.backward(loss)
            total += float(loss.detach())
            del loss
        return total / self._n_micro_batches

    def update(self) -> None:
        self._engine.step()
        if self._engine.skipped_steps or not self.optimizer_states():
            raise RuntimeError(
                f"DeepSpeed has skipped {self._engine.skipped_steps} steps ('OVERFLOW! Skipping step'), "
                "so the measured bytes are not the bytes of a training step."
            )

    def weights(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        match self._zero:
            case 0:
                flat = optimizer.fp16_groups_flat
            case 3 if optimizer.offload_param:
                flat = optimizer.param_groups_fp16_flat_cpu_memory
            case 3:
                flat = [optimizer.lp_param_buffer]
            case _:
                flat = optimizer.bit16_groups_flat
        frozen = [one for one in self._engine.module.parameters() if not one.requires_grad]
        return [*flat, *frozen]

    @property
    def _zero(self) -> int:
        return int(self._engine.zero_optimization_stage())

    def grads(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            return [one.grad for one in getattr(optimizer, MASTERS[self._zero])]
        if self._zero:
            return [
                one for found in self._engine.optimizer.averaged_gradients.values() for one in found or ()
            ]
        return [one.grad for one in self._engine.module.parameters() if one.grad is not None]

    def optimizer_states(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        masters = getattr(optimizer, MASTERS[self._zero])
        moments = [one for state in optimizer.optimizer.state.values() for one in state.values()]
        return [*masters, *(one for one in moments if isinstance(one, Tensor))]

    def gradient_norm_squared(self) -> float:
        """Each rank has the averaged gradient of its own partition; ZeRO-0 averages whole ones in its step.

        ZeRO-1 and 2 hold a partition's padding too, which is zero.
        """
        total = torch.stack([grad.double().square().sum() for grad in self.grads()]).sum()
        if self._zero:
            dist.all_reduce(total)
        return float(total)


def axes_of(plan: Plan, groups: Any = None) -> dict[str, Group]:
    """The axis of each group of ranks, by its name; `groups`: DeepSpeed's, where ranks divide sequences."""
    axes = axes_of_groups() if plan.tp > 1 else axis_of_groups(plan.shard_group)
    if groups is not None:
        axes[groups.get_sequence_parallel_group().group_name] = axis_of(plan.mesh, "cp")
    return axes
