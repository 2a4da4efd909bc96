"""DeepSpeed's PipelineModule of a decoder, and its engine, whose `train_batch` is a step."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from memplan.engines.deepspeed.options import deepspeed_options
from memplan.mesh import Group
from memplan.models import Decoder
from memplan.models.gpt import Gpt
from memplan.plan import Rank
from memplan.tracing.torchtitan import rotations
from validate.cases import Case
from validate.systems.deepspeed.training import MASTERS, DeepSpeedTraining
from validate.systems.torch.modules import Transformer, token_loss
from validate.systems.torch.parallelize import stage_module, torch_dtype
from validate.systems.torch.passes import batch


class Layer(Transformer):
    """One layer of a pipeline on the host, in the type it computes in: a block, or an end of the model.

    Its weights have no values, and its rotary angles are `shared` with the other layers of the rank.
    """

    def __init__(
        self, case: Case, layers: range, shared: Tensor | None, *, first: bool = False, last: bool = False
    ) -> None:
        model = cast(Decoder, case.model)
        with torch.device("meta"):
            super().__init__(model, layers, seq_len=case.plan.seq_len, first=first, last=last)
        del self._buffers["rotation"]
        object.__setattr__(self, "rotation", shared)
        self.recompute = case.plan.recompute
        for one in self.parameters():
            one.data = one.data.to(torch_dtype(case.plan.formats.compute))
        self.to_empty(device="cpu")


class Embedding(Layer):
    """The embedding of tokens."""


class Block(Layer):
    """A block."""


class Head(Layer):
    """The last norm, and the projection to the vocabulary."""


def _layers(case: Case, device: torch.device) -> list[Any]:
    """The layers of the whole model, which are built on the rank that has them."""
    spec, model = import_module("deepspeed.pipe").LayerSpec, cast(Decoder, case.model)
    shared = None
    if not isinstance(model, Gpt):
        angles = rotations(case.plan.seq_len, model.d_head, cast(Any, model).rope_theta, torch.device("cpu"))
        shared = angles.to(device)
    none = range(0)
    blocks = [spec(Block, case, range(i, i + 1), shared) for i in range(model.n_layers)]
    return [
        spec(Embedding, case, none, shared, first=True),
        *blocks,
        spec(Head, case, none, shared, last=True),
    ]


class PipelineTraining(DeepSpeedTraining):
    """A step is `train_batch` in two halves: passes and reductions, then the update and the step's loss."""

    def __init__(
        self, engine: Any, case: Case, at: Rank, device: torch.device, axes: dict[str, Group]
    ) -> None:
        plan, model = case.plan, cast(Decoder, case.model)
        super().__init__(engine, plan, lambda _: engine.loss, axes)
        self._micro_batches: Sequence[tuple[Tensor, Tensor]] = ()
        if engine.is_first_stage() or engine.is_last_stage():
            tokens, targets = batch(model, plan, at, seed=case.seed, device=device)
            n = plan.n_micro_batches
            self._micro_batches = list(zip(tokens.chunk(n), targets.chunk(n), strict=True))

    def gradients(self) -> float | None:
        engine = self._engine
        step = import_module("deepspeed.runtime.pipe.schedule").OptimizerStep
        without = engine._INSTRUCTION_MAP | {step: lambda _: None}
        with (
            patch.object(engine, "_INSTRUCTION_MAP", without),
            patch.object(engine, "_aggregate_total_loss", lambda: engine.agg_train_loss),
            patch.object(engine, "steps_per_print", lambda: None),  # it says how fast, before the update
        ):
            engine.train_batch(iter(self._micro_batches))
        return float(engine.total_loss) / self._n_micro_batches if engine.is_last_stage() else None

    def update(self) -> None:
        engine = self._engine
        engine._exec_optimizer_step()
        with torch.no_grad():
            engine.agg_train_loss = engine._aggregate_total_loss()
        if engine.skipped_steps or not self.optimizer_states():
            raise RuntimeError(f"DeepSpeed has skipped {engine.skipped_steps} steps ('OVERFLOW!').")

    @property
    def _masters(self) -> str:
        is_bf16 = hasattr(self._engine.optimizer, "fp32_groups_flat_partition")
        return "fp32_groups_flat_partition" if is_bf16 else MASTERS[self._zero]

    def weights(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        return getattr(optimizer, "bf16_groups_flat", None) or super().weights()

    def grads(self) -> Sequence[Tensor]:
        own = super().grads()
        return [*own, *getattr(self._engine.optimizer, "fp32_groups_gradients_flat", ())]

    def optimizer_states(self) -> Sequence[Tensor]:
        optimizer = self._engine.optimizer
        moments = [one for state in optimizer.optimizer.state.values() for one in state.values()]
        return [*getattr(optimizer, self._masters), *(one for one in moments if isinstance(one, Tensor))]

    def gradient_norm_squared(self) -> float:
        """Each rank of a stage has its own partition under ZeRO-1; all have what BF16_Optimizer sums."""
        optimizer = self._engine.optimizer
        flat = getattr(optimizer, "fp32_groups_gradients_flat", None) or self.grads()
        total = torch.stack([one.double().square().sum() for one in flat]).sum()
        if self._zero:
            dist.all_reduce(total, group=self._engine.grid.get_data_parallel_group())
        return float(total)


def pipelined(case: Case, at: Rank, device: torch.device, config: dict[str, Any]) -> PipelineTraining:
    """DeepSpeed's pipeline engine on one rank."""
    import deepspeed

    pipe: Any = import_module("deepspeed.pipe")
    plan, options = case.plan, deepspeed_options(case.plan)
    module = pipe.PipelineModule(
        _layers(case, device),
        num_stages=plan.pp,
        loss_fn=partial(token_loss, chunks=plan.loss_chunks),
        partition_method=options.partition_method,
        activation_checkpoint_interval=options.activation_checkpoint_interval,
        checkpointable_layers=[Block.__name__] if options.activation_checkpoint_interval else None,
    )
    if case.computes:
        alone = case.reference().plan
        weights = stage_module(
            cast(Decoder, case.model), alone, 0, seed=case.seed, device=device
        ).state_dict()
        for layer in module.forward_funcs:
            layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    engine, *_ = deepspeed.initialize(
        model=module,
        config=config,
        model_parameters=[one for one in module.parameters() if one.requires_grad],
    )
    if not case.computes:
        engine._recv_tensor_meta = _told(engine, case, device)
    return PipelineTraining(engine, case, at, device, _axes(engine.grid))


def _axes(grid: Any) -> dict[str, Group]:
    """The axis of each group of DeepSpeed's grid; sends are among the group of all ranks."""
    found: dict[str, Group] = {str(cast(Any, dist.group.WORLD).group_name): "pp"}
    for group in (grid.get_pipe_parallel_group(), grid.get_model_parallel_group()):
        found[str(group.group_name)] = "pp"
    found[str(grid.get_data_parallel_group().group_name)] = "dp"
    return found


def _told(engine: Any, case: Case, device: torch.device) -> Callable[[int], Any]:
    """What receives the shape that the stage before sends: nobody sends any, so it is told here."""
    p2p: Any = import_module("deepspeed.runtime.pipe.p2p")
    plan, receive, own = case.plan, p2p.recv, engine._recv_tensor_meta
    shape = plan.micro_batch, plan.seq_len, case.model.d_model
    dtype = engine.DTYPE_TO_ID[torch_dtype(plan.formats.compute)]
    told = torch.tensor([0, dtype, len(shape), *shape], dtype=torch.int32)

    def received(tensor: Tensor, stage: int) -> Any:
        found = receive(tensor, stage)
        tensor[: len(told)].copy_(told)
        return found

    def recv_tensor_meta(stage: int) -> Any:
        with patch.object(p2p, "recv", received):
            return own(stage)

    return recv_tensor_meta
