"""Precisions as values: the number formats of a training run, one row for each.

`PRECISIONS` has memplan's own. Another package adds one by an entry point of the group `memplan.precisions`
(see `memplan.registry`), whose object is a `Precision`.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, final

from memplan.registry import Registry
from memplan.shapes import BF16, FP16, FP32, DType


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The number formats of a training run.

    Attributes:
        stored: type of weights between steps, and of optimizer state.
        compute: type of matrix products and of their results.
        gather: type in which sharded weights are all-gathered (FSDP2's `param_dtype`).
        reduce: type in which sharded gradients are reduced, and summed before that (`reduce_dtype`).
        accumulate: type in which gradients are kept from micro-batch to micro-batch, and read by the
            optimizer.
        matmul: the format whose peak rate matrix products have; TF32 is off by default in torch.
        loss_scaled: whether the loss is scaled, so that small gradients do not become 0.
        autocast: whether passes run under autocast to `compute` although weights are in it: on CUDA norms,
            powers and losses are then computed in float32. Weights in a wider type are cast anyway.
    """

    stored: DType
    compute: DType
    gather: DType
    reduce: DType
    accumulate: DType
    matmul: Literal["fp32", "bf16", "fp16"]
    loss_scaled: bool = False
    autocast: bool = False


def _precision(
    compute: DType, rest: DType, matmul: Literal["fp32", "bf16", "fp16"], **others: Any
) -> Precision:
    """Products and gathered weights in one format, the rest, but for `others`, in another."""
    types = {"compute": compute, "gather": compute, "stored": rest, "reduce": rest, "accumulate": rest}
    return Precision(**types | others, matmul=matmul)


PRECISIONS: Final = Registry(
    what="precision",
    kind=Precision,
    own={
        "fp32": _precision(FP32, FP32, "fp32"),
        "bf16": _precision(BF16, BF16, "bf16"),
        "bf16-autocast": _precision(BF16, BF16, "bf16", autocast=True),
        "bf16-reduce-fp32": _precision(BF16, BF16, "bf16", reduce=FP32),
        "bf16-mixed": _precision(BF16, FP32, "bf16"),
        "bf16-mixed-reduce-bf16": _precision(BF16, FP32, "bf16", reduce=BF16),
        "fp16-mixed": _precision(FP16, FP32, "fp16", loss_scaled=True),
    },
)
"""The precisions by name."""
