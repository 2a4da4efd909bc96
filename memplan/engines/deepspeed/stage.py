"""The model of a rank under DeepSpeed: its weights in one type, what it holds beside ZeRO's states."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

from memplan.device import Device
from memplan.engines.deepspeed.options import deepspeed_options
from memplan.memory import Alive
from memplan.models import Model, of_sizes, under_deepspeed
from memplan.models.recording import ULYSSES
from memplan.parts.stage import WholeStage
from memplan.passes.trace import BlockKind, Segment, Trace
from memplan.plan import Plan
from memplan.record import Event
from memplan.shapes import FP32, INT32, Buffer, DType, Parameter, buffer_of
from memplan.tape import Backend, OpContext


class DeepSpeedStage(WholeStage):
    """The whole model in the type it computes in: `module.half()` or `module.bfloat16()`.

    Source: `deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model`.
    """

    def __init__(self, model: Model, plan: Plan, device: Device, backend: Backend | None) -> None:
        degrees = {"cp": plan.cp, "tp": plan.tp}
        made = under_deepspeed(model, device.type, plan.precision, zero3=plan.zero == 3, **degrees)
        made = of_sizes(made, plan.micro_batch, plan.seq_len, device.type, plan.precision)
        super().__init__(made, plan, device, backend, plan.formats.compute)
        self.options = deepspeed_options(plan)

    @cached_property
    def op_context(self) -> OpContext:
        plan = self.plan
        return replace(super().op_context, hooks_modules=plan.zero == 3, cp=plan.cp, cp_rotate_method=ULYSSES)

    @property
    def reduced_dtype(self) -> DType:
        """The type in which gradients are reduced: float32 beside ranks that divide sequences.

        Source: `deepspeed.runtime.config:DeepSpeedConfig.seq_parallel_communication_data_type`.
        """
        return FP32 if self.plan.cp > 1 else self.dtype

    def sent_by_autotp(self) -> Iterator[tuple[Sequence[Parameter], tuple[Buffer, ...]]]:
        """The parameters and the buffers of its modules in the order in which they come to the GPU.

        Of a module that lies on the host AutoTP sends the shards: of blocks, of a head that is no block's and
        shares its weight with the embedding, or not. `module.to` sends what is left.
        """
        modules = [*self.modules()]
        for own, _ in (*modules[1:], *modules[:1]):
            yield [one for one in own if one.is_divided], ()
        for own, buffers in modules:
            yield [one for one in own if not one.is_divided], buffers

    @cached_property
    def rest(self) -> Alive:
        """What is alive between steps beside the optimizer's flat tensors."""
        frozen = [self.weights[one] for one in self.parameters() if not one.requires_grad]
        return Counter([*frozen, *self.held, *self.of_adam])

    @property
    def of_adam(self) -> list[Buffer]:
        """FusedAdam's overflow buffer; DeepSpeedCPUAdam allocates no buffer on the GPU."""
        on_gpu = self.options.offload_optimizer == "none"
        return [buffer_of("_dummy_overflow_buf", (1,), INT32)] * on_gpu


@final
class PipelineStage(DeepSpeedStage):
    """Some layers of the model, as a rank of a pipeline has them.

    Source: `deepspeed.runtime.pipe.module:PipelineModule._build`.
    """

    def __init__(self, whole: DeepSpeedStage, layers: range, blocks: range) -> None:
        super().__init__(whole.model, whole.plan, whole.device, whole.backend)
        self.whole, self.own, self.blocks_of_model = whole, layers, blocks
        self.first, self.last = layers.start == 0, layers.stop == whole.n_blocks + 2
        self.layers, self.n_blocks = whole.model.layers_in(blocks), len(blocks)

    @cached_property
    def checkpointed(self) -> tuple[range, ...]:
        """The blocks that are checkpointed together, without those that share an interval with an end.

        The block's class is in `checkpointable_layers`, the ends' are not.

        Source: `deepspeed.runtime.pipe.module:PipelineModule._is_checkpointable`.
        """
        n, each = self.n_blocks + self.first + self.last, self.options.activation_checkpoint_interval
        found = [range(start, min(start + each, n)) for start in range(0, n, each)] if each else []
        blocks = [range(one.start - self.first, one.stop - self.first) for one in found]
        return tuple([one for one in blocks if one.start >= 0 and one.stop <= self.n_blocks])

    @property
    def receiving(self) -> Trace:
        """The trace of these blocks on a stage that receives the gradient of its output."""
        if not self.last:
            return self.trace
        other = PipelineStage(self.whole, self.own, self.blocks_of_model)
        other.last = False
        return other.trace

    @cached_property
    def _with_blocks(self) -> Trace:
        """The trace, of checkpointed blocks too where DeepSpeed checkpoints any."""
        kinds = dict(self.runs)
        again = [BlockKind(kind, "full") for kind, _ in kinds if self.checkpointed]
        return self.traced((*kinds, *again))

    @cached_property
    def head(self) -> tuple[Segment, Segment]:
        """The head's passes; a stage without blocks clones its input for the head, as for a block."""
        trace = self._with_blocks
        return trace.head, trace.head_backward

    @cached_property
    def inputs(self) -> list[Buffer]:
        """The step's tokens and targets, which the first and the last stage are handed."""
        return super().inputs if self.first or self.last else []

    def draw_inputs(self) -> Iterator[Event]:
        return super().draw_inputs() if self.first or self.last else iter(())

    @cached_property
    def workspaces(self) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
        """What cuBLAS keeps; nothing beside an embedding alone."""
        return super().workspaces if self.n_blocks or self.last else ()
