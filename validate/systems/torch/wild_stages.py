"""Other people's modules cut into pipeline stages of their blocks, by hand as their users do it.

Each stage is the whole module without the other stages' blocks, embedding or head. The last one computes the
loss if the module does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from memplan import Plan
from memplan.plan import stage_layers
from memplan.tracing.torchtitan import token_loss
from validate.systems.torch.parallelize import torch_dtype
from validate.systems.torch.passes import Passes, schedule_class

WIDTH: Final = 64
VOCABULARY: Final = 1000
POSITIONS: Final = "positions"
"""The width of the tensor between blocks, the size of the vocabulary, torchtitan's name of positions."""

LABELS: Final = ("labels", "shift_labels")
OF_ALL: Final = ("position_ids", POSITIONS)
"""Names of the inputs of the last stage, and of each one."""

EMBEDDING: Final = ("emb_dropout", "wpe", "drop", "embed_positions")
"""Names of modules before the blocks, besides the token embedding."""

LAST_NORMS: Final = ("norm", "final_layer_norm", "ln_f")
"""Names of the norm after the blocks in decoders of transformers."""


class WildStage(nn.Module):
    """A pipeline stage, which calls `run` with tokens or with the output of the stage before."""

    def __init__(self, module: nn.Module, run: Callable[..., Tensor], plan: Plan) -> None:
        super().__init__()
        self.module = module
        self.run = run
        self.plan = plan

    def forward(self, x: Tensor, **named: Tensor) -> Tensor:
        with autocast(self.plan, x.device):
            return self.run(x, **named)


def loss_of_output(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with the targets."""
    return F.cross_entropy(output.flatten(0, targets.dim() - 1), targets.flatten())


def autocast(plan: Plan, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to the plan's compute type; nothing if the plan has none."""
    if plan.autocasts:
        return torch.autocast(device.type, torch_dtype(plan.formats.compute))
    return nullcontext()


def wild_stage(module: nn.Module, path: str, plan: Plan, stage: int) -> WildStage:
    """A stage of a module whose blocks are in the list at `path`; the module itself is cut."""
    first, last = stage == 0, stage == plan.n_stages - 1
    blocks = list(module.get_submodule(path).children())
    layers = stage_layers(len(blocks), plan, stage)
    module.set_submodule(path, nn.ModuleList([blocks[i] for i in layers]))
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds is not None:
        cast(Any, module).config.layer_types = [kinds[i] for i in layers]
    if hasattr(module, "base_model"):
        return WildStage(module, _of_transformers(cast(Any, module), first=first, last=last), plan)
    if not first:
        module.embedding = nn.Identity()
    if not last:
        module.head = nn.Identity()
    return WildStage(module, lambda x: cast(Tensor, module(x)), plan)


def _of_transformers(module: Any, *, first: bool, last: bool) -> Callable[..., Tensor]:
    """The forward function of a stage of a transformers decoder, whose other embedding or head is removed."""
    base = getattr(module.base_model, "decoder", module.base_model)
    if not first:
        base.set_input_embeddings(nn.Identity())
        for name in EMBEDDING:
            if hasattr(base, name):
                setattr(base, name, nn.Identity())
    if not last:
        module.set_output_embeddings(nn.Identity())
        name = next(name for name in LAST_NORMS if hasattr(base, name))
        setattr(base, name, nn.Identity())

    def run(x: Tensor, **named: Tensor) -> Tensor:
        called = {"input_ids" if first else "inputs_embeds": x, **named}
        if last:
            return cast(Tensor, module(**called).loss)
        return cast(Tensor, base(**called).last_hidden_state)

    def run_blocks(x: Tensor, labels: Tensor | None = None) -> Tensor:
        for block in base.h if hasattr(base, "h") else base.layers:
            x = block(x, use_cache=False)
        if not last:
            return x
        logits = module.lm_head(next(getattr(base, name) for name in LAST_NORMS if hasattr(base, name))(x))
        return cast(Tensor, module.loss_function(logits, labels, vocab_size=module.config.vocab_size))

    adds_positions = hasattr(base, "wpe") or hasattr(base, "embed_positions")
    return run_blocks if adds_positions and not first else run


def wild_pipeline(
    stages: Mapping[int, nn.Module],
    plan: Plan,
    inputs: Mapping[str, Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    scaler: GradScaler,
    *,
    width: int,
    vocabulary: int,
) -> Passes:
    """Forward and backward of one step over this rank's stages by the plan's schedule.

    Stages send each other tensors of this `width`. The first of the `inputs` is for the first stage, labels
    are for the last one, and positions for each. The loss is computed from the last stage's output, of this
    `vocabulary`, or (0) it returns the loss, both under autocast.
    """
    kind, n, returns_loss = schedule_class(plan), plan.n_micro_batches, not vocabulary
    loss = token_loss if POSITIONS in inputs else loss_of_output
    output = () if returns_loss else (plan.micro_batch, plan.local_seq_len, vocabulary)
    made = [_stage(module, i, plan, width, output, mesh, device) for i, module in stages.items()]

    def mean(y: Tensor, target: Tensor) -> Tensor:
        with autocast(plan, device):
            share = (y if returns_loss else loss(y, target)) / n
        return scaler.scale(share)

    alone = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(made[0] if alone else made, n, loss_fn=mean, scale_grads=False)  # type: ignore[arg-type]
    has_first, has_loss = any(stage.is_first for stage in made), any(stage.is_last for stage in made)

    def run() -> float | None:
        arguments = [value for name, value in inputs.items() if name not in (*LABELS, *OF_ALL, "targets")]
        kept = (*LABELS, *OF_ALL) if has_loss else OF_ALL
        called: dict[str, Any] = {name: value for name, value in inputs.items() if name in kept}
        called["return_outputs"] = False
        if not has_loss:
            schedule.step(*(arguments if has_first else ()), **called)
            return None
        losses: list[Tensor] = []
        targets = inputs[LABELS[0] if returns_loss else "targets"]
        schedule.step(*(arguments if has_first else ()), target=targets, losses=losses, **called)
        return sum([float(loss.detach()) for loss in losses]) / scaler.get_scale()

    return run


def _stage(
    module: nn.Module,
    stage: int,
    plan: Plan,
    width: int,
    output: Sequence[int],
    mesh: DeviceMesh,
    device: torch.device,
) -> PipelineStage:
    compute = torch_dtype(plan.formats.compute)
    dtype = torch_dtype(plan.formats.stored) if plan.mixed and not plan.fsdp else compute
    shape = plan.micro_batch, plan.local_seq_len
    between = torch.empty(*shape, width, dtype=dtype, device="meta", requires_grad=True)
    first = torch.empty(shape, dtype=torch.int64, device="meta")
    of_last = torch.empty(output, dtype=compute if output else torch.float32, device="meta")
    return PipelineStage(
        module,
        stage,
        plan.n_stages,
        device,
        input_args=between if stage else first,
        output_args=of_last.requires_grad_() if stage == plan.n_stages - 1 else between,
        group=mesh.get_group("pp"),
    )
