"""PyTorch itself: modules, a plan applied to them (`parallelize`), the passes and the update of a step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan import TracedModel
from memplan.engines.torch.options import torch_options
from memplan.errors import PlanRefused
from validate.cases import Case
from validate.collectives import axis_of_group
from validate.systems import Training
from validate.systems.torch.adapters import scales_of
from validate.systems.torch.masks import images_as_on_a_gpu
from validate.systems.torch.parallelize import device_mesh, expert_mesh, parallel_module, stage_module
from validate.systems.torch.passes import Passes, passes
from validate.systems.torch.updates import Update, gradient, update_of
from validate.systems.torch.wild import wild_modules, wild_passes


class TorchTraining(Training):
    """The passes of a rank's stages and their optimizer."""

    def __init__(
        self, run: Passes, update: Update, axis_of_group: Mapping[str, str], frozen: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(axis_of_group)
        self._run = run
        self._update = update
        self._frozen = frozen

    def gradients(self) -> float | None:
        return self._run()

    def update(self) -> None:
        self._update()

    def weights(self) -> Sequence[Tensor]:
        return [_parts(weight)[0] for weight in (*self._update.parameters, *self._frozen)]

    def grads(self) -> Sequence[Tensor]:
        return [_local(weight.grad) for weight in self._update.parameters if weight.grad is not None]

    def optimizer_states(self) -> Sequence[Tensor]:
        return [part for one in self._update.optimizers for state in _states(one) for part in _parts(state)]

    def gradient_norm_squared(self) -> float:
        grads = [_whole(gradient(weight)) for weight in self._update.parameters if weight.grad is not None]
        scaled = sum(float(grad.float().square().sum()) for grad in grads)
        if self._update.clips_itself is not None:  # each rank has its own slices of flat gradients
            scaled = _summed(scaled, self._update.clips_itself.process_group)
        return scaled / self._update.scaler.get_scale() ** 2


def installed_version() -> str:
    """The release of PyTorch that is installed, in a plan's words: "2.13"."""
    major, minor, *_ = torch.__version__.split(".")
    return f"{major}.{minor}"


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's stages and optimizer as they are on this rank.

    Raises:
        PlanRefused: for another release of PyTorch than the one that is installed.
    """
    model, plan, at = case.model, case.plan, case.plan.place(rank)
    asked = torch_options(plan).torch_version
    if asked != installed_version():
        raise PlanRefused(
            f"torch_version={asked!r} cannot be run: PyTorch {torch.__version__} is installed; "
            "leave it out, or install that release."
        )
    mesh, experts = device_mesh(plan, device), expert_mesh(plan, device)
    cut_before_made = case.tensors == "real" and not case.computes
    made_on = torch.device("meta") if cut_before_made else device
    if case.device == "nogpu" and isinstance(model, TracedModel):
        images_as_on_a_gpu(model.image_tokens / plan.seq_len)
    if isinstance(model, TracedModel) or case.is_of_others:
        modules = wild_modules(model, plan, at, mesh, experts, device, seed=case.seed, made_on=made_on)
        update = update_of(modules.values(), plan, mesh, device, learning_rate=case.learning_rate)
        frozen: list[Tensor] = []
        for one in modules.values():
            frozen += [weight for weight in one.parameters() if not weight.requires_grad]
            frozen += scales_of(one)
        run = wild_passes(modules, model, plan, at, mesh, device, update.scaler, seed=case.seed)
        sharded = mesh[plan.shard_group] if mesh is not None and plan.cp > 1 else None
        return TorchTraining(run, update, axis_of_group(mesh, experts, sharded), frozen)
    seed = case.seed if case.computes else None
    modules = {
        stage: parallel_module(
            stage_module(model, plan, stage, seed=seed, device=made_on), plan, at, mesh, device
        )
        for stage in plan.stages_of(at.pp)
    }
    update = update_of(
        modules.values(),
        plan,
        mesh,
        device,
        learning_rate=case.learning_rate,
        runs_kernels=case.device != "nogpu",
    )
    return TorchTraining(
        passes(modules, model, plan, at, mesh, device, update.scaler, seed=case.seed),
        update,
        axis_of_group(mesh),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _parts(tensor: Tensor) -> list[Tensor]:
    """A rank's tensors that a tensor is made of: itself, or codes and scales."""
    local = _local(tensor)
    if not is_traceable_wrapper_subclass(local):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _summed(value: float, group: dist.ProcessGroup | None) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Each tensor of the state once, but for those of paged memory; on the host copies of weights too."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    on_host: dict[Any, Any] = getattr(optimizer, "optim_dict", {})
    on_gpu = getattr(optimizer, "d_opt", None)
    own = [*on_host.values(), *([] if on_gpu is None else [on_gpu])] if on_host else [inner]
    values = [value for one in own for state in one.state.values() for value in state.values()]
    values += getattr(optimizer, "param_d2h_map", {}).values()
    found = [value for value in values if isinstance(value, Tensor) and not hasattr(value, "is_paged")]
    yield from {id(value): value for value in found}.values()
