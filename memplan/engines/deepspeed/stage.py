"""The model of a rank under DeepSpeed: its weights in one type, what it holds beside ZeRO's states."""

from collections import Counter
from functools import cached_property
from typing import final

from memplan.device import Device
from memplan.engines.deepspeed.options import deepspeed_options
from memplan.engines.stage import ModelStage, cublas_workspaces, trained
from memplan.memory import Alive
from memplan.models import Layers, Model, under_zero3
from memplan.plan import Plan
from memplan.shapes import INT32, Buffer, Parameter, buffer_of
from memplan.tape import USUAL_BACKENDS, Backend, OpContext


@final
class DeepSpeedStage(ModelStage):
    """The whole model in the type it computes in: `module.half()` or `module.bfloat16()`.

    Source: `deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model`.
    """

    def __init__(self, model: Model, plan: Plan, device: Device, backend: Backend | None) -> None:
        self.model = under_zero3(model, device.type, plan.precision) if plan.zero == 3 else model
        self.plan, self.device = plan, device
        self.options = deepspeed_options(plan)
        self.backend = backend or USUAL_BACKENDS[device.type]
        self.first = self.last = True
        self.layers: tuple[Layers, ...] = self.model.layers
        self.n_blocks = self.model.n_blocks
        self.dtype = plan.formats.compute

    @cached_property
    def op_context(self) -> OpContext:
        plan = self.plan
        return OpContext(
            device=self.device, backend=self.backend, weight_dtype=self.dtype, micro_batch=plan.micro_batch,
            seq_len=plan.seq_len, loss_chunks=plan.loss_chunks, hooks_modules=plan.zero == 3,
        )  # fmt: skip

    @cached_property
    def trained(self) -> list[Parameter]:
        """The optimizer's parameters, in the module's order."""
        return trained(self.parameters())

    @cached_property
    def weights(self) -> dict[Parameter, Buffer]:
        """Each weight as the module is made with it, and as it stays if it is not trained."""
        types = {one: self.dtype if one.is_floating_point else one.dtype for one in self.parameters()}
        return {one: buffer_of(one.name, one.shape, dtype, "weights") for one, dtype in types.items()}

    @cached_property
    def workspaces(self) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
        """The workspaces that cuBLAS keeps for forward and for backward passes."""
        passes = (self.trace.products, self.trace.products_backward)
        return cublas_workspaces(self.device, self.op_context.torch_release, passes)

    @cached_property
    def inputs(self) -> list[Buffer]:
        """The step's tokens and targets."""
        return list(self.model.inputs(self.plan.n_micro_batches * self.plan.micro_batch, self.plan.seq_len))

    @cached_property
    def rest(self) -> Alive:
        """What is alive between steps beside the optimizer's flat tensors."""
        frozen = [self.weights[one] for one in self.parameters() if not one.requires_grad]
        workspaces = [workspace for _, workspace in self.workspaces]
        return Counter([*frozen, *self.inputs, *self.buffers, *workspaces, *self.of_adam])

    @property
    def of_adam(self) -> list[Buffer]:
        """FusedAdam's overflow buffer; DeepSpeedCPUAdam allocates no buffer on the GPU."""
        on_gpu = self.options.offload_optimizer == "none"
        return [buffer_of("_dummy_overflow_buf", (1,), INT32)] * on_gpu
