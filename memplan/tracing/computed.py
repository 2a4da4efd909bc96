"""What operations compute: the kind and the operands of products, attention and convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memplan.record import ComputeKind
from memplan.shapes import Shape
from memplan.tracing.scratch import CONVOLUTION, CONVOLUTION_BACKWARD
from memplan.tracing.shapes import ATEN, dtype_name


class Computed(NamedTuple):
    """A computation; `flops` are only counted where its operands are not known."""

    kind: ComputeKind
    operands: tuple[Shape, ...]
    flops: int
    shape: Shape
    dtype: str


_ATTENTION: Final = ComputeKind.ATTENTION, slice(3)
_ATTENTION_BACKWARD: Final = ComputeKind.ATTENTION_BACKWARD, slice(1, 4)

PLACES: Final[Mapping[Any, tuple[ComputeKind, slice]]] = {
    ATEN.mm: (ComputeKind.MM, slice(2)),
    ATEN.addmm: (ComputeKind.MM, slice(1, 3)),
    ATEN._int_mm: (ComputeKind.MM, slice(2)),
    ATEN.bmm: (ComputeKind.BMM, slice(2)),
    ATEN.baddbmm: (ComputeKind.BMM, slice(1, 3)),
    ATEN._scaled_mm: (ComputeKind.SCALED_MM, slice(2)),
    ATEN._grouped_mm: (ComputeKind.GROUPED_MM, slice(2)),
    ATEN._scaled_dot_product_efficient_attention: _ATTENTION,
    ATEN._scaled_dot_product_flash_attention: _ATTENTION,
    ATEN._scaled_dot_product_cudnn_attention: _ATTENTION,
    ATEN._scaled_dot_product_efficient_attention_backward: _ATTENTION_BACKWARD,
    ATEN._scaled_dot_product_flash_attention_backward: _ATTENTION_BACKWARD,
    ATEN._scaled_dot_product_cudnn_attention_backward: _ATTENTION_BACKWARD,
}
"""The kind of operations, and the places of their operands among their arguments."""


def computed_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor], out: Any
) -> tuple[Computed, ...]:
    """What an operation computes on the device; of what has no kind, the FLOPs that PyTorch's counter knows.

    Neglects: CPU's fused attention, which that counter does not know.
    Source: torch.utils.flop_counter.
    """
    if not results:
        return ()
    if func in (CONVOLUTION, CONVOLUTION_BACKWARD):
        return _convolved(args, results, backward=func is CONVOLUTION_BACKWARD)
    packet, flops = func._overloadpacket, 0
    if packet in PLACES:
        kind, places = PLACES[packet]
        operands = [tuple(operand.shape) for operand in args[places]]
    elif packet in flop_registry:
        kind, operands = ComputeKind.UNKNOWN, []
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    else:
        return ()
    if kind in (ComputeKind.ATTENTION, ComputeKind.ATTENTION_BACKWARD):
        operands = [(batch, seq, heads, width) for batch, heads, seq, width in operands]
    return (Computed(kind, tuple(operands), flops, tuple(results[0].shape), dtype_name(results[0].dtype)),)


def _convolved(args: Sequence[Any], results: Sequence[Tensor], *, backward: bool) -> tuple[Computed, ...]:
    """A convolution, or the gradients of its input and of its weight.

    PyTorch's counter takes all channels to meet in the gradient of a weight whose channels are in groups.
    """
    output, image, weight = args[:3] if backward else (results[0], *args[:2])
    transposed, made = args[7 if backward else 6], results[: sum(args[-1][:2]) if backward else 1]
    operands = tuple(weight.shape), tuple((image if transposed else output).shape)
    return tuple(
        [
            Computed(ComputeKind.CONVOLUTION, operands, 0, tuple(one.shape), dtype_name(one.dtype))
            for one in made
        ]
    )
