"""One rank's training loop: the same tokens each step, one optimizer step at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from memplan import Model, Plan
from validate.modules import token_loss
from validate.parallelize import Coordinates

Gradients = Callable[[], float | None]
"""Runs forward and backward of a whole step; the rank's mean loss, None where there is no last stage."""


def batch(
    model: Model, plan: Plan, at: Coordinates, *, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """This replica's token ids and targets, both (global_batch / dp, seq_len).

    The global batch is drawn from the seed and replica i takes its i-th part.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(model.vocab_size, (plan.global_batch, plan.seq_len + 1), generator=generator)
    mine = text.chunk(plan.dp)[at.dp].to(device)
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def gradients(
    module: nn.Module,
    model: Model,
    plan: Plan,
    at: Coordinates,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    seed: int,
) -> Gradients:
    """Forward and backward of one step, accumulated over micro-batches or pipelined."""
    tokens, targets = batch(model, plan, at, seed=seed, device=device)
    if plan.pp > 1 and mesh is not None:
        return _pipelined(module, model, plan, at, mesh, device, tokens, targets)
    return _accumulated(module, plan, tokens, targets)


def _loss_context(plan: Plan) -> AbstractContextManager[None]:
    return loss_parallel() if plan.tp > 1 else nullcontext()


def _number(loss: Tensor) -> float:
    loss = loss.detach()
    return float(loss.to_local() if isinstance(loss, DTensor) else loss)


def _accumulated(module: nn.Module, plan: Plan, tokens: Tensor, targets: Tensor) -> Gradients:
    n = plan.n_micro_batches
    micro_batches = list(zip(tokens.chunk(n), targets.chunk(n), strict=True))

    def run() -> float:
        total = 0.0
        for i, (x, y) in enumerate(micro_batches):
            held = isinstance(module, DistributedDataParallel) and i < n - 1
            with module.no_sync() if held else nullcontext(), _loss_context(plan):  # type: ignore[operator]
                loss = token_loss(module(x), y) / n
                loss.backward()
            total += _number(loss)
            del loss
        return total

    return run


def stage_examples(model: Model, plan: Plan, at: Coordinates, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """One micro-batch of this stage's input and output, without data.

    Stating them keeps PyTorch from inferring them by a real backward pass, which DDP takes for its own.
    The residual stream is bfloat16 where the weights that made it are (bf16, and FSDP2's mixed precision);
    under autocast it stays float32.
    """
    sharded = plan.dp > 1 and plan.zero >= 2
    low = plan.precision == "bf16" or (plan.precision == "bf16-mixed" and sharded)
    dtype = torch.bfloat16 if low else torch.float32
    between = plan.seq_len // plan.tp if plan.sequence_parallel else plan.seq_len
    hidden = torch.empty(
        plan.micro_batch, between, model.d_model, dtype=dtype, device="meta", requires_grad=True
    )
    first = torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.int64, device="meta")
    inputs = hidden if at.pp else first
    if at.pp < plan.pp - 1:
        return inputs, hidden
    half = torch.float32 if plan.precision == "fp32" else torch.bfloat16
    logits = torch.empty(plan.micro_batch, plan.seq_len, model.vocab_size, dtype=half, device="meta")
    if plan.tp == 1:
        return inputs, logits.requires_grad_()
    return inputs, distribute_tensor(logits, mesh["tp"], [Shard(-1)], src_data_rank=None).requires_grad_()


def _pipelined(
    module: nn.Module,
    model: Model,
    plan: Plan,
    at: Coordinates,
    mesh: DeviceMesh,
    device: torch.device,
    tokens: Tensor,
    targets: Tensor,
) -> Gradients:
    inputs, outputs = stage_examples(model, plan, at, mesh)
    divided = isinstance(outputs, DTensor)
    stage = PipelineStage(
        module,
        at.pp,
        plan.pp,
        device,
        input_args=inputs,
        output_args=outputs,
        input_grads=torch.empty_like(inputs) if divided else None,
        output_grads=torch.empty_like(outputs) if divided else None,
        group=mesh.get_group("pp"),
    )
    kind = ScheduleGPipe if plan.schedule == "gpipe" else Schedule1F1B
    n = plan.n_micro_batches
    schedule = kind(stage, n, loss_fn=lambda logits, y: token_loss(logits, y) / n, scale_grads=False)
    arguments = (tokens,) if stage.is_first else ()

    def run() -> float | None:
        with _loss_context(plan):
            if not stage.is_last:
                schedule.step(*arguments, return_outputs=False)
                return None
            losses: list[Tensor] = []
            schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        return sum(map(_number, losses))

    return run
