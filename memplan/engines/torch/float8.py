"""torchao's weights that FSDP2 gathers in float8: the cast of a rank's shard, and the scales.

Source: `torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather`.
"""

from collections.abc import Iterable, Iterator, Sequence

from memplan.engines.torch.stage import Stage, stored_dtype
from memplan.engines.torch.units import ALL_GATHER
from memplan.kernels import norm_scratch
from memplan.record import Collective, Event, allocs, frees
from memplan.shapes import FP32, FP64, UINT8, Buffer, DType, Parameter, buffer_of


class Float8Cast:
    """The cast of a shard of a weight to `data` in float8, by a `scale` that is of the whole weight.

    A dynamic scale follows from the largest number of the whole weight, which an all-reduce finds. A
    precomputed one is a part of the tensor of all weights' scales. `events`: the allocations, the frees and
    the all-reduce of a cast, which leaves `data` and, if dynamic, `scales`.

    Neglects: the time of its kernels, as of all casts before an all-gather.

    Source: `torchao.float8.float8_scaling_utils:hp_tensor_to_float8_dynamic`,
    `torchao.float8.float8_utils:tensor_to_scale`,
    `torchao.float8.float8_training_tensor:hp_tensor_and_scale_to_float8`.
    """

    def __init__(self, stage: Stage, p: Parameter, n_elements: int, dtype: DType) -> None:
        self.stage = stage
        self.stored = stored_dtype(p, stage.weight_dtype)
        self.name, self.shape = p.name, (n_elements,)
        is_dynamic = stage.options.float8_all_gather == "dynamic"
        self.data = buffer_of(f"{p.name} (own shard as {dtype.name})", self.shape, dtype)
        self.scales = (buffer_of(f"{p.name} (scale)", (), FP32),) * is_dynamic
        self.events = (*(self._scaled() if is_dynamic else ()), *self._cast())

    def _scaled(self) -> Iterator[Event]:
        """The largest absolute number over all ranks, and the scale in float64, then in float32."""
        dtype, name = self.stored, self.name
        absolute = buffer_of(f"{name} (absolute numbers)", self.shape, dtype)
        own, largest = (buffer_of(f"{name} ({what})", (), dtype) for what in ("own largest", "largest"))
        widened, clamped, wide = (buffer_of(f"{name} (scale, {i})", (), FP64) for i in range(3))
        sizes = norm_scratch(self.stage.device, *self.shape, itemsize=dtype.itemsize)
        scratch = [buffer_of(f"{name} (scratch of a maximum)", (size,), UINT8) for size in sizes]
        yield from (*allocs(absolute, own, *scratch), *frees(*scratch, absolute), *allocs(largest))
        yield Collective(
            kind="all_reduce",
            axis=self.stage.plan.shard_group,
            what="largest numbers of weights",
            payload_bytes=dtype.itemsize,
            stream=ALL_GATHER,
        )
        yield from (*frees(own), *allocs(widened, clamped, wide), *frees(clamped))
        yield from (*allocs(*self.scales), *frees(wide, widened, largest))

    def _cast(self) -> Iterator[Event]:
        """The shard times its scale in float32, the same clamped to float8's range, and its cast."""
        names = f"{self.name} (widened)", f"{self.name} (scaled)", f"{self.name} (clamped)"
        widened, scaled, clamped = (buffer_of(name, self.shape, FP32) for name in names)
        casts = [widened] * (self.stored != FP32)
        yield from (*allocs(*casts, scaled), *frees(*casts), *allocs(clamped, self.data))
        yield from frees(clamped, scaled)


def precomputed_scales(parts: Iterable[tuple[Sequence[Parameter], int]]) -> Buffer:
    """One tensor: the scales of all weights that are gathered in float8, made after the optimizer's step.

    Neglects: the tensor of the step before, which unsharded weights hold until the next all-gather.

    Source: `torchao.float8.fsdp_utils:precompute_float8_dynamic_scale_for_fsdp`.
    """
    n = sum([times for own, times in parts for p in own if p.gathered_as])
    return buffer_of("scales of weights in float8", (n,), FP32)
