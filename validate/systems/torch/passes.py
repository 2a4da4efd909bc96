"""The forward and backward passes of one rank's step: accumulated, or run by a pipeline schedule."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from memplan import Plan
from memplan.engines.torch.options import torch_options
from memplan.models import Decoder
from memplan.plan import Rank
from memplan.tracing.torchtitan_mixtures import BACKEND
from validate.systems.torch.modules import Transformer, token_loss
from validate.systems.torch.parallelize import torch_dtype

Passes = Callable[[], float | None]
"""Runs forward and backward of a whole step; the rank's mean loss, None where there is no last stage."""


def batch(model: Decoder, plan: Plan, at: Rank, *, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This replica's token ids and targets, both (global_batch / n_replicas, seq_len).

    The global batch is drawn from the seed and replica i takes its i-th part.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(model.vocab_size, (plan.global_batch, plan.seq_len + 1), generator=generator)
    mine = text.chunk(plan.n_replicas)[at.dp_replicate * plan.dp + at.dp].to(device)
    return mine[:, :-1].clone(), mine[:, 1:].clone()


def passes(
    modules: Mapping[int, nn.Module],
    model: Decoder,
    plan: Plan,
    at: Rank,
    mesh: DeviceMesh | None,
    device: torch.device,
    scaler: GradScaler,
    *,
    seed: int,
) -> Passes:
    """The forward and backward passes of one step over this rank's stages, accumulated or pipelined."""
    tokens, targets = batch(model, plan, at, seed=seed, device=device)
    if plan.pp > 1 and mesh is not None:
        stages = [_stage(module, model, plan, i, mesh, device) for i, module in modules.items()]
        return _pipelined(stages, plan, scaler, tokens, targets)
    (module,) = modules.values()
    return _accumulated(module, plan, scaler, tokens, targets)


def _loss_context(plan: Plan) -> AbstractContextManager[None]:
    return loss_parallel() if plan.tp > 1 else nullcontext()


def _number(loss: Tensor) -> float:
    loss = loss.detach()
    return float(loss.to_local() if isinstance(loss, DTensor) else loss)


def syncing(module: nn.Module, plan: Plan, *, last: bool) -> AbstractContextManager[None]:
    """Lets a micro-batch's backward pass reduce gradients: DDP's and, if the plan says so, FSDP's last."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or not torch_options(plan).no_sync)
        return nullcontext()
    held = not last and (isinstance(module, DistributedDataParallel) or torch_options(plan).no_sync)
    return cast(Any, module).no_sync() if held else nullcontext()


def _accumulated(
    module: nn.Module, plan: Plan, scaler: GradScaler, tokens: Tensor, targets: Tensor
) -> Passes:
    n = plan.n_micro_batches
    if torch_options(plan).chunked_loss == "ChunkedLossWrapper":
        return _by_torchtitan(cast(Transformer, module), plan, tokens.chunk(n), targets.chunk(n))
    micro_batches = list(zip(tokens.chunk(n), targets.chunk(n), strict=True))

    def run() -> float:
        total = 0.0
        for i, (x, y) in enumerate(micro_batches):
            with syncing(module, plan, last=i == n - 1), _loss_context(plan):
                loss = token_loss(module(x), y, chunks=plan.loss_chunks) / n
                scaler.scale(loss).backward()
            total += _number(loss)
            del loss
        return total

    return run


def _by_torchtitan(
    module: Transformer, plan: Plan, tokens: Sequence[Tensor], targets: Sequence[Tensor]
) -> Passes:
    """The passes with torchtitan's own loss, as its trainer calls it; the loss is of this replica's batch.

    Source: torchtitan 0.3.0, torchtitan/trainer.py (`Trainer._forward_backward_body`).
    """
    import_module("torchtitan.distributed.utils").set_spmd_backend(BACKEND)
    losses = import_module("torchtitan.components.loss")
    config = losses.ChunkedLossWrapper.Config(
        num_chunks=plan.loss_chunks, loss_fn=losses.CrossEntropyLoss.Config()
    )
    loss_of = losses.ChunkedLossWrapper(config)
    assert module.head is not None
    loss_of.set_lm_head(module.head.output)
    n_targets = torch.tensor(sum([y.numel() for y in targets]), device=targets[0].device)

    def run() -> float:
        total = 0.0
        for x, y in zip(tokens, targets, strict=True):
            loss, _ = loss_of(module(x), y, n_targets)
            loss.backward()
            total += _number(loss)
            del loss
        return total

    return run


def schedule_class(plan: Plan) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """The class that runs the plan's schedule."""
    module, _, name = plan.pipeline_schedule.runs_as.partition(":")
    found: type[PipelineScheduleSingle] | type[PipelineScheduleMulti] = getattr(import_module(module), name)
    return found


def stage_examples(model: Decoder, plan: Plan, stage: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """One micro-batch of a stage's input and output, without data.

    Stating them keeps PyTorch from inferring them by a real backward pass, which DDP takes for its own.
    The residual stream is in the type of the weights that made it: narrow in bf16 and in FSDP2's mixed
    precision, float32 under autocast.
    """
    compute = torch_dtype(plan.formats.compute)
    dtype = torch_dtype(plan.formats.stored) if plan.mixed and not plan.fsdp else compute
    between = plan.seq_len // plan.tp if plan.sequence_parallel else plan.seq_len
    hidden = torch.empty(
        plan.micro_batch, between, model.d_model, dtype=dtype, device="meta", requires_grad=True
    )
    first = torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.int64, device="meta")
    inputs = hidden if stage else first
    if stage < plan.n_stages - 1:
        return inputs, hidden
    logits = torch.empty(plan.micro_batch, plan.seq_len, model.vocab_size, dtype=compute, device="meta")
    if plan.tp == 1:
        return inputs, logits.requires_grad_()
    return inputs, distribute_tensor(logits, mesh["tp"], [Shard(-1)], src_data_rank=None).requires_grad_()


def _stage(
    module: nn.Module, model: Decoder, plan: Plan, stage: int, mesh: DeviceMesh, device: torch.device
) -> PipelineStage:
    inputs, outputs = stage_examples(model, plan, stage, mesh)
    asked = "input_grads" in signature(PipelineStage).parameters  # for a DTensor's layout, from 2.13 on
    divided = asked and isinstance(outputs, DTensor)
    grads = {"input_grads": torch.empty_like(inputs), "output_grads": torch.empty_like(outputs)}
    return PipelineStage(
        module,
        stage,
        plan.n_stages,
        device,
        input_args=inputs,
        output_args=outputs,
        group=mesh.get_group("pp"),
        **(grads if divided else {}),  # type: ignore[arg-type]
    )


def _pipelined(
    stages: Sequence[PipelineStage], plan: Plan, scaler: GradScaler, tokens: Tensor, targets: Tensor
) -> Passes:
    kind, n = schedule_class(plan), plan.n_micro_batches

    def scaled_loss(logits: Tensor, y: Tensor) -> Tensor:
        return scaler.scale(token_loss(logits, y, chunks=plan.loss_chunks) / n)

    alone = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if alone else list(stages), n, loss_fn=scaled_loss, scale_grads=False)  # type: ignore[arg-type]
    arguments = (tokens,) if any(stage.is_first for stage in stages) else ()
    has_loss = any(stage.is_last for stage in stages)

    def run() -> float | None:
        with _loss_context(plan):
            if not has_loss:
                schedule.step(*arguments, return_outputs=False)
                return None
            losses: list[Tensor] = []
            schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        return sum(map(_number, losses)) / scaler.get_scale()

    return run
