"""The optimizer's part of a step: gradients unscaled, clipped, applied, then freed or zeroed."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from memplan import Plan
from memplan.engines.torch.options import torch_options
from memplan.optimizers import KEPT
from validate.systems.torch.compiled import without_modes

ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "sgd-momentum": {"momentum": 0.9},
    "adamw-torchao": {"bf16_stochastic_round": True},
    "adafactor-transformers": {"scale_parameter": False, "relative_step": False},
}
"""An optimizer's arguments beside the learning rate: for Adafactor those of transformers' Trainer."""

IN_A_LIST: Final = re.compile(r"(^|\.)\d+\.")
"""Finds a block's place in the name of a parameter: `model.layers.0.mlp.up_proj.weight`."""

IMPLEMENTATIONS: Final[dict[str, dict[str, bool]]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""The arguments that choose each implementation."""

INITIAL_SCALE: Final = 2.0**10
"""Of the loss, in float16: torch starts at 2^16 and skips steps until no gradient overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One rank's optimizers, in turn: unscaling, clipping, the update, and freeing or zeroing gradients."""

    optimizers: Sequence[Optimizer]
    scaler: GradScaler
    max_norm: float | None
    foreach: bool | None
    pipeline: dist.ProcessGroup | None
    set_to_none: bool
    clips_itself: FullyShardedDataParallel | None = None
    in_backward: bool = False
    precomputes: Sequence[nn.Module] = ()

    @property
    def parameters(self) -> list[Tensor]:
        """This stage's parameters as the optimizer has them; DDP beside TP hides some of the module's.

        torchao's optimizer on the host has copies of most of them, which are its last groups.
        """
        on_gpu = [weight for one in self.optimizers for weight in getattr(one, "param_d2h_map", ())]
        groups = [group for one in self.optimizers for group in one.param_groups]
        own = [weight for group in groups for weight in group["params"]]
        return [*on_gpu, *own[: len(own) - len(on_gpu)]]

    def __call__(self) -> None:
        """Updates the weights, unless the backward pass has; the gradients are gone, or zero, after."""
        if self.in_backward:
            return
        for one in self.optimizers:
            self.scaler.unscale_(one)
        if self.max_norm is not None and self.clips_itself is not None:
            self.clips_itself.clip_grad_norm_(self.max_norm)
        elif self.max_norm is not None:
            clip(self.parameters, self.max_norm, pipeline=self.pipeline, foreach=self.foreach)
        for one in self.optimizers:
            self.scaler.step(one)
        self.scaler.update()
        for module in self.precomputes:
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(module)
        for one in self.optimizers:
            one.zero_grad(set_to_none=self.set_to_none)


def update_of(
    modules: Iterable[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    learning_rate: float,
    runs_kernels: bool = True,
) -> Update:
    """The plan's update of the stages' parameters; without kernels no step is skipped."""
    modules, precomputes = [*modules], torch_options(plan).float8_all_gather == "precomputed"
    sharded = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
    return Update(
        clips_itself=sharded[0] if sharded else None,
        optimizers=optimizers_of(modules, plan, mesh, learning_rate=learning_rate),
        scaler=scaler_of(plan, device, runs_kernels=runs_kernels),
        max_norm=plan.clip_grad_norm,
        foreach=False if torch_options(plan).optimizer_impl == "for-loop" else None,
        pipeline=mesh.get_group("pp") if mesh is not None and plan.pp > 1 else None,
        set_to_none=torch_options(plan).set_to_none,
        in_backward=torch_options(plan).optimizer_in_backward,
        precomputes=modules if precomputes else (),
    )


def optimizers_of(
    modules: Iterable[nn.Module], plan: Plan, mesh: DeviceMesh | None, *, learning_rate: float
) -> list[Optimizer]:
    """The plan's optimizers over the trained parameters; Muon's of the blocks' matrices, then AdamW."""
    named = [
        (name, weight)
        for module in modules
        for name, weight in module.named_parameters()
        if weight.requires_grad
    ]
    if torch_options(plan).optimizer_in_backward:
        return [_in_backward(weight, plan, learning_rate) for _, weight in named]
    if plan.kept.others is None:
        return [_optimizer([weight for _, weight in named], plan, mesh, plan.optimizer, learning_rate)]
    matrices = {name for name, weight in named if weight.ndim == 2 and IN_A_LIST.search(name)}
    apart = (
        ([weight for name, weight in named if name in matrices], plan.optimizer),
        ([weight for name, weight in named if name not in matrices], "adamw"),
    )
    return [_optimizer(part, plan, mesh, kind, learning_rate) for part, kind in apart if part]


def _in_backward(weight: nn.Parameter, plan: Plan, learning_rate: float) -> Optimizer:
    """A weight's own optimizer, which steps, and frees the gradient, as soon as autograd has made it."""
    own = _optimizer([weight], plan, None, plan.optimizer, learning_rate)

    def hook(_: Tensor) -> None:
        own.step()
        own.zero_grad()

    weight.register_post_accumulate_grad_hook(hook)
    return own


def _optimizer(
    parameters: list[nn.Parameter], plan: Plan, mesh: DeviceMesh | None, name: str, learning_rate: float
) -> Optimizer:
    """An optimizer by its name, its state divided over the data axis at ZeRO 1.

    Where it takes all parameters at once, those that PyTorch does not take together are separate groups.
    Beside expert-parallel ranks all are one group: PyTorch takes DTensors of several meshes.
    """
    kind = optimizer_class(name)
    if plan.kept.on_host:
        away = torch_options(plan).offload_gradients
        return kind(parameters, torch.optim.AdamW, offload_gradients=away, lr=learning_rate)
    options: dict[str, Any] = {"lr": learning_rate, **IMPLEMENTATIONS[torch_options(plan).optimizer_impl]}
    if plan.zero == 1 and mesh is not None:
        return ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=cast(type[Optimizer], kind),
            process_group=mesh[plan.shard_group].get_group(),
            **options,
        )
    one_by_one = torch_options(plan).optimizer_impl == "for-loop" or (
        torch_options(plan).optimizer_impl == "default" and parameters[0].device.type == "cpu"
    )
    if one_by_one:
        return kind(parameters, **options)
    groups = [parameters] if plan.ep > 1 and plan.fsdp else by_mesh(parameters)
    made = kind([{"params": group} for group in groups], **options)
    if plan.kept.package == "torchao":
        made.step = without_modes(made.step)  # type: ignore[method-assign]
    return made


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """An optimizer's class with its arguments, by its name."""
    module, _, kind = KEPT[name].code.partition(":")
    return partial(getattr(import_module(module), kind), **ARGUMENTS.get(name, {}))


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that operations on lists take together: DTensors of one mesh, or plain tensors."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


class _NeverSkips(GradScaler):
    """Takes every step: where kernels do nothing, memory only seems to say that gradients overflowed."""

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        for found in optimizer_state["found_inf_per_device"].values():
            found.item()
        loss: float | None = optimizer.step(*args, **kwargs)
        return loss

    def get_scale(self) -> float:
        return super().get_scale() or INITIAL_SCALE


class _ShardedNeverSkips(_NeverSkips, ShardedGradScaler):
    """FSDP1's, which takes every step."""


def scaler_of(plan: Plan, device: torch.device, *, runs_kernels: bool = True) -> GradScaler:
    """Scales the loss in float16, and skips a step whose gradients overflowed on any rank.

    `GradScaler` looks at this rank's gradients, and for DTensors at the ranks that shard the first one. Where
    other ranks may overflow alone, FSDP1's asks all ranks.

    Source: torch/distributed/tensor/_dispatch.py (`found_inf_reduce_handler`).
    """
    flat = plan.fsdp and torch_options(plan).fsdp_version == 1
    asks = flat or plan.pp > 1 or (plan.tp > 1 and not plan.fsdp)
    kinds = (GradScaler, ShardedGradScaler) if runs_kernels else (_NeverSkips, _ShardedNeverSkips)
    scaler = kinds[asks](device.type, init_scale=INITIAL_SCALE, enabled=plan.formats.loss_scaled)
    if scaler.is_enabled():
        scaler.scale(torch.ones((), device=device))
    return scaler


def clip(
    parameters: list[Tensor], max_norm: float, *, pipeline: dist.ProcessGroup | None, foreach: bool | None
) -> None:
    """Scales the gradients down to a norm of all stages' gradients of at most `max_norm`.

    Source: torchtitan/distributed/utils.py (`clip_grad_norm_`).
    """
    parameters = [weight for weight in parameters if weight.grad is not None]
    norms = [_norm(grads, foreach) for grads in by_mesh(map(gradient, parameters))]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        total = total**2
        dist.all_reduce(total, group=pipeline)
        total **= 0.5
    for group in by_mesh(parameters):
        clip_grads_with_norm_(group, max_norm, total, foreach)


def _norm(grads: list[Tensor], foreach: bool | None) -> Tensor:
    norm = get_total_norm(grads, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def gradient(weight: Tensor) -> Tensor:
    """A weight's gradient, as a DTensor if it is cut; DDP keeps how it was cut beside TP in `_st_info`."""
    grad = cast(Tensor, weight.grad)
    spec = getattr(weight, "_st_info", None)
    if spec is None:
        return grad
    return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False)
