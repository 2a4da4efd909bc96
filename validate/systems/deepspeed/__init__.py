"""DeepSpeed itself, set up from a plan; needs `pip install deepspeed` beside PyTorch.

On CPU ranks it trains, with DeepSpeed's CPU accelerator and CPU FusedAdam. Without a GPU one rank runs for
its bytes: CUDA kernels compute nothing there, so `patches` replaces the calls that read their results.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memplan import Plan
from memplan.engines.deepspeed.options import DEEPSPEED_VERSION, OF_STAGE_3, deepspeed_options
from memplan.errors import MemplanError, PlanRefused
from memplan.models import Decoder
from memplan.models.llama import Llama
from memplan.models.torchtitan import TorchtitanLlama
from memplan.tracing.torchtitan import rotations
from validate.cases import Case
from validate.predict import axis_of
from validate.standin import materialised
from validate.systems import Training
from validate.systems.deepspeed.patches import without_kernels, without_shared_memory
from validate.systems.deepspeed.tensor_parallel import agree, axes_of_groups, on_the_host
from validate.systems.deepspeed.ulysses import divided_sequences, losses_of_pieces
from validate.systems.torch import modules
from validate.systems.torch.modules import Transformer
from validate.systems.torch.parallelize import stage_module, torch_dtype
from validate.systems.whole import axis_of_groups, losses, module_of_others

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

    `loss_of`: the loss of the i-th micro-batch. `groups`: DeepSpeed's, where ranks divide sequences.
    """

    def __init__(self, engine: Any, plan: Plan, loss_of: Callable[[int], Tensor], groups: Any = None) -> None:
        axes = axes_of_groups() if plan.tp > 1 else axis_of_groups(plan.shard_group)
        if groups is not None:
            axes[groups.get_sequence_parallel_group().group_name] = axis_of(plan.mesh, "cp")
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
                "and its bytes are not those of a training."
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


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's engine on this rank.

    Raises:
        MemplanError: where DeepSpeed is not installed.
        PlanRefused: on a real GPU, and for a rank of a world that is not there on a CPU.
    """
    if find_spec("deepspeed") is None:
        raise MemplanError(
            f"engine='deepspeed' is run by DeepSpeed itself; use pip install deepspeed=={DEEPSPEED_VERSION}."
        )
    if (case.device, case.rank is None) not in (("nogpu", False), ("cpu", True)):
        raise PlanRefused(
            "engine='deepspeed' is run on CPU ranks, or without a GPU, one rank of a world; use the suite "
            "deepspeed, or gpu-deepspeed with --device nogpu."
        )
    plan, at = case.plan, case.plan.place(rank)
    os.environ.update(_ranks(plan, rank))
    if case.computes:
        os.environ["DS_ACCELERATOR"] = "cpu"
    config = configuration(plan, case.learning_rate)
    with without_shared_memory() if case.computes else without_kernels():
        import deepspeed

        deepspeed.init_distributed(dist.get_backend(), verbose=False, dist_init_required=False)
        module = _module(case, device, config)
        groups = divided_sequences(module, plan)
        engine, *_ = deepspeed.initialize(
            model=module,
            config=config,
            mpu=groups,
            model_parameters=[one for one in module.parameters() if one.requires_grad],
        )
    if plan.tp > 1:
        agree(engine)
    of_rank = losses if groups is None else losses_of_pieces
    return DeepSpeedTraining(engine, plan, of_rank(case, engine, at, device), groups)


def _ranks(plan: Plan, rank: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(min(plan.world_size, 8)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _module(case: Case, device: torch.device, config: dict[str, Any]) -> nn.Module:
    """The model in the type that DeepSpeed makes it, on the device; under ZeRO-3 in partitions.

    Where its values mean something it has the weights of the case's seed, whole: `initialize` divides them.
    """
    import deepspeed

    model, plan = case.model, case.plan
    half = torch_dtype(plan.formats.compute)
    if case.computes:
        own = stage_module(cast(Decoder, model), plan, 0, seed=case.seed, device=device)
        own.recompute, own.recompute_blocks = plan.recompute, plan.recompute_blocks
        for one in own.parameters():
            one.data = one.data.to(half)
        return own
    with ExitStack() as stack:
        if plan.zero == 3:
            stack.enter_context(_in_float32(case, device))
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config, dtype=half))
        stack.enter_context(device if plan.zero == 3 else torch.device("meta"))
        made: nn.Module = module_of_others(case) if case.is_of_others else _own(cast(Decoder, model), plan)
    made.train()
    for one in made.parameters():
        one.data = one.data.to(half)
    return on_the_host(made) if plan.tp > 1 else materialised(made, device)


@contextmanager
def _in_float32(case: Case, device: torch.device) -> Iterator[None]:
    """A block in which `zero.Init` makes rotary angles in their own type: memplan's are made before."""
    model = case.model
    with ExitStack() as stack:
        if case.is_of_others:
            integration = import_module("transformers.integrations.deepspeed")
            stack.enter_context(integration.prevent_arange_dtype_change())
        elif isinstance(model, Llama | TorchtitanLlama):
            angles = rotations(case.plan.seq_len, model.d_head, model.rope_theta, device)
            stack.enter_context(patch.object(modules, "rotations", lambda *_: angles))
        yield


def _own(model: Decoder, plan: Plan) -> Transformer:
    """The model in memplan's own modules."""
    made = Transformer(model, range(model.n_layers), seq_len=plan.seq_len)
    made.recompute, made.recompute_blocks = plan.recompute, plan.recompute_blocks
    return made
